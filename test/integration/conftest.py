"""Fixtures: real servers, photographs, and a small media server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from PIL import Image

from integration.client import Client
from integration.listener import QuietHandler, listening, url_of
from integration.topology import Machine, Topology
from photographs import load as load_photograph

# Starting a topology takes most of a minute; what uses the same one, or is compared with the
# same server, runs in a row. Files that are not named use "qwen2_5", or that and "qwen3".
_QWEN3 = "[qwen3"
_FAMILIES = "test_families"
_ORDER = [
    "",
    "test_reuse",
    "test_adaptive",
    "test_budget",
    "test_rival",
    "test_store",
    _QWEN3,
    # Compared with what has been asked of either by now.
    "test_backends",
    "test_chaos",
    "test_survival",
    "test_trace",
    "test_hub",
    "test_towers",
    "test_content",
    "test_quantised",
    "test_cli",
    "test_audio",
    "test_families",
    # So many servers that nothing runs beside them.
    "test_router",
]


def pytest_itemcollected(item: pytest.Item) -> None:
    if "integration" in item.path.parts:
        item.add_marker(pytest.mark.servers)
        item.add_marker(pytest.mark.timeout(900))


# After pytest's own sorting by fixtures.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, int, str, bool]:
    name = item.path.stem
    unnamed = _QWEN3 if _QWEN3 in item.name else ""
    # Ids begin with the family and the backend; the first of those has the reference.
    family, *rest = item.name.partition("[")[2].split("-") if name == _FAMILIES else [""]
    others = bool(rest) and rest[0] != "zmq_to_scheduler"
    order = _ORDER.index(name if name in _ORDER else unnamed)
    return "integration" in item.path.parts, order, family, others


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    machine = Machine()
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
def media_server() -> Iterator[str]:
    """URL of a server that answers 404 to everything."""

    class NotFound(QuietHandler):
        def do_GET(self) -> None:
            self.send_error(404)

    with listening(NotFound) as server:
        yield url_of(server)
