from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from sglang_epd.store import SharedStore, StoreUrl
from sglang_epd.store.shared import open_store
from store.fakes import Counts, FakeBackend, Open
from stores import Server, mooncake_master, mooncake_node

KINDS = ("file", "mooncake")
NODE_BYTES = 64 << 20


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
async def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def fake(backend: FakeBackend, counts: Counts) -> AsyncIterator[Callable[..., SharedStore]]:
    """A store over the fake backend."""
    made: list[SharedStore] = []

    def make(query: str = "", timeout_s: float = 5.0, token: str = "") -> SharedStore:
        url = StoreUrl.parse(f"file:///nowhere?{query}" if query else "file:///nowhere")
        made.append(SharedStore(backend, url, token=token, timeout_s=timeout_s, observer=counts))
        return made[-1]

    yield make
    backend.gate.set()
    backend.error = None
    for store in made:
        await store.close()


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mooncake")
    with mooncake_master(folder) as master, mooncake_node(folder, master, NODE_BYTES):
        yield master


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of each kind of store, all real; an own namespace each time."""
    name = f"namespace=test-{tmp_path.name}&max_item_mb=8&queue_mb=64"
    if request.param == "file":
        return f"file://{tmp_path}/store?{name}"
    server: Server = request.getfixturevalue(request.param)
    return f"{request.param}://127.0.0.1:{server.port}?{name}"


@pytest.fixture
async def open_at(counts: Counts) -> AsyncIterator[Open]:
    """A store by its URL; a second one of the same URL is another encoder's."""
    opened: list[SharedStore] = []

    async def make(url: str, *, token: str = "", timeout_s: float = 10.0) -> SharedStore:
        store = open_store(url, token=token, timeout_s=timeout_s, observer=counts)
        opened.append(store)
        await store.connect()
        return store

    yield make
    for store in opened:
        await store.close()
