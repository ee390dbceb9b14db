"""The image and the compose file, by what they name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import yaml

from docker.conftest import DOCKER, flags_in
from sglang_epd.config import Settings
from sglang_epd.media.limits import MediaLimits

SERVERS = {"encoder-0", "encoder-1", "prefill", "decode"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_the_image_is_sglangs_of_our_version_and_ends_as_nobody():
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    assert f"ARG SGLANG_IMAGE=lmsysorg/sglang:v{version('sglang')}" in lines
    users = [line for line in lines if line.startswith("USER ")]
    assert users[-1] == "USER 10001:10001"
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY")]
    for path in (path for paths in copied for path in paths):
        assert (DOCKER.parent / path).exists()


def test_what_the_image_has_is_kept_though_it_is_editable():
    """By the image's own command, of this environment, in which this package is editable."""
    text = (DOCKER / "Dockerfile").read_text()
    (command,) = re.findall(r"^RUN (python3 -m pip .*)>/src/kept\.txt", text, re.MULTILINE)
    command = command.replace("(sglang|", "(sglang|sglang-epd|")
    command = command.replace("python3", sys.executable)
    shown = subprocess.check_output(command, shell=True, text=True, timeout=120)
    kept = dict(line.split("==") for line in shown.split())
    assert kept == {name: version(name) for name in kept}
    assert set(kept) == {"sglang", "sglang-epd", "torch", "transformers"}


def test_what_is_named_is_there(compose):
    services = compose["services"]
    assert SERVERS | {"router", "prometheus", "grafana"} == set(services)
    for name, service in services.items():
        assert set(service["networks"]) <= set(compose["networks"]), name
        assert set(service.get("depends_on", ())) <= set(services), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            there = (
                (DOCKER / source).exists()
                if source.startswith(".")
                else source in compose["volumes"]
            )
            assert there, volume


def test_docker_reads_it(compose):
    """Where the client has `compose`; it asks no daemon."""
    client = ["docker", "compose"]
    try:
        known = subprocess.run([*client, "version"], capture_output=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("docker is not installed")
    if known.returncode:
        pytest.skip("docker has no compose")
    env = {**os.environ, "SGLANG_EPD_TOKEN": "token", "GRAFANA_PASSWORD": "password"}
    read = subprocess.run(
        [*client, "-f", DOCKER / "compose.yaml", "config", "--format", "json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert read.returncode == 0, read.stderr
    assert set(yaml.safe_load(read.stdout)["services"]) == set(compose["services"])


class WithReset(yaml.SafeLoader):
    """Compose's `!reset null`: what another file said is taken back."""


WithReset.add_constructor("!reset", lambda loader, node: RESET)
RESET = object()


def test_rdma_is_given_to_servers_and_takes_back_what_keeps_mooncake_off(compose):
    told = yaml.load((DOCKER / "compose.rdma.yaml").read_text(), Loader=WithReset)
    assert set(told["services"]) == {"prefill", "decode"}
    for name, change in told["services"].items():
        taken = {key for key, value in change["environment"].items() if value is RESET}
        assert taken == {"MC_FORCE_TCP"} <= set(compose["services"][name]["environment"])
        assert change["ulimits"] == {"memlock": -1}


def test_versions_are_pinned(compose):
    for service in compose["services"].values():
        assert re.fullmatch(r"\S+:v?\d+\.\S+", service["image"])
    assert compose["services"]["prefill"]["image"] == f"sglang-epd:{version('sglang-epd')}"


def test_flags_and_urls(compose, sglang_flags, router_flags):
    services = compose["services"]
    for name in SERVERS:
        assert flags_in(services[name]["command"]) <= sglang_flags
    assert flags_in(services["router"]["command"]) <= router_flags
    for service in services.values():
        for host in re.findall(r"http://([\w-]+):30000", " ".join(service.get("command", ()))):
            assert host in SERVERS


def test_settings_are_settings_and_the_token_has_to_be_given(compose):
    for name in SERVERS:
        told = compose["services"][name]["environment"]
        assert told["SGLANG_EPD_TOKEN"].startswith("${SGLANG_EPD_TOKEN:?")
        plain = {key: re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", value) for key, value in told.items()}
        settings = Settings.from_env(plain)
        MediaLimits.from_env(plain)
        assert bool(settings.store) is name.startswith("encoder")


def test_only_users_and_the_operator_get_in(compose):
    published = {name: one["ports"] for name, one in compose["services"].items() if "ports" in one}
    assert set(published) == {"router", "grafana"}
    assert published["grafana"] == ["127.0.0.1:3000:3000"]


def test_prometheus_asks_every_server_that_has_metrics(compose):
    told = yaml.safe_load((DOCKER / "observability" / "prometheus.yml").read_text())
    (job,) = told["scrape_configs"]
    asked = {target for one in job["static_configs"] for target in one["targets"]}
    assert asked == {f"{name}:30000" for name in SERVERS}
    for name in SERVERS:
        command = compose["services"][name]["command"]
        assert "--encoder-only" in command or "--enable-metrics" in command
    for name in told["rule_files"]:
        assert (DOCKER / "observability" / name).exists()
