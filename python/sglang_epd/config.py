"""Settings that SGLang has no flag for, read once from `SGLANG_EPD_*`.

Everything SGLang does have a flag for is read from SGLang. An `SGLANG_EPD_`
variable that is not listed here is an error, so that a typing mistake is not
silently without effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_epd.errors import ConfigError

PREFIX = "SGLANG_EPD_"
# Read elsewhere: the switch by plugin.py, the run id between the processes of one
# server, the media limits by media/limits.py, the cache folder by scripts/.
_OTHER = {"SGLANG_EPD_RUN_ID", "SGLANG_EPD_RUN_SECRET", "SGLANG_EPD_CACHE"}
_MEDIA_PREFIX = "SGLANG_EPD_MEDIA_"
_MAY_BE_ZERO = {"min_patches", "url_cache_entries", "embedding_cache_mb"}


@dataclass(frozen=True)
class Settings:
    """Settings of one server process.

    Attributes:
        token: secret shared by encoder, language and decode servers; empty = none.
        request_timeout_s: one deadline for a request's items, from the moment it
            arrives until its embeddings are in the scheduler; retries spend it.
        dispatch_policy: how items are spread over encoders.
        encode: whether a language server that holds its tower
            (`--enable-adaptive-dispatch-to-encoder`) sends anything to encoders.
        min_patches: requests whose images are all smaller stay on such a server.
        encoder_header: whether a request may name its encoders (`x-encoder-hosts-ports`).
        encoder_wait_s: how long a request waits for an encoder where none is left to ask.
        encoder_timeout_s: how long one encoder may take for its share of a request before
            others are asked.
        max_body_mb: largest encode request an encoder accepts.
        receive_budget_mb: embeddings that a language server has granted, received or is
            reading take at most this; encoders wait for more.
        embedding_cache_mb: of the receive budget, what embeddings that nobody uses any more
            may take until their room is needed.
        grant_timeout_s: how long an encoder may take from a grant to the payload.
        shared_memory: whether an encoder writes into the memory of language servers of
            its own machine, instead of sending over a socket.
        encoder_max_items: items in work at a time on an encoder; more are refused with 503.
        encoder_queue_mb: encoded media in work at a time on an encoder, likewise.
        url_cache_entries: URLs that an encoder remembers the content of; 0 for none.
        encoder_batch_patches, encoder_batch_items: what an encoder runs in one forward
            pass; a single item may have more patches. None: as the device likes it.
        encoder_advertise_url: how language servers reach an encoder that registers itself;
            empty for its host and port.
        store: URL of a store that encoders share (`store.url`); empty for none. May hold a
            password.
        store_timeout_ms: how long an encoder waits for the store before it computes.
        content_identity: whether a server that encodes all of its media itself names them
            by their content, as encoders do (`seams/identities.py`).
        checksum: whether an encoder sends a digest of each embedding, to be compared
            where it arrives.
    """

    token: str = field(default="", repr=False)
    request_timeout_s: float = 120.0
    dispatch_policy: str = "affinity"
    encoder_wait_s: float = 30.0
    encoder_timeout_s: float = 60.0
    max_body_mb: int = 512
    receive_budget_mb: int = 2048
    embedding_cache_mb: int = 1024
    grant_timeout_s: float = 30.0
    encoder_max_items: int = 1024
    encoder_queue_mb: int = 1024
    url_cache_entries: int = 8192
    encoder_batch_patches: int | None = None
    encoder_batch_items: int = 32
    shared_memory: bool = True
    checksum: bool = False
    content_identity: bool = False
    encode: bool = True
    min_patches: int = 0
    encoder_header: bool = False
    encoder_advertise_url: str = ""
    store: str = field(default="", repr=False)
    store_timeout_ms: float = 250.0

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read and check the settings.

        Raises:
            ConfigError: an unknown variable or a value out of range, by name.
        """
        known: dict[str, tuple[str, Callable[[str], Any]]] = {
            "SGLANG_EPD_TOKEN": ("token", str),
            "SGLANG_EPD_REQUEST_TIMEOUT_S": ("request_timeout_s", float),
            "SGLANG_EPD_DISPATCH_POLICY": ("dispatch_policy", str),
            "SGLANG_EPD_ENCODER_WAIT_S": ("encoder_wait_s", float),
            "SGLANG_EPD_ENCODER_TIMEOUT_S": ("encoder_timeout_s", float),
            "SGLANG_EPD_MAX_BODY_MB": ("max_body_mb", int),
            "SGLANG_EPD_RECEIVE_BUDGET_MB": ("receive_budget_mb", int),
            "SGLANG_EPD_EMBEDDING_CACHE_MB": ("embedding_cache_mb", int),
            "SGLANG_EPD_GRANT_TIMEOUT_S": ("grant_timeout_s", float),
            "SGLANG_EPD_ENCODER_MAX_ITEMS": ("encoder_max_items", int),
            "SGLANG_EPD_ENCODER_QUEUE_MB": ("encoder_queue_mb", int),
            "SGLANG_EPD_URL_CACHE_ENTRIES": ("url_cache_entries", int),
            "SGLANG_EPD_ENCODER_BATCH_PATCHES": ("encoder_batch_patches", int),
            "SGLANG_EPD_ENCODER_BATCH_ITEMS": ("encoder_batch_items", int),
            "SGLANG_EPD_SHARED_MEMORY": ("shared_memory", switch),
            "SGLANG_EPD_CHECKSUM": ("checksum", switch),
            "SGLANG_EPD_CONTENT_IDENTITY": ("content_identity", switch),
            "SGLANG_EPD_STORE": ("store", str),
            "SGLANG_EPD_STORE_TIMEOUT_MS": ("store_timeout_ms", float),
            "SGLANG_EPD_ENCODE": ("encode", switch),
            "SGLANG_EPD_MIN_PATCHES": ("min_patches", int),
            "SGLANG_EPD_ENCODER_HEADER": ("encoder_header", switch),
            "SGLANG_EPD_ENCODER_ADVERTISE_URL": ("encoder_advertise_url", str),
        }
        values: dict[str, Any] = {}
        for name, raw in env.items():
            if not name.startswith(PREFIX) or name in _OTHER or name.startswith(_MEDIA_PREFIX):
                continue
            if name not in known:
                raise ConfigError(
                    f"{name} is not a setting of sglang-epd; known: {', '.join(sorted(known))}"
                )
            field, kind = known[name]
            try:
                values[field] = kind(raw)
            except ValueError:
                raise ConfigError(
                    f"{name}={raw!r} is not a valid {kind.__name__.strip('_')}"
                ) from None
        settings = cls(**values)
        for name, (field, kind) in known.items():
            value = getattr(settings, field)
            if kind is float and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be greater than 0 and finite")
            least = 0 if field in _MAY_BE_ZERO else 1
            if kind is int and value is not None and value < least:
                raise ConfigError(f"{name} must be greater than 0")
        return settings


def switch(raw: str) -> bool:
    """Read a setting that is on or off."""
    values = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    try:
        return values[raw.strip().lower()]
    except KeyError:
        raise ValueError(raw) from None
