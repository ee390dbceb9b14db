"""The encoders that a request names: `x-encoder-hosts-ports: host:port,host:port`.

Gateways that schedule encoders themselves (llm-d) name those that a request may use.
Read only with SGLANG_EPD_ENCODER_HEADER, because it lets any client choose
among the encoders that this server knows.

Leans on `managers.tokenizer_manager.TokenizerManager._init_req_state(obj, request)`, which
`generate_request` calls with the HTTP request (None of one that did not come over HTTP)
before it dispatches or tokenizes anything, in the same task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sglang_epd.errors import EncoderChoiceError

if TYPE_CHECKING:  # imports prometheus_client, which SGLang must come before
    from sglang_epd.observability.language import HeaderMetrics

logger = logging.getLogger(__name__)

HEADER = "x-encoder-hosts-ports"
_MAX_NAMED = 256
_PORTS = {"http": 80, "https": 443}

# The HTTP request that the current task serves.
_request: ContextVar[Any] = ContextVar("sglang_epd_request", default=None)


def current_request() -> Any:
    """The `fastapi.Request` that this task of a language server serves; None without one."""
    return _request.get()


def note(original: Any, manager: Any, obj: Any, request: Any = None) -> Any:
    """Around `_init_req_state`."""
    # The copies of a sampled request come without it, in the same task.
    if request is not None and getattr(manager, "mm_receiver", None) is not None:
        _request.set(request)
    return original(manager, obj, request)


class EncoderHeader:
    """Reads the header of the current request.

    Args:
        urls: of all encoders that this server knows.
        metrics: counts unknown names.
    """

    def __init__(self, urls: Callable[[], Iterable[str]], metrics: HeaderMetrics) -> None:
        self._urls = urls
        self._metrics = metrics
        self._told = False

    def chosen_encoders(self) -> tuple[str, ...] | None:
        """URLs of the encoders that the current request may use; None for all.

        Call it in the request's own task, before it is handed to another.

        Raises:
            EncoderChoiceError: it names encoders, none of which is known.
        """
        request = _request.get()
        # The header may be there several times: all of them count.
        values = [] if request is None else request.headers.getlist(HEADER)
        named = [name for name in ",".join(values).split(",", _MAX_NAMED) if name.strip()]
        if not named:
            return None
        wanted = {_place(name) for name in named[:_MAX_NAMED]}
        known = [(url, _place(url)) for url in self._urls()]
        chosen = tuple(url for url, place in known if place is not None and place in wanted)
        unknown = len(wanted - {place for _, place in known})
        if unknown:
            self._metrics.unknown_encoders.inc(unknown)
            if not self._told:
                self._told = True
                logger.warning("A request names encoders that this server does not know")
        if not chosen:
            raise EncoderChoiceError(
                f"{HEADER} names no encoder that this server knows; "
                "it takes host:port, comma separated, as in --encoder-urls"
            )
        return chosen


def _place(name: str) -> tuple[str, int] | None:
    """Host and port of a `host:port` or a URL; None where it is neither."""
    text = name.strip()
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:  # a port that is no number, a bracket that does not close
        return None
    if not host or port is None or parts.username is not None:
        return None
    return host, port


def chooser(
    enabled: bool, urls: Callable[[], Iterable[str]]
) -> Callable[[], tuple[str, ...] | None]:
    """`EncoderHeader.chosen_encoders` of this process; without `enabled` one that does not
    look at requests."""
    if not enabled:
        return lambda: None
    from sglang_epd.observability.language import HeaderMetrics

    logger.info("EPD: requests may name their encoders (%s)", HEADER)
    return EncoderHeader(urls, HeaderMetrics()).chosen_encoders
