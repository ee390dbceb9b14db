"""Shared stores under real servers: a new encoder computes nothing that was stored, and
whatever becomes of the store, each request is answered as by one server that does all."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

from integration.client import (
    TOLERANCE,
    Generation,
    about_a_crop,
    text_part,
    until,
    user,
)
from integration.counters import counted, status, total
from integration.test_forms import IMAGE
from integration.topology import Machine, Topology
from stores import Server, mooncake_master, mooncake_node

TOKENS = 4
# Requests of a load with a fault, half of them for what is stored; what the fault comes after.
STORED, NEW = 6, 12
AT_ONCE = 4
THEN = ({"role": "assistant", "content": "A picture."}, user(text_part("And what is in it?")))
SOON_S = 60.0


@dataclass
class Case:
    """Servers, pictures, and what one server that does all says of them."""

    topology: Topology
    messages: list[dict[str, Any]]
    expected: list[Generation]
    # A second turn of the conversations about what is stored.
    expected_then: list[Generation]

    def ask(self, number: int) -> float:
        answer = self.topology.client().generation(self.messages[number], tokens=TOKENS)
        return answer.distance(self.expected[number])

    def ask_on(self, number: int) -> float:
        answer = self.topology.client().generation(self.messages[number], *THEN, tokens=TOKENS)
        return answer.distance(self.expected_then[number])

    def sources(self) -> dict[str, int]:
        """Where the language server's items have come from."""
        return counted(self.topology.urls["language"], "dispatch_items_total", "source")

    def told(self, number: int) -> dict[str, int] | None:
        """The same, as it is told of one picture; None if the answer was faster than the
        encoder's last word."""
        url = self.messages[number]["content"][0]["image_url"]["url"]
        body = {"text": f"{IMAGE}What is it?", "image_data": [url]}
        answer = self.topology.client().generate(**body, sampling_params={"max_new_tokens": 32})
        told: dict[str, int] | None = answer.json()["meta_info"].get("media_sources")
        return told

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the encoder's samples of that name with these labels."""
        return total(self.topology.urls["encoder"], f"encoder_{name}", **labels)

    def status(self) -> dict[str, Any]:
        return status(self.topology)


@pytest.fixture(scope="module")
def case(machine: Machine, photographs: list[Image.Image]) -> Case:
    messages = [about_a_crop(photographs, number) for number in range(STORED + 3 * NEW)]
    topology = machine.use("store")
    colocated = machine.colocated(topology.model)
    expected = [colocated.generation(one, tokens=TOKENS) for one in messages]
    then = [colocated.generation(one, *THEN, tokens=TOKENS) for one in messages[:STORED]]
    return Case(topology, messages, expected, then)


@pytest.fixture
def resources(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def fill_and_start_anew(case: Case, url: str, **env: str) -> None:
    """What one encoder computed the next one finds, and it is not asked of it twice: the
    language server, too, knows nothing of the conversations' first turns any more."""
    env["SGLANG_EPD_STORE"] = url
    case.topology.restart("encoder", **env)
    stored = range(STORED)
    assert max(case.ask(number) for number in stored) < TOLERANCE
    assert case.metric("lookups_total", source="computed") == STORED
    # An encoder that ends gives its last writes a moment: on a busy machine it is too short.
    until(lambda: case.metric("store_writes_total", outcome="written") == STORED)
    case.topology.restart("encoder", "language", **env)
    assert max(case.ask_on(number) for number in stored) < TOLERANCE
    # An answer may be faster than the encoder's last word on its item.
    until(lambda: sum(case.sources().values()) == STORED)
    assert case.sources() == {"store": STORED}
    assert case.metric("lookups_total", source="stored") == STORED
    assert case.metric("lookups_total", source="computed") == 0
    assert case.metric("batch_items_count") == 0, "the tower has run"
    assert case.metric("store_reads_total", outcome="hit") == STORED
    recent = requests.get(f"{case.topology.urls['encoder']}/v1/recent", timeout=20).json()
    assert len(recent) >= STORED
    for item in recent:
        assert item["source"] == "stored"
        assert item["ms"]["store"] >= 0
        assert "forward" not in item["ms"] and "preprocess" not in item["ms"]
    assert until(lambda: case.told(0)) == {"store": 1}


def load_with_a_fault(case: Case, first: int, fault: Callable[[], None]) -> None:
    """Requests for what is stored and for what is new, and the fault among them."""
    numbers = [
        number
        for pair in zip(range(first, first + NEW), 2 * list(range(STORED)), strict=True)
        for number in pair
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked: list[Future[float]] = [pool.submit(case.ask, number) for number in numbers]
        asked[AT_ONCE].result(SOON_S)
        fault()
        distances = [one.result(SOON_S) for one in asked]
    assert max(distances) < TOLERANCE
    assert case.metric("items_total", outcome="failed") == 0
    case.topology.check_alive()


def comes_back(case: Case) -> None:
    """Asked for what is new again and again, the store is used again, in both directions."""
    before = case.metric("store_writes_total", outcome="written")
    numbers = itertools.cycle(range(STORED + 2 * NEW, STORED + 3 * NEW))

    def is_used() -> bool:
        assert case.ask(next(numbers)) < TOLERANCE
        breakers = case.status()["store"]["breakers"]
        written = case.metric("store_writes_total", outcome="written")
        return written > before and set(breakers.values()) == {"closed"}

    until(is_used)


def is_left_alone(case: Case) -> bool:
    return bool(case.metric("store_reads_total", outcome="skipped"))


def test_a_folder(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "store"
    # The setting counts before the flag, of which SGLang's encoder makes a store of its own.
    monkeypatch.setitem(case.topology.flags, "encoder", "--enable-mm-global-cache")
    # A read that takes longer than usual, on a busy machine, would be a miss.
    fill_and_start_anew(case, f"file://{folder}", SGLANG_EPD_STORE_TIMEOUT_MS="20000")
    files = sorted(folder.rglob("*.safetensors"))
    assert len(files) == STORED
    damage(files)
    assert max(case.ask(number) for number in range(STORED)) < TOLERANCE
    status = case.status()["store"]
    assert Counter(status)["reads_corrupt"] + status.get("reads_error", 0) == STORED
    # Written anew.
    until(lambda: case.metric("store_writes_total", outcome="written") >= STORED - 1)
    before = case.metric("store_reads_total", outcome="hit")
    assert max(case.ask(number) for number in range(STORED)) < TOLERANCE
    assert case.metric("store_reads_total", outcome="hit") - before >= STORED - 1

    # Who may write anything is not kept from it by a mode: a file in the folder's place.
    aside = tmp_path / "aside"

    def replace() -> None:
        folder.rename(aside)
        folder.write_bytes(b"no folder")

    load_with_a_fault(case, STORED, replace)
    assert is_left_alone(case)
    folder.unlink()
    aside.rename(folder)
    comes_back(case)

    # Nothing new can be written where a file keeps a folder's place.
    before = case.metric("store_writes_total", outcome="error")
    version = next(folder.glob("*/v1-*"))
    for shard in range(256):
        if not (version / f"{shard:02x}").exists():
            (version / f"{shard:02x}").write_bytes(b"")
    load_with_a_fault(case, STORED + NEW, lambda: None)
    assert case.metric("store_writes_total", outcome="error") > before


def damage(files: list[Path]) -> None:
    """Each in a way of its own."""
    raw = bytearray(files[0].read_bytes())
    raw[-1] ^= 1
    files[0].write_bytes(raw)
    files[1].write_bytes(files[1].read_bytes()[:-100])
    files[2].write_bytes(b"")
    files[3].write_bytes(os.urandom(4096))
    shutil.copy(files[3], files[4])
    # A pipe that nobody writes to.
    files[5].unlink()
    os.mkfifo(files[5])


@pytest.mark.extended
def test_mooncake_by_sglangs_flag(
    case: Case, tmp_path: Path, resources: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = resources.enter_context(mooncake_master(tmp_path))
    resources.enter_context(mooncake_node(tmp_path, master, 64 << 20))
    monkeypatch.setitem(case.topology.flags, "encoder", "--enable-mm-global-cache")
    address, size = f"127.0.0.1:{master.port}", "MOONCAKE_GLOBAL_SEGMENT_SIZE"
    env = {"MOONCAKE_MASTER": address, "MOONCAKE_PROTOCOL": "tcp", size: "0"}
    fill_and_start_anew(case, "", **env)
    load_with_a_fault(case, STORED, master.kill)
    assert is_left_alone(case)
    master.start()
    comes_back(case)
    # The encoder ends in time although its calls hang.
    freeze(case, master, STORED + NEW, lambda: case.topology.end("encoder"))


def freeze(case: Case, server: Server, first: int, then: Callable[[], None] = lambda: None) -> None:
    try:
        load_with_a_fault(case, first, lambda: os.kill(server.pid, signal.SIGSTOP))
        assert case.metric("store_reads_total", outcome="timeout") > 0
        then()
    finally:
        os.kill(server.pid, signal.SIGCONT)
