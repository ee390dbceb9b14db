"""What a folder of files has of its own: room, links, pipes, modes."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_epd.store import folder as module
from sglang_epd.store.backend import OversizedError, StoreError
from sglang_epd.store.folder import FolderStore
from waiting import until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store" / "space"


@pytest.fixture
async def store(root: Path) -> AsyncIterator[FolderStore]:
    store = FolderStore(root, max_bytes=10_000, ttl_s=3600.0)
    await store.connect()
    yield store
    await store.close()


def name(number: int) -> str:
    return f"v1-open/{number:064x}"[: len("v1-open/") + 64]


async def put(store: FolderStore, number: int, nbytes: int = 1000) -> Path:
    await store.put(name(number), [memoryview(bytes(nbytes))])
    return store._path(name(number))


def aged(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


async def test_files_are_sharded_and_none_is_unfinished(store: FolderStore, root: Path):
    path = await put(store, 0xAB << 248)
    assert path == root / "v1-open" / "ab" / f"{0xAB << 248:x}.safetensors"
    assert files(root) == [path]


async def test_a_write_that_fails_midway_leaves_nothing(store: FolderStore, root: Path):
    """As on a disk that is full: what is written by then, is written."""
    store._max_bytes = 1 << 30  # it is not swept
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(StoreError, match="too large"):
            await put(store, 1, nbytes=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(root) == []
    assert (await put(store, 1, nbytes=1 << 20)).exists()


async def test_a_sweep_takes_what_was_not_used_for_longest(store: FolderStore, root: Path):
    paths = [store._path(name(number)) for number in range(15)]
    for number, path in enumerate(paths):
        # Not by `put`, which may have it swept at any time.
        store._write(path, [memoryview(bytes(1000))])
        aged(path, 1000 - number)
    store.sweep()
    left = files(root)
    assert 5000 <= sum(path.stat().st_size for path in left) <= 10_000
    assert left == sorted(paths[-len(left) :])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_where_the_disk_is_full_the_oldest_make_room(
    store: FolderStore, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    """Below the store's own bound."""
    paths = [store._path(name(number)) for number in range(5)]
    for age, path in enumerate(reversed(paths)):
        store._write(path, [memoryview(bytes(1000))])
        aged(path, 10 + age)
    abandoned = paths[0].parent / ".x.part"
    abandoned.write_bytes(b"half")
    aged(abandoned, 7200)
    store._swept_at = time.monotonic()

    def full(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store, "_write", full)
    with pytest.raises(StoreError):
        await put(store, 9)
    await until(lambda: files(root) == sorted(paths[1:]))


async def test_a_hit_makes_a_file_used(store: FolderStore):
    path = await put(store, 1)
    aged(path, 1000)
    assert await store.get(name(1), 10_000) is not None
    assert time.time() - path.stat().st_mtime < 100


async def test_a_sweep_takes_the_old_and_the_abandoned_and_nothing_of_others(
    store: FolderStore, root: Path, tmp_path: Path
):
    old, new = await put(store, 1), await put(store, 2)
    part = new.parent / ".x.part"
    part.write_bytes(b"half")
    fresh = new.parent / ".y.part"
    fresh.write_bytes(b"half")
    notes = new.parent / "README"
    notes.write_text("mine")
    models = tmp_path / "models"
    (models / "ab").mkdir(parents=True)
    weights = models / "ab" / "model.safetensors"
    weights.write_bytes(b"weights")
    (root / "v1-link").symlink_to(models)
    for path in (old, part, notes, weights):
        aged(path, 7200)
    store.sweep()
    assert not old.exists() and not part.exists()
    assert all(path.exists() for path in (new, fresh, notes, weights))


async def test_whoever_writes_much_sweeps(store: FolderStore, root: Path):
    for number in range(40):
        await put(store, number)
        await asyncio.sleep(0.001)
    await until(lambda: store._sweeping is not None and store._sweeping.done())
    await put(store, 99)
    await until(lambda: sum(path.stat().st_size for path in files(root)) <= 11_000)


async def test_what_is_no_file_is_an_error_at_once(store: FolderStore, tmp_path: Path):
    path = await put(store, 1)
    for number, make in enumerate((os.mkfifo, os.mkdir), start=2):
        make(path.parent / store._path(name(number)).name)
        async with asyncio.timeout(5):
            with pytest.raises(StoreError):
                await store.get(name(number), 10_000)
    secret = tmp_path / "secret"
    secret.write_bytes(b"another's")
    (path.parent / store._path(name(9)).name).symlink_to(secret)
    with pytest.raises(StoreError):
        await store.get(name(9), 10_000)


async def test_no_more_is_read_than_may_be(store: FolderStore):
    await put(store, 1, nbytes=2000)
    with pytest.raises(OversizedError):
        await store.get(name(1), 1999)
    found = await store.get(name(1), 2000)
    assert found is not None and found.nbytes == 2000


async def test_a_file_in_the_place_of_a_folder_is_an_error(store: FolderStore, root: Path):
    """As is a folder that may only be read, which root does not feel."""
    root.rmdir()
    root.write_bytes(b"")
    with pytest.raises(StoreError, match="Not a directory"):
        await store.get(name(1), 10_000)
    for call in (put(store, 1), store.remove(name(1)), store.connect()):
        with pytest.raises(StoreError):
            await call


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_read_only_folder_can_be_read(store: FolderStore, root: Path):
    path = await put(store, 1)
    for each in (path.parent, root / "v1-open", root):
        each.chmod(0o555)
    try:
        assert await store.get(name(1), 10_000) is not None
        with pytest.raises(StoreError, match="Permission"):
            await put(store, 2)
    finally:
        for each in (root, root / "v1-open", path.parent):
            each.chmod(0o755)


async def test_a_mount_that_hangs_keeps_no_one_and_nothing(store: FolderStore, monkeypatch):
    back = threading.Event()
    monkeypatch.setattr(store, "_read", lambda *_args: back.wait(60))
    began = time.perf_counter()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.gather(*(store.get(name(n), 10) for n in range(10)))
    back.set()
    assert time.perf_counter() - began < 30
    assert module._READERS < 10


async def test_writes_that_hang_keep_no_read_waiting_and_are_swept_all_the_same(
    store: FolderStore, root: Path, monkeypatch: pytest.MonkeyPatch
):
    path, back = await put(store, 1), threading.Event()
    monkeypatch.setattr(store, "_write", lambda *_args: back.wait(60))
    store._swept_at = time.monotonic()
    try:
        for number in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await put(store, 10 + number)
        assert await store.get(name(1), 10_000) is not None
        aged(path, 7200)
        store._swept_at = float("-inf")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await put(store, 20)
        await until(lambda: not path.exists())
    finally:
        back.set()


async def test_room_is_left_on_the_filesystem(
    store: FolderStore, root: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = [store._path(name(number)) for number in range(9)]
    for number, path in enumerate(paths):
        store._write(path, [memoryview(bytes(1000))])
        aged(path, 1000 - number)
    found = os.statvfs(root)
    free = found.f_bavail * found.f_frsize
    assert free - (4 << 30) - (1 << 30) < module._spare_bytes(root) < free
    short = SimpleNamespace(f_blocks=100_000, f_frsize=1, f_bavail=7_000)
    monkeypatch.setattr(os, "statvfs", lambda _folder: short)
    store.sweep()
    assert files(root) == sorted(paths[-5:]), "a tenth is spared, and a tenth of the rest"
    with pytest.raises(StoreError, match="no room to spare"):
        await put(store, 20)
    assert not store._path(name(20)).exists()


async def test_a_folder_that_cannot_be_listed_keeps_no_other_from_being_swept(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As one of another user's, or of a disk with an error."""
    listed, gone = await put(store, 0xAB << 248), await put(store, 0xCD << 248)
    scandir = os.scandir

    def failing(folder: os.PathLike[str]):
        if os.fspath(folder) == str(gone.parent):
            raise OSError(errno.EIO, "Input/output error")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", failing)
    aged(listed, 7200)
    for _ in range(2):
        store.sweep()
    assert not listed.exists()
    assert caplog.text.count("is passed over") == 1
