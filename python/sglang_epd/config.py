"""Settings that SGLang has no flag for, read once from `SGLANG_EPD_*`.

Everything SGLang does have a flag for is read from SGLang. `Settings` is the one schema: it
reads the environment, refuses unknown names, so that a typing mistake is not silently without
effect, and docs/settings.md is written from it.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import FieldInfo, asdict, fields

from sglang_epd.errors import ConfigError

logger = logging.getLogger(__name__)


PREFIX = "SGLANG_EPD_"
# Read elsewhere: the run id between the processes of one server, the cache folder by
# scripts/. The switch `SGLANG_EPD` itself, read by plugin.py, has no underscore behind.
_OTHER = {"SGLANG_EPD_RUN_ID", "SGLANG_EPD_RUN_SECRET", "SGLANG_EPD_CACHE"}
_SGLANGS_TIMEOUT = "SGLANG_ENCODER_RECV_TIMEOUT"

# Titles and bounds are in messages; titles are on docs/settings.md too.
Text = Annotated[str, Meta(title="text")]
Folder = Annotated[str, Meta(title="a folder")]
Hosts = Annotated[tuple[str, ...], Meta(title="host names, with commas between")]
Networks = Annotated[tuple[str, ...], Meta(title="CIDRs, with commas between")]
Switch = Annotated[bool, Meta(title="on, off")]
Early = Annotated[Literal["auto", "on", "off"], Meta(title="auto, on, off")]
Policy = Annotated[str, Meta(title="affinity, least_loaded, round_robin, shuffle")]
Fingerprint = Annotated[Literal["samples", "full"], Meta(title="samples, full")]
Whole = Annotated[int, Meta(title="whole number", ge=0)]
Count = Annotated[int, Meta(title="whole number", ge=1)]
Port = Annotated[int, Meta(title="a port", ge=1, lt=65_536)]
Number = Annotated[float, Meta(title="number", gt=0, lt=1e12)]
Mebibytes = Annotated[float, Meta(title="a number of MiB", gt=0, lt=1e12)]
Seconds = Annotated[float, Meta(title="a number of seconds", gt=0, lt=1e12)]
_PROBES = "nothing: encoders are probed every second, and hold leases of 15 s"
# Variables and flags of SGLang's own EPD that this package does not read, by the kind of server
# that would read them in-tree, and what to use instead. Those that would be missed are refused
# in `seams/server_args.py`, some are honoured: docs/migration.md has all of them.
UNREAD: dict[str, dict[str, str]] = {
    "encoder": {
        "SGLANG_ENCODER_MAX_BATCH_SIZE": (
            "SGLANG_EPD_ENCODER_BATCH_ITEMS and SGLANG_EPD_ENCODER_BATCH_PATCHES"
        ),
        "SGLANG_ENCODER_DP_WORKER_MAX_INFLIGHT": "SGLANG_EPD_ENCODER_MAX_ITEMS, of all towers",
        "SGLANG_ENCODER_REQ_TIMEOUT": "SGLANG_EPD_ENCODER_TIMEOUT_S on language servers",
        "SGLANG_ENCODER_SEND_TIMEOUT": "SGLANG_EPD_GRANT_TIMEOUT_S on language servers",
        "REQUEST_TIMEOUT": "SGLANG_EPD_MEDIA_TIMEOUT_S",
        "--pp-size": "nothing: a tower has one stage",
        "--attn-dp-size": "--dp-size alone: as many towers",
    },
    "language": {
        "SGLANG_ENCODER_HTTP_TIMEOUT": "SGLANG_EPD_ENCODER_TIMEOUT_S",
        "SGLANG_ENCODER_GRPC_TIMEOUT_SECS": "SGLANG_EPD_ENCODER_TIMEOUT_S",
        "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL": _PROBES,
        "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT": _PROBES,
        "SGLANG_ENCODER_BOOTSTRAP_EVICTED_TTL": _PROBES,
        "SGLANG_EMBEDDING_POOL_SIZE_MB": "SGLANG_EPD_RECEIVE_BUDGET_MB, of the host's memory",
        "--trust-mm-content-hashes": "nothing: a content hash is always compared",
    },
}


class Settings(Struct, frozen=True, kw_only=True):
    """Settings of one server process.

    Attributes, with the servers that read them (`media_*`: those that decode media):
        token [encoders, language, decode]: Secret that they share. SGLang's `--api-key` counts
            where it is not set.
        request_timeout_s [language]: One deadline for a request's media, from its arrival until
            its embeddings are in the scheduler; retries spend it. Where it is not set, SGLang's
            `SGLANG_ENCODER_RECV_TIMEOUT` counts.
        dispatch_policy [language]: How items are spread over encoders: `affinity` (an item returns
            to the encoder that has encoded it), `least_loaded` (patches in work), `round_robin`,
            or `shuffle` (SGLang's own).
        encoder_wait_s [language]: How long a request waits where no encoder is left to ask; then
            it gets 503.
        encoder_timeout_s [language]: How long one encoder may take for its share of a request
            before others are asked, if there is one that has room. Unless given, half of the
            deadline above if that is longer.
        prefill_early [language]: Whether a prompt's beginning is prefilled while its later media
            are still being encoded: `auto` where a part is large and the server has nothing else
            to prefill, `on` for every part, `off` for none.
        tell_sources [language]: Whether answers of `/generate` say where their media came from
            (`meta_info.media_sources`). A user learns from it whether another client with the same
            cache salt has sent the same media before.
        receive_budget_mb [language]: Embeddings held at a time: granted, received, being read or
            kept. Encoders wait for more. Unless given, a sixteenth of the memory that the
            server may use, from 2048 to 16384, divided by the ranks of a further host that hold
            copies. On an accelerator all of it is taken at start.
            With `zmq_to_tokenizer` each tokenizer worker has an equal part.
        embedding_cache_mb [language]: The part of that budget in which embeddings that are not in
            use stay for the next request with the same image. They are evicted when their room is
            needed. Half of the budget unless given.
        grant_timeout_s [language]: How long an encoder may take from a grant to the payload.
        encoder_max_items [encoders]: Items in work at a time; more are answered with 503. Items
            whose media are still being fetched are three quarters of them at most.
        encoder_queue_mb [encoders]: Encoded media in work at a time; more is answered with 503.
            Fetched media have three quarters of it at most, and wait for room. Unless given, a
            thirty-second of the memory that the server may use, from 1024 to 8192.
        decode_mb [encoders; language with `--enable-adaptive-dispatch-to-encoder`]: MiB that media
            are decoded and preprocessed in. Items wait for their share; one that takes more is
            answered with 413. The workers of `--dp-size` and `--tp-size` share them. Unless given,
            an eighth of the memory that the server may use, from 4096 to 32768 for each worker.
        encoder_batch_patches [encoders]: Patches in one forward pass. A single item may have more;
            a longer video of Qwen2-VL or Qwen3-VL takes several passes. 16384, or 2048 on a CPU,
            unless given.
        encoder_batch_items [encoders]: Items in one forward pass. 128, or 32 on a CPU, unless
            given.
        encoder_advertise_url [encoders with `--encoder-register-urls`]: How language servers reach
            it; its host and port unless given.
        encoder_http_port [encoders with `--grpc-mode`]: A second port, with the routes over HTTP
            (`/metrics`, `/health`, `/v1/status`). None unless given.
        encoder_push_networks [encoders with `--grpc-mode`]: Networks that embeddings may be pushed
            into for SGLang's own language servers, which have no token. None unless given.
        url_cache_entries [encoders]: URLs whose content is known for as long as HTTP caching lets
            it; 0 remembers none.
        shared_memory [encoders]: Whether it writes into the memory of language servers on its own
            machine, instead of sending over a socket.
        store [encoders]: URL of a store of embeddings that they share: `file://` or
            `mooncake://`. Where it is not set, `--enable-mm-global-cache` counts, with SGLang's
            variables of Mooncake.
        store_timeout_ms [encoders]: How long the store may delay an item.
        fingerprint [encoders, language]: How servers compare their towers; the same on all
            servers. Three `samples` of 512 bytes of each tensor take milliseconds and find every
            training run; the `full` tensors find a sparse edit too, and all of the tower is read
            when a server starts.
        emulate [all, without an accelerator]: The accelerator that is emulated: each forward pass
            takes the time that a profile says. The name of a profile that comes along, or the path
            of a file. For tests and benchmarks.
        emulate_dilate [all, with `SGLANG_EPD_EMULATE`]: The factor that stretches those times,
            so that the host's real time weighs less beside them. Stretch arrivals as well, and
            divide the measured times by it.
        media_max_mb: Largest encoded media of an item, also after a Content-Encoding is undone.
            Where it is not set, `--media-url-max-file-size-mb` counts for media behind URLs (0: no
            limit), and where it is larger for inline media too.
        media_max_pixels: Width times height that an image's header may claim; JPEG 2000 may claim
            25000000 at most.
        media_max_video_frames: Frames in a video file, read or not.
        media_max_video_pixels: Pixels of one frame of a video.
        media_max_video_total_pixels: Pixels of all frames that the model is shown, before they are
            made smaller.
        media_max_audio_s: How long an audio clip may last.
        media_timeout_s: One fetch: names, TLS, redirects and the body.
        media_allowed_domains: Hosts that may be asked, each with its subdomains; all unless given.
            Where it is not set, `--allowed-media-domains` counts, whose hosts are exact. Opens no
            private address.
        media_allowed_networks: Private networks that media may come from.
        media_local_root: Folder below which `file://` media may be read.
    """

    token: Text = ""
    request_timeout_s: Seconds = 120.0
    dispatch_policy: Policy = "affinity"
    encoder_wait_s: Seconds = 30.0
    encoder_timeout_s: Seconds = 60.0
    prefill_early: Early = "auto"
    tell_sources: Switch = True
    receive_budget_mb: Count | None = None
    embedding_cache_mb: Whole | None = None
    grant_timeout_s: Seconds = 30.0
    encoder_max_items: Count = 1024
    encoder_queue_mb: Count | None = None
    decode_mb: Count | None = None
    encoder_batch_patches: Count | None = None
    encoder_batch_items: Count | None = None
    encoder_advertise_url: Text = ""
    encoder_http_port: Port | None = None
    encoder_push_networks: Networks = ()
    url_cache_entries: Whole = 8192
    shared_memory: Switch = True
    store: Text = ""
    store_timeout_ms: Number = 250.0
    fingerprint: Fingerprint = "samples"
    emulate: Text = ""
    emulate_dilate: Number = 1.0
    media_max_mb: Mebibytes = 64.0
    media_max_pixels: Count = 100_000_000
    media_max_video_frames: Count = 18_000
    media_max_video_pixels: Count = 4096 * 2304
    media_max_video_total_pixels: Count = 1_000_000_000
    media_max_audio_s: Seconds = 600.0
    media_timeout_s: Seconds = 10.0
    media_allowed_domains: Hosts = ()
    media_allowed_networks: Networks = ()
    media_local_root: Folder = ""

    def __repr__(self) -> str:
        shown = {name: one for name, one in asdict(self).items() if name not in ("token", "store")}
        return f"Settings({shown})"

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read and check the settings.

        Args:
            env: instead of the process's environment.

        Raises:
            ConfigError: an unknown variable or a value out of range, by name.
        """
        told, known = os.environ if env is None else env, variables()
        links = _service_links(told)
        values: dict[str, Any] = {}
        if theirs := told.get(_SGLANGS_TIMEOUT):
            values["request_timeout_s"] = _read(
                _SGLANGS_TIMEOUT, theirs, known["SGLANG_EPD_REQUEST_TIMEOUT_S"].type
            )
        for name, raw in told.items():
            if not name.startswith(PREFIX) or name in _OTHER or name.startswith(links):
                continue
            if name not in known:
                raise ConfigError(
                    f"{name} is not a setting of sglang-epd; known: {', '.join(sorted(known))}"
                )
            # An empty limit of media keeps its default.
            if raw.strip() or not name.startswith(f"{PREFIX}MEDIA_"):
                values[known[name].name] = _read(name, raw, known[name].type)
        if "encoder_timeout_s" not in values:
            # Or a longer deadline would not be any encoder's.
            half = values.get("request_timeout_s", 0.0) / 2
            values["encoder_timeout_s"] = max(half, cls().encoder_timeout_s)
        return cls(**values)


def variables() -> dict[str, FieldInfo]:
    """The settings by their names in the environment, in their order."""
    return {f"{PREFIX}{one.name.upper()}": one for one in fields(Settings)}


def _service_links(env: Mapping[str, str]) -> tuple[str, ...]:
    """The beginnings of the names that Kubernetes gives each container for a service, as
    `sglang-epd-router`: `…_SERVICE_HOST`, `…_SERVICE_PORT`, `…_PORT_80_TCP`."""
    services = [name.removesuffix("_HOST") for name in env if name.endswith("_SERVICE_HOST")]
    return tuple(each for one in services for each in (one, f"{one.removesuffix('SERVICE')}PORT"))


def bounds(hint: Any) -> Meta:
    """The values of a setting of this type."""
    while get_origin(hint) is not Annotated:  # of a type or None
        hint = get_args(hint)[0]
    return get_args(hint)[1]


def typed(value: Any) -> str:
    """A value as it would be typed into the environment."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ",".join(map(typed, value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)


def _check_networks(name: str, parts: list[str]) -> None:
    try:
        for part in parts:
            ipaddress.ip_network(part)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _read(name: str, raw: str, hint: Any) -> Any:
    try:
        if hint in (Hosts, Networks):
            parts = [part for one in raw.split(",") if (part := one.strip())]
            if hint is Networks:
                _check_networks(name, parts)
            return convert(parts, hint)
        if hint in (Text, Folder):
            return raw
        plain = raw.strip().lower()
        if hint is Switch:
            plain = {"on": "true", "off": "false"}.get(plain, plain)
        return convert(plain, hint, strict=False)
    except ValidationError:
        told = bounds(hint)
        limits = (("at least", told.ge), ("more than", told.gt), ("less than", told.lt))
        allowed = [str(told.title)]
        allowed += [f"{word} {limit:g}" for word, limit in limits if limit is not None]
        raise ConfigError(f"{name}={raw!r}: expected {', '.join(allowed)}") from None


def announce(server: str, flags: Mapping[str, Any]) -> None:
    """Log one line that names the set variables and flags that are not read. Once a server.

    Args:
        server: "encoder" or "language".
        flags: those of `UNREAD`, with their values.
    """
    set_ones = [
        f"{name} (instead: {instead})"
        for name, instead in UNREAD[server].items()
        if flags.get(name) or name in os.environ
    ]
    if set_ones:
        logger.warning("Set, but not read by sglang-epd: %s", "; ".join(set_ones))
