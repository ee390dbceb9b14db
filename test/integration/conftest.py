"""Fixtures: real servers, photographs, and a small media server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from integration import order
from integration.client import Client, data_url, image_part, text_part, user
from integration.late import question
from integration.listener import Site, serving
from integration.topology import Machine, Topology
from photographs import load as load_photograph


def pytest_itemcollected(item: pytest.Item) -> None:
    if "integration" in item.path.parts:
        item.add_marker(pytest.mark.servers)
        item.add_marker(pytest.mark.timeout(900))


# After pytest's own sorting by fixtures.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "integration" in item.path.parts]
    # What takes less than a start of servers comes last, where it keeps every process busy.
    others = [item for item in items if "integration" not in item.path.parts]
    items[:] = sorted(here, key=lambda item: order.place(item.nodeid)) + others


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp)
    yield machine
    machine.clear()


@pytest.fixture(scope="module")
def qwen2_5(machine: Machine) -> Topology:
    return machine.use("qwen2_5")


@pytest.fixture(scope="module")
def language(qwen2_5: Topology) -> Client:
    """The E+PD server."""
    return Client(qwen2_5.urls["language"])


@pytest.fixture
def colocated(machine: Machine, qwen2_5: Topology) -> Client:
    """The reference: one server that does all."""
    return machine.colocated(qwen2_5.model)


@pytest.fixture(scope="session")
def photographs() -> list[Image.Image]:
    """Two real photographs of one size, 600 x 400 px."""
    return [load_photograph(name).resize((600, 400)) for name in ("coffee", "rocket")]


@pytest.fixture
def site() -> Iterator[Site]:
    """A media server, which has nothing yet."""
    with serving() as site:
        yield site


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Has a process do something with `sglang.Engine`s (`engine_child`), and says what came of
    it."""
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "SGLANG_VLM_CACHE_SIZE_MB": "0"},
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None

        def ask(*told: Any) -> Any:
            child.stdin.write(json.dumps(told) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            assert line, (tmp_path / "log").read_text()[-4000:]
            said = json.loads(line)
            return said.get("error", said.get("answer"))

        yield ask
        child.stdin.close()
        assert child.wait(60) == 0, (tmp_path / "log").read_text()[-4000:]


@pytest.fixture
def asked(request: pytest.FixtureRequest, photographs: list[Image.Image]) -> list[dict[str, Any]]:
    """A question that no other test asks."""
    return question(request.node.name, photographs)


@pytest.fixture(scope="session")
def message(photographs: list[Image.Image]) -> dict[str, Any]:
    """A question about two photographs, each there twice."""
    parts = [image_part(data_url(photo.resize((224, 168)))) for photo in photographs * 2]
    return user(*parts, text_part("What are these?"))
