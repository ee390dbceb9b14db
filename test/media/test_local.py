from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web

from media.samples import Serve, in_seconds, local_limits
from sglang_epd.errors import EpdError, MediaError, MediaForbiddenError, MediaTooLargeError
from sglang_epd.media import MediaFetcher, MediaLimits, MediaSource, digest, fetch, parse_source
from sglang_epd.media.limits import NO_LIMIT
from waiting import until


async def read(path: object, root: Path | None, max_bytes: int = 100) -> bytes:
    limits = MediaLimits(allowed_local_root=root, max_bytes=max_bytes)
    async with MediaFetcher(limits) as fetcher:
        fetched = await fetcher.fetch(parse_source(str(path)), in_seconds(5))
    assert fetched.digest == digest(fetched.data)
    return fetched.data


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "open").mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "open-too").mkdir()
    (tmp_path / "open-too" / "a.png").write_bytes(b"secret")
    return tmp_path / "open"


async def test_files_beneath_the_root_are_read(root: Path) -> None:
    (root / "inner").mkdir()
    file = root / "inner" / "a b%23#?ü.png"
    file.write_bytes(b"picture")
    assert await read(file, root) == b"picture"
    assert await read(file.as_uri(), root) == b"picture"
    assert await read(f"{root}/inner/../inner/{file.name}", root) == b"picture"
    (root / "link.png").symlink_to(file)
    assert await read(root / "link.png", root) == b"picture"


async def test_names_that_are_not_unicode_are_read(root: Path) -> None:
    Path(os.fsdecode(os.fsencode(root) + b"/\xff.png")).write_bytes(b"picture")
    assert await read(f"file://{root}/%ff.png", root) == b"picture"


async def test_a_root_that_is_a_link_is_followed(root: Path) -> None:
    (root / "a.png").write_bytes(b"picture")
    link = root.parent / "link"
    link.symlink_to(root)
    assert await read(link / "a.png", link) == b"picture"
    assert await read(root / "a.png", link) == b"picture"


async def test_without_a_root_no_file_is_read(root: Path) -> None:
    with pytest.raises(MediaForbiddenError, match="local files"):
        await read(root.parent / "secret.png", None)


async def test_nothing_outside_the_root_is_read(root: Path) -> None:
    (root / "link.png").symlink_to(root.parent / "secret.png")
    (root / "folder").symlink_to(root.parent)
    for path in (
        root.parent / "secret.png",
        root.parent / "no-such.png",  # nor is it told from one that exists
        root.parent / "open-too" / "a.png",
        f"{root}/../secret.png",
        f"file://{root}/%2e%2e/secret.png",
        f"file://{root}/..%2fsecret.png",
        root / "link.png",
        root / "folder" / "secret.png",
        "/etc/passwd",
        "/proc/self/environ",
    ):
        with pytest.raises(MediaForbiddenError, match="outside") as caught:
            await read(path, root)
        assert str(root) not in caught.value.message


async def test_a_mount_that_hangs_stops_no_other_media(
    serve: Serve, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies of some size are hashed in threads."""
    body, mount = os.urandom(1 << 20), threading.Event()

    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=body)

    url = await serve(handle)
    opened: list[object] = []

    def hang(*asked: object) -> None:
        opened.append(asked)
        mount.wait(30)

    monkeypatch.setattr(fetch, "open_local", hang)
    async with MediaFetcher(local_limits(allowed_local_root=root)) as fetcher:
        hung = [
            asyncio.create_task(
                fetcher.fetch(MediaSource(url=f"file://{root}/{n}.png"), in_seconds(30))
            )
            for n in range(2 * (32 + (os.cpu_count() or 1)))
        ]
        await until(lambda: len(opened) >= 8)
        media = await asyncio.wait_for(fetcher.fetch(MediaSource(url=url), in_seconds(10)), 10)
        assert media.data == body
        for task in hung:
            task.cancel()
        mount.set()
        await asyncio.gather(*hung, return_exceptions=True)


async def test_only_regular_files_are_read(root: Path) -> None:
    os.mkfifo(root / "fifo.png")  # would block
    (root / "folder.png").mkdir()
    for name in ("fifo.png", "folder.png"):
        with pytest.raises(MediaError, match="not a regular file"):
            await read(root / name, root)
    with pytest.raises(MediaError, match="not a regular file"):
        await read("/dev/zero", Path("/dev"))
    (root / "loop.png").symlink_to(root / "loop.png")
    with pytest.raises(MediaError, match="resolved"):
        await read(root / "loop.png", root)


async def test_missing_empty_and_large_files(root: Path) -> None:
    with pytest.raises(MediaError, match="no such file"):
        await read(root / "a.png", root)
    with pytest.raises(MediaError, match=r"cannot be read: (Not a directory|File name too long)"):
        await read(root / ("a" * 300), root)
    (root / "a.png").touch()
    with pytest.raises(MediaError, match="empty"):
        await read(root / "a.png", root)
    (root / "a.png").write_bytes(bytes(101))
    with pytest.raises(MediaTooLargeError, match="101 bytes, limit 100"):
        await read(root / "a.png", root)


async def test_files_that_understate_their_size_are_bounded() -> None:
    """Files in /proc say that they are empty."""
    with pytest.raises(MediaTooLargeError, match="more than 100"):
        await read("/proc/self/status", Path("/proc"))


async def test_without_a_limit_a_file_is_read_to_its_end(root: Path) -> None:
    (root / "a.png").write_bytes(bytes(1000))
    assert len(await read(root / "a.png", root, NO_LIMIT)) == 1000


async def test_a_folder_that_becomes_a_link_leads_nowhere_else(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a path and its opening."""
    within, outside = root / "within", root.parent / "open-too"
    within.mkdir()
    (within / "a.png").write_bytes(b"picture")
    really_open = os.open

    def swap_and_open(path: object, *args: int) -> int:
        if path == within / "a.png":
            within.rename(root / "moved")
            within.symlink_to(outside)
        return really_open(path, *args)

    monkeypatch.setattr(os, "open", swap_and_open)
    with pytest.raises(MediaForbiddenError, match="outside"):
        await read(within / "a.png", root)


async def test_a_file_that_is_not_read_in_time_holds_up_nobody(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a network's mount, say: to close it would wait for its reading."""
    reading, writing = os.pipe()
    end = threading.Timer(5.0, os.close, [writing])
    end.start()
    monkeypatch.setattr("sglang_epd.media.fetch.open_local", lambda *_: os.fdopen(reading, "rb"))
    began = time.monotonic()
    async with MediaFetcher(MediaLimits(allowed_local_root=root)) as fetcher:
        with pytest.raises(EpdError):
            await fetcher.fetch(parse_source(f"file://{root}/a.png"), in_seconds(0.3))
        assert time.monotonic() - began < 3
    end.join()
