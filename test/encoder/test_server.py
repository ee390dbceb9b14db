"""What an encoder server is made of, by SGLang's flags and variables."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

import certificates
from sglang_epd.config import Settings
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.server import (
    _batch,
    _body_bytes,
    _Front,
    _housekeeping,
    _store_url,
    cache_bytes,
    checked_url,
    follow_certificates,
    tls_options,
)
from sglang_epd.encoder.serving import PromptHeads
from sglang_epd.errors import ConfigError
from sglang_epd.media import MediaLimits
from sglang_epd.media.limits import NO_LIMIT
from sglang_epd.trust import Trust


@pytest.mark.parametrize(
    ("typed", "enabled", "mib"),
    [
        ("", True, 4096),
        # SGLang sets it so for Qwen3-VL on Hopper GPUs.
        ("0", True, 4096),
        ("100", True, 100),
        ("100", False, 0),
    ],
)
def test_the_flag_asks_for_a_cache_and_the_variable_says_how_large(
    monkeypatch, typed, enabled, mib
):
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", typed)
    assert cache_bytes(enabled=enabled) == mib << 20


def test_a_cache_size_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "-1")
    with pytest.raises(ConfigError, match="SGLANG_VLM_CACHE_SIZE_MB='-1'"):
        cache_bytes(enabled=True)


@pytest.mark.parametrize(
    ("largest", "taken"), [(64 << 20, 512), (NO_LIMIT, 512), (448 << 20, 512), (600 << 20, 664)]
)
def test_an_encode_request_has_room_for_the_largest_item(largest, taken):
    assert _body_bytes(MediaLimits(max_bytes=largest)) == taken << 20


@pytest.mark.parametrize(
    ("flag", "typed", "used"),
    [
        (False, "", ""),
        (False, "file:///a", "file:///a"),
        (True, "file:///a", "file:///a"),
        (True, "", "mooncake://master:1?protocol=tcp&segment_mb=4096"),
    ],
)
def test_the_setting_of_a_store_counts_before_sglangs_flag(monkeypatch, caplog, flag, typed, used):
    caplog.set_level("INFO")
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_mm", lambda: SimpleNamespace(enable_mm_global_cache=flag)
    )
    monkeypatch.setenv("MOONCAKE_MASTER", "master:1")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    assert _store_url(Settings(store=typed)) == used
    assert caplog.text.count("--enable-mm-global-cache") == flag
    assert "segment_mb" not in caplog.text, "parameters may be secrets"


@pytest.mark.parametrize(
    ("device", "typed", "expected"),
    [
        ("cpu", {}, (2048, 32)),
        ("cuda", {}, (16_384, 128)),
        ("cuda", {"encoder_batch_patches": 100}, (100, 128)),
        ("cuda", {"encoder_batch_items": 3}, (16_384, 3)),
    ],
)
def test_an_accelerator_runs_more_at_once_unless_told(monkeypatch, device, typed, expected):
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_device", lambda: SimpleNamespace(device=device)
    )
    assert _batch(Settings(**typed)) == BatchBounds(*expected)


@pytest.mark.parametrize(
    ("grpc_mode", "http_port", "front"),
    [
        (False, None, ("https", "https://h:1", 1)),
        (True, None, ("grpc", "grpc://h:1", None)),
        (True, 2, ("grpc", "grpc://h:1", 2)),
    ],
)
def test_the_port_speaks_grpc_by_sglangs_flag_and_http_has_one_of_its_own(
    grpc_mode, http_port, front
):
    serving = SimpleNamespace(host="h", port=1, grpc_mode=grpc_mode, smg_grpc_mode=False)
    settings = Settings(encoder_http_port=http_port)
    found = _Front.of(settings, Trust(certfile="a"), serving)
    assert (found.scheme, found.name, found.http_port) == front
    assert (found.sockets == []) == (found.http_port is None)
    serving.smg_grpc_mode, serving.grpc_mode = grpc_mode, False
    assert _Front.of(settings, Trust(certfile="a"), serving) == found


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"encoder_http_port": 2}, "_HTTP_PORT is for encoders with --grpc-mode"),
        ({"encoder_push_networks": ("::/0",)}, "_PUSH_NETWORKS is for encoders with"),
    ],
)
def test_what_is_for_grpc_alone_is_refused_by_name(settings, said):
    serving = SimpleNamespace(host="h", port=1, grpc_mode=False, smg_grpc_mode=False)
    with pytest.raises(ConfigError, match=f"^SGLANG_EPD_ENCODER{said}"):
        _Front.of(Settings(**settings), Trust(), serving)


@pytest.mark.parametrize("url", ["language:8997", "http://user:pw@language:8997", "http://l/x"])
def test_where_to_register_has_to_be_a_servers_url(url):
    with pytest.raises(ConfigError, match="--encoder-register-urls"):
        checked_url("--encoder-register-urls", url)


async def test_an_encoder_that_begins_to_serve_keeps_what_it_has(service, metrics, monkeypatch):
    cpu = SimpleNamespace(device="cpu")
    monkeypatch.setattr("sglang.srt.runtime_context.get_device", lambda: cpu)
    gc.unfreeze()
    serving = _housekeeping(service, SimpleNamespace(close=closed), [], metrics)
    async with serving(None):
        assert gc.get_freeze_count() > 10_000


async def test_the_house_is_kept_after_a_turn_that_failed(service, metrics, monkeypatch, caplog):
    monkeypatch.setattr("sglang_epd.encoder.server._HOUSEKEEPING_S", 0.001)
    cpu = SimpleNamespace(device="cpu")
    monkeypatch.setattr("sglang.srt.runtime_context.get_device", lambda: cpu)
    turns: list[int] = []
    kept = asyncio.Event()

    async def close_unused() -> None:
        turns.append(len(turns))
        if len(turns) == 1:
            raise OSError("too many open files")
        kept.set()

    sender = SimpleNamespace(close=closed, close_unused=close_unused)
    async with asyncio.timeout(10), _housekeeping(service, sender, [], metrics)(None):
        await kept.wait()
    assert "too many open files" in caplog.text


async def closed() -> None:
    """Of a sender."""


async def test_new_connections_get_the_certificate_that_is_there_by_then(tmp_path: Path) -> None:
    """`--enable-ssl-refresh`, also of a key with a password."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

    password = "open sesame"
    made = certificates.make(tmp_path, password=password)
    trust = Trust(certfile=made.certfile, keyfile=made.keyfile, keyfile_password=password)
    options = {"http": PromptHeads, "log_config": None, "lifespan": "off", "ws": "none"}
    config = uvicorn.Config(app, **options, **tls_options(trust))
    end = follow_certificates(config, trust, every_s=0.1)
    server = uvicorn.Server(config)

    def ask(port: int, certificate: str) -> bytes:
        context = ssl.create_default_context(cafile=certificate)
        with urllib.request.urlopen(f"https://localhost:{port}/", context=context) as answer:
            return answer.read()

    with socket.create_server(("127.0.0.1", 0)) as opened:
        serving = asyncio.create_task(server.serve([opened]))
        port = opened.getsockname()[1]
        old = shutil.copy(made.certfile, tmp_path / "old.pem")
        assert await asyncio.to_thread(ask, port, old) == b"here"
        other = certificates.make(tmp_path / "other", password=password)
        os.replace(other.certfile, made.certfile)
        await asyncio.sleep(0.3)  # without its key it is none
        assert await asyncio.to_thread(ask, port, old) == b"here"
        os.replace(other.keyfile, made.keyfile)

        async def renewed() -> bool:
            try:
                return await asyncio.to_thread(ask, port, made.certfile) == b"here"
            except urllib.error.URLError:
                return False

        async with asyncio.timeout(30):
            while not await renewed():
                await asyncio.sleep(0.1)
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            await asyncio.to_thread(ask, port, old)
        end()
        server.should_exit = True
        await serving
