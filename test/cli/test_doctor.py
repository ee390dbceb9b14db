from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import requests
from typer.testing import CliRunner

from hub import Hub, serving
from integration.listener import QuietHandler, listening, url_of
from make_checkpoint import ensure
from sglang_epd.cli.checks import Finding, Verdict, machine, ok, software
from sglang_epd.cli.checks.checkpoint import checkpoint
from sglang_epd.cli.checks.media import media
from sglang_epd.cli.checks.servers import _namespaces, servers
from sglang_epd.cli.main import app
from sglang_epd.cli.probes import target
from sglang_epd.cli.processes import free_port, unproxied

TOKEN = "0123456789abcdef0123"


def worst(findings: list[Finding]) -> Verdict:
    order = list(Verdict)
    return max((one.verdict for one in findings), key=order.index)


def test_this_environment_is_the_one_that_the_package_is_for():
    assert worst([*software.versions(), *software.plugins({})]) is Verdict.OK


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ("0.5.23", Verdict.OK),
        ("0.5.23+cu129", Verdict.OK),
        ("0.5.24", Verdict.FAIL),
        (None, Verdict.FAIL),
    ],
)
def test_another_version_of_sglang_is_named_with_the_right_one(monkeypatch, found, verdict):
    def version(name: str) -> str:
        if name == "sglang" and found is None:
            raise software.PackageNotFoundError
        return {"sglang": str(found), "sglang-router": "0.3.2"}.get(name, "0.1.0")

    monkeypatch.setattr(software, "version", version)
    (told,) = [one for one in software.versions() if one.subject == "sglang"]
    assert told.verdict is verdict
    assert (told.mend == "pip install sglang==0.5.23") is (verdict is Verdict.FAIL)


@pytest.mark.parametrize(
    ("env", "verdict"),
    [
        ({"SGLANG_PLUGINS": "sglang_epd,sglang_epd_cpu"}, Verdict.OK),
        ({"SGLANG_PLUGINS": "sglang_epd_cpu"}, Verdict.WARN),
        ({"SGLANG_EPD": "off"}, Verdict.WARN),
    ],
)
def test_a_plug_in_that_is_left_out_is_noticed(env, verdict):
    assert worst(list(software.plugins(env))) is verdict


@pytest.mark.parametrize(
    ("env", "verdict", "told"),
    [
        ({"SGLANG_EPD_TOKEN": TOKEN}, Verdict.OK, ""),
        ({}, Verdict.WARN, "openssl"),
        ({"SGLANG_EPD_TOKEN": "short"}, Verdict.WARN, "5 characters"),
        ({"SGLANG_EPD_TOKEN": " " + TOKEN}, Verdict.FAIL, "printable"),
        ({"SGLANG_EPD_TOKENS": TOKEN}, Verdict.FAIL, "SGLANG_EPD_TOKENS"),
        ({"SGLANG_EPD_MEDIA_MAX_MB": "x"}, Verdict.FAIL, "SGLANG_EPD_MEDIA_MAX_MB"),
        ({"SGLANG_EPD_STORE": "ftp://x", "SGLANG_EPD_TOKEN": TOKEN}, Verdict.FAIL, "STORE"),
    ],
)
def test_settings_and_the_token(env, verdict, told):
    found = list(software.settings(env))
    assert worst(found) is verdict
    assert told in " ".join(one.found + one.mend for one in found)
    assert TOKEN not in str(found)


@pytest.mark.parametrize(
    ("code", "verdict", "mend"),
    [
        ("", Verdict.OK, ""),
        ("raise ModuleNotFoundError('mooncake')", Verdict.NOTE, "pip install"),
        ("raise ImportError('libibverbs.so.1: cannot open')", Verdict.FAIL, "libibverbs1"),
        ("raise ImportError('libcudart.so.12: cannot open')", Verdict.FAIL, "engine-cuda13"),
        ("import os; os.abort()", Verdict.FAIL, "reinstall"),
    ],
)
def test_mooncake_is_tried_in_a_process_of_its_own(monkeypatch, tmp_path, code, verdict, mend):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = [one for one in software.libraries() if one.subject == "Mooncake"]
    assert found.verdict is verdict
    assert mend in found.mend


def test_rdma_ports_that_are_active(tmp_path, monkeypatch):
    assert worst(list(machine.rdma(tmp_path / "none"))) is Verdict.NOTE
    monkeypatch.setattr(
        machine.resource, "getrlimit", lambda _which: (machine.resource.RLIM_INFINITY, 0)
    )
    for card, state in {"mlx5_0": "1: DOWN", "mlx5_1": "4: ACTIVE"}.items():
        port = tmp_path / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        first = next(iter(machine.rdma(tmp_path)))
        assert first.verdict is (Verdict.OK if "ACTIVE" in state else Verdict.WARN)
    assert "mlx5_1/1" in first.found
    devices = tmp_path / "dev"
    devices.mkdir()
    hidden = list(machine.rdma(tmp_path, devices))
    assert [one.verdict for one in hidden] == [Verdict.OK, Verdict.WARN]
    assert "uverbs" in hidden[1].found
    (devices / "uverbs0").touch()
    assert [one.verdict for one in machine.rdma(tmp_path, devices)] == [Verdict.OK]
    monkeypatch.setenv("MC_FORCE_TCP", "")
    assert "MC_FORCE_TCP" in list(machine.rdma(tmp_path, devices))[-1].found
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _which: (64 << 20, 64 << 20))
    assert "ulimit -l" in list(machine.rdma(tmp_path))[-1].mend


def test_a_port_that_is_taken_fails_if_it_was_asked_for():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (found,) = machine.ports([port])
    assert found.verdict is Verdict.FAIL
    assert str(port) in found.found


def test_limits_and_clock_are_told(monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _which: (1024, 4096))
    (found,) = machine.limits()
    assert (found.verdict, "at most 4096" in found.mend) == (Verdict.WARN, True)
    assert [one.subject for one in machine.clock()] == ["clock"]


def safetensors(path: Path, size: int = 16, cut: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, size]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + b"\0" * size
    path.write_bytes(whole[: len(whole) - cut])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2_5_VLForConditionalGeneration"]})
    )
    (tmp_path / "preprocessor_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    safetensors(tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda at: None, Verdict.OK),
        # Saved by torch: `--load-format npcache` reads the first, `pt` the second.
        (lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"), Verdict.OK),
        (lambda at: (at / "model.safetensors").rename(at / "model.pt"), Verdict.OK),
        # As `--load-format sharded_state` has it.
        (
            lambda at: (at / "model.safetensors").rename(at / "model-rank-0-part-0.safetensors"),
            Verdict.OK,
        ),
        # For `--load-format dummy` alone.
        (lambda at: (at / "model.safetensors").unlink(), Verdict.WARN),
        # Not on SGLang's list.
        (
            lambda at: (at / "config.json").write_text(
                '{"architectures": ["Gemma3ForConditionalGeneration"]}'
            ),
            Verdict.NOTE,
        ),
    ],
)
def test_a_checkpoint_that_will_do(folder, change, verdict):
    change(folder)
    assert worst(list(checkpoint(str(folder)))) is verdict


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda at: (at / "config.json").unlink(), "config.json"),
        (lambda at: (at / "config.json").write_text("{"), "not JSON"),
        (lambda at: (at / "config.json").write_text("[]"), "no JSON object"),
        (lambda at: (at / "config.json").write_text("{}"), "no architecture"),
        (lambda at: safetensors(at / "model.safetensors", cut=1), "bytes of"),
        (lambda at: (at / "model.safetensors").write_bytes(b"\xff" * 9), "header"),
        (lambda at: (at / "model.safetensors").write_bytes(b""), "header"),
        (lambda at: (at / "tokenizer.json").unlink(), "tokenizer"),
        (lambda at: (at / "preprocessor_config.json").unlink(), "preprocessor_config"),
        (
            lambda at: (at / "model.safetensors.index.json").write_text(
                '{"weight_map": {"v": "model.safetensors", "w": "model-1.safetensors",'
                ' "x": "model-2.safetensors"}}'
            ),
            "2 of 3 files of weights are missing, model-1.safetensors first",
        ),
        (
            lambda at: (at / "model.safetensors.index.json").write_text('{"weight_map": {"w": 1}}'),
            "names no files",
        ),
    ],
)
def test_what_a_checkpoint_lacks_is_told(folder, spoil, told):
    spoil(folder)
    found = list(checkpoint(str(folder)))
    assert worst(found) is Verdict.FAIL
    assert told in str(found)


def test_what_is_no_name_on_a_hub():
    (found,) = checkpoint("no such/name/at all")
    assert (found.verdict, "Repo id" in found.found) == (Verdict.FAIL, True)


@pytest.mark.parametrize(
    ("model", "offline", "verdict", "told"),
    [
        ("acme/tiny", "0", Verdict.NOTE, "the first server downloads it"),
        ("acme/tiny", "1", Verdict.FAIL, "HF_HUB_OFFLINE"),
        ("acme/tny", "0", Verdict.FAIL, "knows no such model"),
        ("acme/gated", "0", Verdict.FAIL, "gates it"),
    ],
)
def test_a_model_that_was_not_downloaded(tmp_path, folder, model, offline, verdict, told):
    known = {name: {"main": folder} for name in ("acme/tiny", "acme/gated")}
    with serving(Hub(known, gated=frozenset({"acme/gated"}))) as hub:
        (found,) = of_hub(model, tmp_path / "hub", offline, hub.url)
    assert (found["verdict"], told in found["found"]) == (verdict.value, True), found
    assert not hub.fetched, "looking downloads nothing"


def test_a_model_that_no_hub_can_give(tmp_path):
    (found,) = of_hub("acme/tiny", tmp_path, "0", f"http://127.0.0.1:{free_port()}")
    assert found["verdict"] == "fail"
    assert "cannot be asked" in found["found"] and "--model-path" in found["mend"]


def test_a_model_of_the_hubs_cache(tmp_path, folder):
    snapshot = tmp_path / "hub" / "models--acme--tiny" / "snapshots" / ("c" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(folder, snapshot, ignore=shutil.ignore_patterns("hub"))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("c" * 40)
    assert {found["verdict"] for found in of_hub("acme/tiny", tmp_path / "hub", "1")} == {"ok"}


@pytest.mark.parametrize(("offline", "verdict"), [("0", "note"), ("1", "fail")])
def test_a_model_whose_configuration_alone_was_downloaded(tmp_path, folder, offline, verdict):
    snapshot = tmp_path / "hub" / "models--acme--tiny" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    shutil.copy(folder / "config.json", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("c" * 40)
    with serving(Hub({"acme/tiny": {"main": folder}})) as hub:
        (found,) = of_hub("acme/tiny", tmp_path / "hub", offline, hub.url)
    assert (found["verdict"], found["mend"]) == (verdict, "hf download acme/tiny")
    assert "only in part in the cache of the hub" in found["found"]


def of_hub(model: str, cache: Path, offline: str, hub: str = "") -> list[dict[str, str]]:
    """What is found of a model, in a process that reads the hub's settings anew."""
    code = "import json, sys; from sglang_epd.cli.checks.checkpoint import checkpoint;"
    code += "from dataclasses import asdict;"
    code += f"print(json.dumps([asdict(found) for found in checkpoint({model!r})]))"
    env = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": offline}
    env |= {"HF_ENDPOINT": hub} if hub else {}
    told = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120, env=env)
    return list(json.loads(told))


QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "vision_config": {},
}
# As Qwen3-VL's: what its language model is written in stands with that alone.
DEEP = {
    "torch_dtype": None,
    "text_config": {"hidden_size": 4096, "dtype": "bfloat16"},
    "vision_config": {"deepstack_visual_indexes": [5, 11, 17]},
}
PIXELS = {"patch_size": 14, "merge_size": 2, "max_pixels": 16_384 * 28**2}


@pytest.mark.parametrize(
    ("config", "budget_mb", "verdict", "told"),
    [
        # 16,384 embeddings of 3584 numbers of two bytes.
        (
            QWEN,
            4096,
            Verdict.OK,
            "hold 36 at a time; the largest image of this model takes 11",
        ),
        (QWEN, 112, Verdict.OK, "hold 1 at a time"),
        (QWEN, 111, Verdict.FAIL, "answered with 413"),
        (QWEN | DEEP, 511, Verdict.FAIL, "takes 512.0 MiB"),
    ],
)
def test_a_budget_is_held_to_the_largest_picture(folder, config, budget_mb, verdict, told):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    (found,) = [one for one in checkpoint(str(folder), budget_mb) if one.subject == "budget"]
    assert (found.verdict, told in found.found) == (verdict, True), found
    assert verdict is Verdict.OK or "SGLANG_EPD_RECEIVE_BUDGET_MB=" in found.mend


def test_a_real_checkpoint_says_how_large_its_pictures_are():
    """1310720 pixels in squares of 32, each of 128 float32 numbers on three layers."""
    found = [one for one in checkpoint(str(ensure("tiny-qwen3-vl")), 1) if one.subject == "budget"]
    assert [one.verdict for one in found] == [Verdict.FAIL]
    assert f"takes {1310720 // 32**2 * 128 * 3 * 4 / 2**20:.1f} MiB" in found[0].found


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Lets nvidia-smi name the processes of two GPUs."""

    def tell(*apps: str, mig: str = "[N/A]", index: Sequence[str] = ("0", "1")) -> None:
        cards = (f"0, {mig}, GPU-a", "1, Disabled, GPU-b")
        rows = {"query-gpu=index,mig.mode.current,uuid": cards, "query-gpu=index": index}
        rows["query-compute-apps=gpu_uuid,pid,used_memory"] = apps
        cases = [
            f"--{query}) printf '%s\\n' {' '.join(map(repr, of))};;" for query, of in rows.items()
        ]
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\ncase $1 in\n" + "\n".join(cases) + "\nesac\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return tell


CHILDREN = "import subprocess as s; a = [s.Popen(['sleep', '600']) for _ in 'ab']; "
CHILDREN += "print(*(one.pid for one in a), flush=True); a[0].wait()"
LAUNCHER = [sys.executable, "-c", CHILDREN, "-m", "sglang.launch_server"]


@pytest.fixture
def launched():
    """Starts launchers of servers, each with two processes of its own; their ids."""
    launchers = []

    def launch() -> tuple[int, list[str]]:
        launcher = subprocess.Popen(LAUNCHER, stdout=subprocess.PIPE, text=True)
        children = launcher.stdout.readline().split()
        launchers.append((launcher, children))
        return launcher.pid, children

    yield launch
    for launcher, children in launchers:
        for pid in children:
            os.kill(int(pid), signal.SIGKILL)
        launcher.wait(10)
        launcher.stdout.close()


def test_two_servers_on_one_gpu_are_seen(gpus, launched):
    (one, ones), (other, others) = launched(), launched()
    gpus(*(f"GPU-a, {pid}, 100" for pid in [*ones, others[0]]), f"GPU-b, {others[1]}, 70000")
    devices, _, shared, taken = machine.devices()
    assert (devices.verdict, devices.found) == (Verdict.OK, "2 NVIDIA GPUs: 0, 1")
    assert (shared.subject, shared.verdict) == ("GPU 0", Verdict.WARN)
    assert f"process {one} has 200 MiB, process {other} has 100 MiB" in shared.found
    assert "CUDA_VISIBLE_DEVICES" in shared.mend
    assert (taken.subject, taken.verdict) == ("GPU 1", Verdict.NOTE)
    assert f"process {other} has 70000 MiB" in taken.found


def test_servers_that_one_script_has_started_are_two(gpus):
    script = f"{shlex.join(LAUNCHER)} & {shlex.join(LAUNCHER)} & wait"
    shell = subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        pids = [shell.stdout.readline().split()[0] for _ in range(2)]
        gpus(*(f"GPU-a, {pid}, 100" for pid in pids))
        (shared,) = [one for one in machine.devices() if one.subject == "GPU 0"]
        assert shared.verdict is Verdict.WARN, shared
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait(10)
        shell.stdout.close()


@pytest.mark.parametrize(("mig", "named"), [("Enabled", "GPU-a"), ("Disabled", "MIG-b")])
def test_slices_of_a_card_are_no_shared_gpu(gpus, launched, mig, named):
    """Whether the driver names the card or the slice."""
    (_, ones), (_, others) = launched(), launched()
    gpus(f"{named}, {ones[0]}, 100", f"GPU-a, {others[0]}, 100", mig=mig)
    found = [*machine.devices()][2:]
    assert found and {one.verdict for one in found} == {Verdict.NOTE}, found


def test_what_the_driver_says_is_no_name_of_a_gpu(gpus):
    gpus(index=["No devices were found"])
    (found,) = [one for one in machine.devices() if one.subject == "accelerators"]
    assert found.verdict is Verdict.FAIL and "No devices were found" in found.found


@pytest.mark.parametrize(
    ("env", "warned"),
    [
        ({}, False),
        ({"HTTP_PROXY": "http://p:1"}, True),
        ({"all_proxy": "http://p:1", "NO_PROXY": "example.com"}, True),
        ({"https_proxy": "http://p:1"}, False),
        ({"HTTP_PROXY": "http://p:1", "no_proxy": "a.b,127.0.0.1"}, False),
        (unproxied({"http_proxy": "http://p:1", "no_proxy": "a.b"}), False),
    ],
)
def test_a_proxy_that_servers_would_ask_themselves_through(monkeypatch, env, warned):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert [one.verdict for one in machine.proxies()] == [Verdict.WARN] * warned
    # As SGLang's warm-up asks.
    url = "http://127.0.0.1:30000/model_info"
    through = requests.utils.select_proxy(url, requests.utils.get_environ_proxies(url))
    assert (through is not None) is warned


@pytest.mark.parametrize("told", [{"NO_PROXY": ".corp"}, {"no_proxy": ".corp"}, {"NO_PROXY": "*"}])
def test_hosts_that_a_user_leaves_out_of_proxies_stay_out(monkeypatch, told):
    env = unproxied({"http_proxy": "http://p:1", **told})
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, env[name])
    for url in ("http://hub.corp/x", "http://127.0.0.1:1/x"):
        assert requests.utils.get_environ_proxies(url) == {}


def test_gpus_that_nobody_has(gpus):
    gpus()
    assert [one.subject for one in machine.devices()] == ["accelerators", "torch"]
    gpus("GPU-a, [N/A], [N/A]")
    assert [one.verdict for one in machine.devices()][2:] == [Verdict.NOTE]


@pytest.mark.parametrize(
    ("sees", "verdict", "told"),
    [
        (machine._SEES_GPU, Verdict.FAIL, "servers would run on the CPU"),
        ("print('2.11+cpu', None, False)", Verdict.FAIL, "it is built without CUDA"),
        ("print('2.11', '13.0', False)", Verdict.FAIL, "servers would run on the CPU"),
        ("print('2.11', '13.0', True)", Verdict.OK, "sees GPUs"),
        ("raise SystemExit(1)", Verdict.FAIL, "does not say"),
    ],
    ids=["this machine's", "no CUDA", "an old driver", "a GPU", "broken"],
)
def test_a_torch_that_sees_none_of_the_gpus_is_found(gpus, monkeypatch, sees, verdict, told):
    gpus()
    monkeypatch.setattr(machine, "_SEES_GPU", sees)
    (found,) = [one for one in machine.devices() if one.subject == "torch"]
    assert (found.verdict, told in found.found) == (verdict, True), found
    assert verdict is Verdict.OK or found.mend


@pytest.mark.parametrize(
    ("driver", "hidden", "subject", "verdict"),
    [
        (True, None, "torch", Verdict.FAIL),
        (True, "", "accelerators", Verdict.NOTE),
        (False, None, "accelerators", Verdict.NOTE),
    ],
    ids=["without its GPUs", "hidden", "no GPU"],
)
def test_a_container_that_was_given_none_of_its_hosts_gpus_is_found(
    tmp_path, monkeypatch, driver, hidden, subject, verdict
):
    """It has no nvidia-smi either, and servers end there."""
    version = tmp_path / "version"
    if driver:
        version.touch()
    monkeypatch.setattr(machine, "_DRIVER", version)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    (found,) = machine.devices()
    assert (found.subject, found.verdict) == (subject, verdict)


class Picture(QuietHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/cat.png" else 404)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"bytes")


@pytest.mark.parametrize(
    ("path", "networks", "verdict", "told"),
    [
        ("/cat.png", "", Verdict.FAIL, "not at a public address"),
        ("/cat.png", "127.0.0.0/8", Verdict.OK, "5 bytes"),
        ("/dog.png", "127.0.0.0/8", Verdict.FAIL, "404"),
    ],
)
def test_media_are_fetched_as_an_encoder_would(path, networks, verdict, told):
    env = {"SGLANG_EPD_MEDIA_ALLOWED_NETWORKS": networks}
    with listening(Picture) as site:
        (found,) = media(f"{url_of(site)}{path}", env)
    assert (found.verdict, told in found.found) == (verdict, True), found
    assert ("ALLOWED_NETWORKS" in found.mend) is (networks == "")


RIVAL = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
def register():
    target = "sglang.srt.disaggregation.encoder.receiver.create_mm_receiver"
    HookRegistry.register(target, lambda *args, **options: None, HookType.{kind})
"""


@pytest.mark.parametrize(
    ("code", "verdict", "told"),
    [
        (RIVAL.format(kind="AFTER"), Verdict.OK, "hold beside"),
        (RIVAL.format(kind="REPLACE"), Verdict.FAIL, "create_mm_receiver, which is hooked"),
        ("def register():\n    raise SystemExit('it ends')", Verdict.FAIL, "it ends"),
    ],
)
def test_hooks_are_tried_beside_another_plug_in(monkeypatch, tmp_path, code, verdict, told):
    (tmp_path / "rival.py").write_text(code)
    metadata = tmp_path / "rival-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nrival = rival:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    env = {"SGLANG_PLUGINS": "sglang_epd,sglang_epd_cpu,rival"}
    monkeypatch.setenv("SGLANG_PLUGINS", env["SGLANG_PLUGINS"])
    (found,) = software.hooks(env)
    assert (found.verdict, told in found.found) == (verdict, True), found


def test_without_other_plug_ins_there_is_nothing_to_try():
    assert not [*software.hooks({"SGLANG_PLUGINS": "sglang_epd"})]


def encoder(token: str, date: str = "") -> type[QuietHandler]:
    status = {"encoder": "e", "namespace": "n", "state": "ready", "utilisation": 0.0}
    status["queue"] = dict.fromkeys(("looking", "waiting", "preparing", "ready", "running"), 0)

    class Encoder(QuietHandler):
        def do_GET(self) -> None:
            right = self.headers.get("Authorization", "") == (f"Bearer {token}" if token else "")
            shown = status | {"authorised": right}
            body = json.dumps(shown).encode() if self.path == "/v1/status" else b""
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date or super().date_time_string()

    return Encoder


def look(handler: type[QuietHandler], token: str) -> dict[str, Verdict]:
    with listening(handler) as server:
        return {one.subject: one.verdict for one in servers([target(url_of(server))], token)}


def test_the_token_is_tried_and_clocks_are_compared():
    assert look(encoder(TOKEN), TOKEN)["token"] is Verdict.OK
    assert look(encoder(TOKEN), "wrong")["token"] is Verdict.FAIL
    assert look(encoder(TOKEN), "")["token"] is Verdict.FAIL
    late = look(encoder("", date="Thu, 01 Jan 2026 00:00:00 GMT"), "")
    assert late["clock"] is Verdict.WARN
    assert "clock" not in look(encoder("", date="yesterday"), "")


def test_servers_of_two_namespaces_are_told_apart():
    (found,) = _namespaces({"a": "Model/float32/1", "b": "Model/bfloat16/2"})
    assert found.verdict is Verdict.FAIL
    assert "a Model/float32/1, b Model/bfloat16/2" in found.found
    assert [one.verdict for one in _namespaces({"a": "1", "b": "1"})] == [Verdict.OK]


def test_the_exit_code_says_whether_something_will_not_run(monkeypatch, folder):
    for name in ("plugins", "seams", "hooks", "libraries"):
        monkeypatch.setattr(software, name, lambda: [ok("left out", "")])
    arguments = ["doctor", "--json", "--model", str(folder)]
    shown = CliRunner().invoke(app, arguments)
    assert (shown.exit_code, json.loads(shown.stdout)["ok"]) == (0, True)
    (folder / "config.json").unlink()
    shown = CliRunner().invoke(app, arguments)
    assert (shown.exit_code, json.loads(shown.stdout)["ok"]) == (1, False)
    table = CliRunner().invoke(app, arguments[:1] + arguments[2:], env={"COLUMNS": "150"})
    assert "-> download the checkpoint again" in table.stdout
