from __future__ import annotations

import importlib
import signal
import socket
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from forking import fork
from sglang_epd.errors import ConfigError
from sglang_epd.seams import receiving
from sglang_epd.seams.receiving import Ranks, _own, _reachable_address, ranks
from sglang_epd.tally import Tally
from sglang_epd.transfer.receiver import Receiver
from waiting import reached

ONE_OF_EACH = ("tp_size", "dp_size", "attn_dp_size", "attn_cp_size", "pp_size", "nnodes")


def parallel(
    tp_rank: int = 0, dp_rank: int | None = None, pp_rank: int = 0, **widths: int
) -> SimpleNamespace:
    """A scheduler's parallel context, its attention ranks derived as SGLang does."""
    sizes = {**dict.fromkeys(ONE_OF_EACH, 1), **widths}
    attn_tp_size = sizes["tp_size"] // sizes["attn_dp_size"] // sizes["attn_cp_size"]
    return SimpleNamespace(
        **sizes,
        tp_rank=tp_rank,
        dp_rank=dp_rank,
        pp_rank=pp_rank,
        attn_dp_enabled=sizes["attn_dp_size"] > 1,
        attn_tp_size=attn_tp_size,
        attn_tp_rank=tp_rank % attn_tp_size,
        attn_cp_rank=tp_rank // attn_tp_size % sizes["attn_cp_size"],
        attn_dp_rank=tp_rank // (attn_tp_size * sizes["attn_cp_size"]),
    )


def places(**widths: int) -> list[Ranks]:
    """Every scheduler of a server, replica by replica."""
    return [
        ranks(parallel(tp_rank, dp_rank, **widths))
        for dp_rank in range(widths.get("dp_size", 1))
        for tp_rank in range(widths.get("tp_size", 1))
    ]


LAYOUTS = {
    "tp": ({"tp_size": 4}, [(0, 4)]),
    "dp": ({"dp_size": 3}, [(0, 1), (1, 1), (2, 1)]),
    "tp and dp": ({"tp_size": 2, "dp_size": 2}, [(0, 2), (2, 2)]),
    "cp": ({"tp_size": 4, "attn_cp_size": 2}, [(0, 4)]),
    "cp only": ({"tp_size": 2, "attn_cp_size": 2}, [(0, 2)]),
    "dp attention": ({"tp_size": 4, "attn_dp_size": 2}, [(0, 2), (2, 2)]),
    "dp attention, one rank each": ({"tp_size": 2, "attn_dp_size": 2}, [(0, 1), (1, 1)]),
    "dp attention and cp": (
        {"tp_size": 8, "attn_dp_size": 2, "attn_cp_size": 2},
        [(0, 4), (4, 4)],
    ),
}


@pytest.mark.parametrize(("widths", "groups"), LAYOUTS.values(), ids=LAYOUTS)
def test_each_group_has_one_leader_which_claims_for_all_of_it(widths, groups):
    """Of (first reader, readers) of a group."""
    found = places(**widths)
    assert [place.reader for place in found] == list(range(len(found)))
    assert {place.readers for place in found} == {len(found)}
    leaders = [(place.first_in_group, place.group) for place in found if place.leads]
    assert leaders == groups
    for place in found:
        assert place.first_in_group <= place.reader < place.first_in_group + place.group
        assert place.leads == (place.reader == place.first_in_group)


STAGES = {
    "a stage each on one host": ({"pp_size": 2}, 1),
    "stages of two ranks": ({"pp_size": 2, "tp_size": 2}, 2),
    "a stage a host": ({"pp_size": 2, "nnodes": 2, "tp_size": 2}, 2),
    "two stages a host": ({"pp_size": 4, "nnodes": 2, "tp_size": 2}, 2),
    "a stage on two hosts": ({"nnodes": 2, "tp_size": 4}, 2),
    "on two hosts, with cp": ({"nnodes": 2, "tp_size": 4, "attn_cp_size": 2}, 2),
    "two stages, each on two hosts": ({"pp_size": 2, "nnodes": 4, "tp_size": 4}, 2),
}


@pytest.mark.parametrize(("widths", "here"), STAGES.values(), ids=STAGES)
def test_the_first_stages_ranks_on_the_first_host_read(sglang, monkeypatch, widths, here):
    """They are where SGLang starts them; all ranks agree on which are elsewhere."""
    stages, tp_size = widths.get("pp_size", 1), widths.get("tp_size", 1)
    engine = importlib.import_module("sglang.srt.entrypoints.engine")
    monkeypatch.setattr(engine, "get_parallel", lambda: parallel(**widths))
    first_host = engine._calculate_rank_ranges(0)[:2]
    for pp_rank in range(stages):
        for tp_rank in range(tp_size):
            place = ranks(parallel(tp_rank, None, pp_rank, **widths))
            with_receiver = pp_rank in first_host[0] and tp_rank in first_host[1]
            assert place.reads == (pp_rank == 0 and with_receiver)
            assert place.leads == (pp_rank == tp_rank == 0)
            assert (place.first_in_group, place.group, place.readers) == (0, here, here)
            assert [*place.elsewhere] == [*range(here, tp_size)]


def test_replicas_of_attention_have_leaders_in_the_first_stage_alone():
    widths = {"tp_size": 4, "attn_dp_size": 2, "pp_size": 2, "nnodes": 2}
    first, later = (
        [ranks(parallel(tp_rank, None, pp_rank, **widths)) for tp_rank in range(4)]
        for pp_rank in range(2)
    )
    leaders = [(place.first_in_group, place.group) for place in first if place.leads]
    assert leaders == [(0, 2), (2, 2)]
    assert {(place.reads, place.readers) for place in first} == {(True, 4)}
    assert not any(place.reads or place.leads for place in later)


@pytest.mark.parametrize(
    ("widths", "disabled", "asks"),
    [
        ({"tp_size": 2, "dp_size": 2}, False, True),
        ({}, True, False),
        ({"pp_size": 2}, False, False),
        ({"nnodes": 2, "tp_size": 2}, False, True),
    ],
)
def test_the_prefix_cache_is_asked_where_there_is_one_stage(widths, disabled, asks):
    assert receiving.asks_prefix(parallel(**widths), disabled) == asks


def test_without_a_data_parallel_controller_there_is_no_replica_number():
    assert ranks(parallel(1, None, tp_size=2)) == ranks(parallel(1, 0, tp_size=2))


def test_the_places_are_those_that_sglang_gives(sglang):
    module = sglang("runtime_context")
    widths = {"tp_size": 8, "attn_cp_size": 2, "attn_dp_size": 2}
    tp_size = module.derive_attn_tp_size(**widths)
    for tp_rank in range(8):
        attn_tp_rank, attn_dp_rank = module.derive_attention_ranks(
            tp_rank=tp_rank, attn_tp_size=tp_size, attn_cp_size=2
        )
        ours = parallel(tp_rank, **widths)
        assert (ours.attn_tp_size, ours.attn_tp_rank) == (tp_size, attn_tp_rank)
        assert ours.attn_dp_rank == attn_dp_rank


class FakeReceiver:
    """Notes what it is started with."""

    made: list[FakeReceiver]
    error: OSError | None = None

    def __init__(self, *args, **options) -> None:
        if self.error is not None:
            raise self.error
        self.args, self.options = args, options
        self.endpoint = "tcp://10.0.0.1:1"
        self.running = False
        self.made.append(self)

    def start(self) -> None:
        self.running = True


@pytest.fixture
def start(flags, monkeypatch):
    """Start a receiver with SGLang's flags as given; the one that was made."""
    FakeReceiver.made = []
    FakeReceiver.error = None
    monkeypatch.setattr(receiving, "Receiver", FakeReceiver)
    monkeypatch.setattr(receiving.idle.Hosted, "receiver", False)
    monkeypatch.setattr(receiving.rundir, "claim", lambda: None)
    monkeypatch.setattr(receiving.rundir, "control_path", lambda: "control")

    def start(
        backend: str = "zmq_to_scheduler", trusts: bool = False, receivers: int = 1, copies: int = 1
    ) -> FakeReceiver:
        flags(
            disagg={"encoder_transfer_backend": backend, "encoder_urls": ["http://10.0.0.2:1"]},
            mm={"trust_mm_content_hashes": trusts},
            observability={"enable_metrics": False},
            serving={"host": "10.0.0.1"},
        )
        receiving.start(readers=3, receivers=receivers, copies=copies)
        return FakeReceiver.made[-1]

    return start


def test_the_receiver_has_this_servers_settings(start, monkeypatch):
    monkeypatch.setenv("SGLANG_EPD_RECEIVE_BUDGET_MB", "3")
    monkeypatch.setenv("SGLANG_EPD_EMBEDDING_CACHE_MB", "2")
    monkeypatch.setenv("SGLANG_EPD_GRANT_TIMEOUT_S", "7.5")
    made = start()
    assert made.running
    assert receiving.idle.Hosted.receiver
    assert made.args == ("0.0.0.0", "10.0.0.1", "control"), "not this machine's own"
    tally = made.options.pop("tally")
    assert type(tally) is Tally
    assert made.options == {
        "budget_bytes": 3 << 20,
        "cache_bytes": 2 << 20,
        "readers": 3,
        "grant_ttl_s": 7.5,
        "engine": None,
        "on_death": receiving.end_server,
    }


def test_several_receivers_share_the_servers_memory(start, monkeypatch):
    monkeypatch.setenv("SGLANG_EPD_RECEIVE_BUDGET_MB", "12")
    monkeypatch.setenv("SGLANG_EPD_EMBEDDING_CACHE_MB", "9")
    made = start("zmq_to_tokenizer", receivers=4)
    assert made.options["budget_bytes"] == 3 << 20
    assert made.options["cache_bytes"] == 2 << 20


def test_copies_on_another_host_share_what_is_taken_of_itself(start, monkeypatch):
    monkeypatch.delenv("SGLANG_EPD_RECEIVE_BUDGET_MB", raising=False)
    monkeypatch.setattr(receiving, "share_mb", lambda: 16384)
    assert start(copies=8).options["budget_bytes"] == 2048 << 20
    assert start().options["budget_bytes"] == 16384 << 20
    monkeypatch.setenv("SGLANG_EPD_RECEIVE_BUDGET_MB", "12")
    assert start(copies=8).options["budget_bytes"] == 12 << 20, "as it was typed"


def test_its_memory_and_what_it_does_not_read_are_said(start, monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_EPD_RECEIVE_BUDGET_MB", "8")
    monkeypatch.delenv("SGLANG_EPD_EMBEDDING_CACHE_MB", raising=False)
    monkeypatch.setenv("SGLANG_EMBEDDING_POOL_SIZE_MB", "4096")
    with caplog.at_level("INFO"):
        start(trusts=True)
    assert "budget 8 MiB, 4 of it to keep" in caplog.text
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "SGLANG_EMBEDDING_POOL_SIZE_MB (instead: SGLANG_EPD_RECEIVE" in warning.message
    assert "--trust-mm-content-hashes" in warning.message


@pytest.fixture
def mooncake(monkeypatch, flags):
    """SGLang's, in a process where it has started the engine that is to be set."""
    name = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
    flags(device={"base_gpu_id": 0})
    monkeypatch.setattr(
        f"{name}.maybe_init_shared_mooncake_transfer_engine", lambda *, gpu_id: None
    )
    return partial(monkeypatch.setattr, importlib.import_module(name), "_mooncake_transfer_engine")


def test_it_is_written_to_through_the_engine_that_sglang_started(start, mooncake):
    mooncake(
        SimpleNamespace(hostname="10.0.0.1", engine=SimpleNamespace(get_rpc_port=lambda: 12345))
    )
    engine = start("mooncake").options["engine"]
    assert engine.session == "10.0.0.1:12345"


def test_without_an_engine_of_sglangs_the_mooncake_backend_is_refused(start, mooncake):
    mooncake(None)
    with pytest.raises(ConfigError, match="--encoder-transfer-backend mooncake"):
        start("mooncake")


def test_an_address_that_cannot_be_bound_is_a_configuration_error(start):
    FakeReceiver.error = OSError("cannot assign requested address")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1: cannot assign"):
        start()


LOCAL, REMOTE = "http://127.0.0.1:1", "http://10.0.0.2:1"


@pytest.mark.parametrize(
    ("host", "urls", "address"),
    [
        ("10.0.0.1", [REMOTE], "10.0.0.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("[fd00::1]", [REMOTE], "fd00::1"),
        # As names do, these resolve to 10.0.0.1, and to this host itself.
        ("167772161", [REMOTE], "10.0.0.1"),
        ("127.1", [REMOTE], "found"),
        ("127.0.0.1", [LOCAL], "127.0.0.1"),
        ("localhost", [LOCAL], "127.0.0.1"),
        ("::1", [LOCAL], "::1"),
        ("127.0.0.1", [LOCAL, REMOTE], "found"),
        ("127.0.0.1", [], "found"),  # encoders that register may be anywhere
        ("0.0.0.0", [LOCAL], "found"),
        ("::", [], "found"),
        ("", [], "found"),
        (None, [REMOTE], "found"),
    ],
)
def test_encoders_are_told_an_address_they_can_reach(sglang, monkeypatch, host, urls, address):
    monkeypatch.setattr(sglang("utils.network"), "get_local_ip_auto", lambda: "found")
    assert _reachable_address(host, urls) == address


@pytest.mark.parametrize(
    ("address", "listens"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("198.51.100.7", "0.0.0.0"),
        ("::1", "::1"),
        ("2001:db8::7", "::"),
    ],
    ids=["own", "translated", "own by IPv6", "translated by IPv6"],
)
def test_what_comes_to_a_translated_address_is_heard(address, listens):
    if ":" in address:
        with socket.socket(socket.AF_INET6) as trial:
            try:
                trial.bind(("::1", 0))
            except OSError as error:
                pytest.skip(f"no IPv6 here: {error}")
    assert _own(address) == listens


def test_a_host_without_an_address_is_refused_by_its_flag(sglang):
    with pytest.raises(ConfigError, match=r"^--host a\.\.b: "):
        _reachable_address("a..b", [REMOTE])


def _scheduler(control_path: Path) -> None:
    """A process with a receiver, whose sockets are gone soon after."""
    receiver = Receiver(
        "127.0.0.1",
        "127.0.0.1",
        control_path,
        budget_bytes=1 << 20,
        on_death=receiving.end_server,
    )
    receiver.start()
    receiver._payload.close()
    receiver._control.close()
    time.sleep(60)


def test_the_launcher_ends_a_server_whose_receiver_has_died(tmp_path):
    """By the signal at which SGLang's ends all of its processes."""
    told = []
    before = signal.signal(signal.SIGQUIT, lambda *_: told.append(time.monotonic()))
    child = fork(_scheduler, tmp_path / "control")
    try:
        reached(lambda: told)
    finally:
        child.kill()
        child.join()
        signal.signal(signal.SIGQUIT, before)
    assert len(told) == 1
