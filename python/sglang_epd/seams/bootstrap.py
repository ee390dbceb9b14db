"""The registration server of encoders in place of SGLang's, and the layouts beside the routes
of a prefill server's bootstrap server.

Leans on `TokenizerManager.init_disaggregation`, which makes an
`EncoderBootstrapServer(host=, port=, urls=)` right before the multimodal receiver. It
comes too early: no encoder may register before this server's identity is known. On
`entrypoints.engine.Engine.shutdown`, which leaves `tokenizer_manager.encoder_bootstrap_server` as
it is. And on
`disaggregation.common.conn.CommonKVBootstrapServer._setup_routes`, which every transfer
backend's bootstrap server runs in its constructor, before its thread starts to serve
`self.app` (aiohttp).
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_epd.dispatch.pool import Pool
    from sglang_epd.dispatch.watcher import Watcher
    from sglang_epd.language.layouts import Board
    from sglang_epd.trust import Trust

_BOARD = "_sglang_epd_layouts"


class BootstrapPlace:
    """Stands in for `EncoderBootstrapServer`: keeps where it would listen."""

    # The one that `start` fills: of the server that is being started.
    latest: BootstrapPlace | None = None

    def __init__(self, host: str, port: int, urls: list[str] | None = None) -> None:
        self.host = host
        self.port = port
        self.urls = list(urls or ())
        self.watcher: Watcher | None = None
        self.pool: Pool | None = None
        self.ends: list[Callable[[], None]] = []
        BootstrapPlace.latest = self

    def list_urls(self) -> list[str]:
        """All encoders that are known."""
        return self.urls if self.pool is None else self.pool.urls()

    def close(self) -> None:
        """End registration, and what ends with this server."""
        if self.watcher is not None:
            self.watcher.close()
        for end in self.ends:
            end()
        self.ends.clear()


def end(_result: None, engine: Any) -> None:
    """After `Engine.shutdown`: the port is free for an engine after it, encoders are watched no
    longer, and a receiver that was in this process gives its memory back."""
    place = getattr(engine.tokenizer_manager, "encoder_bootstrap_server", None)
    if place is not None:
        place.close()


def ends_with_its_server(end: Callable[[], None]) -> None:
    """Have `end` called when the server ends that is being started, if that is before this process
    does."""
    assert BootstrapPlace.latest is not None, "SGLang makes it before the multimodal receiver"
    BootstrapPlace.latest.ends.append(end)


def trust() -> Trust:
    """The token and the certificate of this server.

    Raises:
        ConfigError: a setting that cannot be honoured.
    """
    from sglang.srt.runtime_context import get_serving

    from sglang_epd.config import Settings
    from sglang_epd.trust import Trust

    return Trust.of(Settings.from_env().token, get_serving())


def start(pool: Pool, observe_lag: Callable[[float], None] = lambda _seconds: None) -> Watcher:
    """Fill `pool` with this server's encoders, and keep it true, for as long as this process
    lives: the one where SGLang has asked for its bootstrap server.

    Args:
        observe_lag: called with the lag, in seconds, of the event loop that watches them.

    Raises:
        ConfigError: the port, a URL or a certificate cannot be used.
    """
    from sglang.srt.runtime_context import get_serving

    from sglang_epd.dispatch.watcher import Watcher
    from sglang_epd.seams import rundir

    place = BootstrapPlace.latest
    assert place is not None, "SGLang makes it before the multimodal receiver"
    alone = get_serving().tokenizer_worker_num == 1
    secret = b"" if alone else hashlib.sha256(b"epd discovery" + rundir.secret()).digest()
    watcher = Watcher(
        pool, place.urls, place.host, place.port, trust(), secret=secret, observe_lag=observe_lag
    )
    watcher.start()
    place.watcher, place.pool = watcher, pool
    # Encoders then find the port closed, and do not wait for an answer.
    atexit.register(watcher.close)
    return watcher


def serve_layouts(_result: None, server: Any) -> None:
    """After `_setup_routes`: add ours on a `--language-only` server.

    Not with `--enable-adaptive-dispatch-to-encoder`, which keeps some media from encoders, so
    that a decode server would wait in vain, nor with several tokenizer workers, because the
    launcher, which has the bootstrap server, does not know their layouts.
    """
    from sglang.srt.runtime_context import get_disagg, get_serving

    disagg = get_disagg()
    if not disagg.language_only or disagg.enable_adaptive_dispatch_to_encoder:
        return
    if get_serving().tokenizer_worker_num > 1:
        return
    from sglang_epd.language.layout_exchange import PATH, LayoutRoute
    from sglang_epd.language.layouts import Board

    board = Board()
    setattr(server, _BOARD, board)
    server.app.router.add_get(PATH, LayoutRoute(board, trust()).handle)


def board_of(server: Any) -> Board | None:
    """Where the layouts are written that a manager's bootstrap server serves, if it does."""
    return getattr(server, _BOARD, None)
