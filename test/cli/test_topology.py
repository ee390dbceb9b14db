from __future__ import annotations

import itertools

import pytest

from sglang_epd.cli.places import Cores, Gpus, Place, devices_of
from sglang_epd.cli.topology import Fleet, Shape, plan
from sglang_epd.errors import ConfigError


def laid_out(**asked) -> Fleet:
    ports = itertools.count(20_000)
    return plan(Shape(model="org/model", **asked), lambda: next(ports), lambda _devices: Place())


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def test_encoders_and_one_language_server():
    made = laid_out(encoders=2, language=1, host="0.0.0.0", port=8000)
    first, second, language = made.servers
    assert [server.name for server in made.servers] == ["encoder-0", "encoder-1", "language"]
    assert "--encoder-only" in first.command
    start = language.command.index("--encoder-urls")
    assert language.command[start + 1 : start + 3] == (first.url, second.url)
    assert option(language.command, "--host") == "0.0.0.0"
    assert option(first.command, "--host") == option(second.command, "--host") == "127.0.0.1"
    assert made.api_url == language.url == "http://127.0.0.1:8000"


def test_prefill_and_decode_stand_behind_the_load_balancer():
    made = laid_out(encoders=1, prefill=2, decode=1, port=8000)
    by_name = {server.name: server for server in made.servers}
    router, prefill = by_name["router"], by_name["prefill-1"]
    assert list(by_name) == ["encoder", "prefill-0", "prefill-1", "decode", "router"]
    assert router.url == made.api_url == "http://127.0.0.1:8000"
    assert set(router.needs) == {"prefill-0", "prefill-1", "decode"}
    bootstrap = option(prefill.command, "--disaggregation-bootstrap-port")
    start = router.command.index(prefill.url)
    assert router.command[start - 1 : start + 2] == ("--prefill", prefill.url, bootstrap)
    assert option(router.command, "--decode") == by_name["decode"].url
    assert option(by_name["decode"].command, "--disaggregation-mode") == "decode"


def test_several_language_servers_stand_behind_the_router():
    made = laid_out(language=2)
    router = made.servers[-1]
    assert router.ready_path == "/readiness"
    assert "--disable-circuit-breaker" in router.command
    assert option(router.command, "--retry-max-retries") == "2"
    for name in ("language-0", "language-1"):
        (server,) = [server for server in made.servers if server.name == name]
        assert server.url in router.command
        assert option(server.command, "--host") == "127.0.0.1"


@pytest.mark.parametrize("asked", [{"language": 3}, {"prefill": 3, "decode": 3}])
def test_no_port_is_given_twice(asked):
    ports = [
        word
        for server in laid_out(encoders=4, **asked).servers
        for flag, word in itertools.pairwise(server.command)
        if flag.endswith("-port") or flag == "--port"
    ]
    assert len(ports) == len(set(ports)) >= 10


def test_a_users_flags_come_last_and_the_roles_own_after_those_for_all():
    made = laid_out(language=1, flags={"all": "--dtype float16", "encoder": "--dtype 'float 32'"})
    encoder, language = made.servers
    assert encoder.command[-4:] == ("--dtype", "float16", "--dtype", "float 32")
    assert language.command[-2:] == ("--dtype", "float16")
    assert "'float 32'" in encoder.line()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"encoders": 0, "language": 1}, "--encoders"),
        ({}, "--language"),
        ({"language": -1}, "--language"),
        ({"prefill": 1}, "--prefill needs --decode"),
        ({"decode": 1}, "--decode needs --prefill"),
        ({"language": 1, "prefill": 1, "decode": 1}, "--language with --prefill"),
        ({"language": 1, "flags": {"all": "--port 1"}}, "--flags: --port"),
        ({"language": 1, "flags": {"encoder": "--model-path=x"}}, "--encoder-flags: --model-path"),
        ({"language": 1, "flags": {"decode": "'open"}}, "--decode-flags"),
    ],
)
def test_what_makes_no_topology_is_refused_by_its_flag(asked, named):
    with pytest.raises(ConfigError) as refused:
        laid_out(**asked)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ("", 1),
        ("--tp 2", 2),
        ("--tp-size=2 --dp-size 3", 6),
        ("--tp 4 --dp 4 --enable-dp-attention", 4),
        ("--tp-size 4 --pp-size 2", 8),
    ],
)
def test_a_server_has_as_many_devices_as_ranks(flags, devices):
    assert devices_of(flags.split()) == devices


@pytest.mark.parametrize("flags", ["--tp", "--tp two", "--dp-size=0"])
def test_ranks_are_numbers(flags):
    with pytest.raises(ConfigError, match="not a number of ranks"):
        devices_of(flags.split())


def test_gpus_are_dealt_in_order_and_one_listed_twice_is_shared():
    gpus = Gpus(["0", "0", "1", "2"])
    places = [gpus(1), gpus(1), gpus(2)]
    assert [place.env["CUDA_VISIBLE_DEVICES"] for place in places] == ["0", "0", "1,2"]


@pytest.mark.parametrize("names", [["0"], ["0", "0"], []])
def test_too_few_gpus_are_an_error_that_says_what_to_do(names):
    with pytest.raises(ConfigError, match="--gpus"):
        Gpus(names)(2)


@pytest.mark.parametrize("name", ["CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"])
def test_how_gpus_count_is_left_to_an_environment_that_says(monkeypatch, name):
    monkeypatch.setenv(name, "1,0")
    assert Gpus(["4"])(1).env == {"CUDA_VISIBLE_DEVICES": "4"}


def test_a_router_tells_its_metrics_to_this_machine_alone():
    made = plan(Shape(model="m", language=2), itertools.count(1).__next__, Cores(range(4), 3))
    command = made.servers[-1].command
    assert command[command.index("--prometheus-host") + 1] == "127.0.0.1"


def test_cores_are_split_evenly_or_shared(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _tool: "/usr/bin/taskset")
    split = Cores([0, 1, 2, 3, 6], 2)
    assert [split(1).prefix[-1], split(1).prefix[-1]] == ["0,1", "2,3"]
    assert Cores([0, 1, 2], 2)(1) == Place()


def test_where_a_server_runs_is_in_its_command():
    made = plan(Shape(model="m", language=1), itertools.count(1).__next__, Gpus(["4", "5"]))
    placed = "CUDA_VISIBLE_DEVICES=4 CUDA_DEVICE_ORDER=PCI_BUS_ID python -m sglang"
    assert made.servers[0].line().startswith(placed)
    shared = plan(Shape(model="m", language=1), itertools.count(1).__next__, Cores(range(4), 2))
    assert shared.servers[1].argv("py")[:3] == ["taskset", "-c", "2,3"]
