"""How a language server finds its encoders, in place of SGLang's bootstrap server.

Leans on `TokenizerManager.init_disaggregation`, which makes an
`EncoderBootstrapServer(host=, port=, urls=)` right before the multimodal receiver. It
comes too early: nobody may register before this server's identity is known.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_epd.dispatch.pool import Pool
    from sglang_epd.dispatch.watcher import Watcher
    from sglang_epd.trust import Trust


class BootstrapPlace:
    """Stands in for `EncoderBootstrapServer`: keeps where it would listen.

    Args:
        urls: as typed (`--encoder-urls`).
    """

    # What `start` is to serve; SGLang makes one in a process.
    latest: BootstrapPlace | None = None

    def __init__(self, host: str, port: int, urls: list[str] | None = None) -> None:
        self.host = host
        self.port = port
        self.urls = list(urls or ())
        self.watcher: Watcher | None = None
        self._pool: Pool | None = None
        BootstrapPlace.latest = self

    def list_urls(self) -> list[str]:
        """All encoders that are known."""
        return self.urls if self._pool is None else self._pool.urls()

    def close(self) -> None:
        """Nobody can register any more."""
        if self.watcher is not None:
            self.watcher.close()

    def watch(
        self, pool: Pool, trust: Trust, secret: bytes, observe_lag: Callable[[float], None]
    ) -> Watcher:
        """Fill `pool`, and keep it true, from now on."""
        from sglang_epd.dispatch.watcher import Watcher

        watcher = Watcher(
            pool,
            self.urls,
            self.host,
            self.port,
            trust,
            secret=secret,
            observe_lag=observe_lag,
        )
        watcher.start()
        self.watcher, self._pool = watcher, pool
        # Encoders then hear that nobody listens, and do not wait for an answer.
        atexit.register(watcher.close)
        return watcher


def trust() -> Trust:
    """Whom this server believes, and what it shows.

    Raises:
        ConfigError: a setting that cannot be honoured.
    """
    from sglang.srt.runtime_context import get_serving

    from sglang_epd.config import Settings
    from sglang_epd.trust import Trust

    return Trust.of(Settings.from_env().token, get_serving())


def start(pool: Pool, observe_lag: Callable[[float], None] = lambda _seconds: None) -> Watcher:
    """Find this server's encoders, for as long as its tokenizer process lives.

    To be called once `pool` is there, in the process where SGLang has asked for its
    bootstrap server.

    Args:
        observe_lag: told how late the event loop is that watches them.

    Raises:
        ConfigError: the port, a URL or a certificate cannot be used.
    """
    from sglang.srt.runtime_context import get_serving

    from sglang_epd.seams import rundir

    place = BootstrapPlace.latest
    assert place is not None, "SGLang makes it before the multimodal receiver"
    alone = get_serving().tokenizer_worker_num == 1
    secret = b"" if alone else hashlib.sha256(b"epd discovery" + rundir.secret()).digest()
    return place.watch(pool, trust(), secret, observe_lag)
