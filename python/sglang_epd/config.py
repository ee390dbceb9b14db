"""Settings that SGLang has no flag for, read once from `SGLANG_EPD_*` or a file.

Everything SGLang does have a flag for is read from SGLang. What is declared here, and in
`media/limits.py`, is the one schema: it reads the environment and the file, refuses what
it does not know, so that a typing mistake is not silently without effect, and
docs/settings.md is written from it.

`SGLANG_EPD_CONFIG` names a YAML file whose `settings` are these, in small letters and
without the prefix; what the environment says counts before it:

    settings:
      dispatch_policy: least_loaded
      media_allowed_networks: [10.0.0.0/8]
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_epd.errors import ConfigError

PREFIX = "SGLANG_EPD_"
CONFIG_FILE = "SGLANG_EPD_CONFIG"
# Read elsewhere: the run id between the processes of one server, the cache folder by
# scripts/. The switch `SGLANG_EPD` itself, read by plugin.py, has no underscore behind.
_OTHER = {CONFIG_FILE, "SGLANG_EPD_RUN_ID", "SGLANG_EPD_RUN_SECRET", "SGLANG_EPD_CACHE"}
_MEDIA_PREFIX = "SGLANG_EPD_MEDIA_"
_MOST_FILE_BYTES = 1 << 20
# What a file may hold beside `settings`: options of `sglang-epd up`, which reads them.
SECTIONS = ("settings", "up")


@dataclass(frozen=True)
class Declared:
    """One setting, as people are told of it.

    Attributes:
        variable: its name in the environment.
        values: what it takes.
        default: as it would be typed; empty for none.
        servers: whom it concerns.
        text: what it does.
    """

    variable: str
    values: str
    default: str
    servers: str
    text: str

    @property
    def key(self) -> str:
        """Its name in a file."""
        return self.variable.removeprefix(PREFIX).lower()


def switch(raw: str) -> bool:
    """Read a setting that is on or off."""
    values = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    try:
        return values[raw.strip().lower()]
    except KeyError:
        raise ValueError(raw) from None


def log_format(raw: str) -> str:
    """Read how log lines are written."""
    value = raw.strip().lower()
    if value not in ("text", "json"):
        raise ValueError(raw)
    return value


def fingerprint(raw: str) -> str:
    """Read what of a tower's weights is compared."""
    value = raw.strip().lower()
    if value not in ("samples", "full"):
        raise ValueError(raw)
    return value


_KINDS: dict[Callable[[str], Any], str] = {
    str: "text",
    int: "whole number",
    float: "number",
    switch: "on, off",
    log_format: "text, json",
    fingerprint: "samples, full",
}


def _setting(
    kind: Callable[[str], Any],
    default: Any,
    servers: str,
    text: str,
    *,
    least: int = 1,
    secret: bool = False,
    instead_of: str = "",
) -> Any:
    """A field of `Settings`.

    Args:
        kind: reads it from text.
        servers: whom it concerns.
        text: what it does, for docs/settings.md.
        least: the smallest whole number.
        secret: whether it must not be shown.
        instead_of: SGLang's variable that counts where this one is not set.
    """
    told = {"kind": kind, "servers": servers, "text": text, "least": least}
    told["instead_of"] = instead_of
    return dataclasses.field(default=default, repr=not secret, metadata=told)


@dataclass(frozen=True)
class Settings:
    """Settings of one server process; each says itself what it does."""

    token: str = _setting(
        str,
        "",
        "encoders, language, decode",
        "Secret that they share. Without it encoders are asked, and register, with SGLang's "
        "`--api-key`.",
        secret=True,
    )
    request_timeout_s: float = _setting(
        float,
        120.0,
        "language",
        "One deadline for a request's media, from its arrival until its embeddings are in "
        "the scheduler; retries spend it. Where it is not set, SGLang's "
        "`SGLANG_ENCODER_RECV_TIMEOUT` counts.",
        instead_of="SGLANG_ENCODER_RECV_TIMEOUT",
    )
    dispatch_policy: str = _setting(
        str,
        "affinity",
        "language",
        "How items are spread over encoders: `affinity` (what was encoded somewhere goes there "
        "again), `least_loaded` (patches in work), `round_robin`, or `shuffle` (SGLang's own).",
    )
    encoder_wait_s: float = _setting(
        float,
        30.0,
        "language",
        "How long a request waits where no encoder is left to ask; then it gets 503.",
    )
    encoder_timeout_s: float = _setting(
        float,
        60.0,
        "language",
        "How long one encoder may take for its share of a request before others are asked. "
        "Unless given, half of the deadline above where that is more.",
    )
    encoder_header: bool = _setting(
        switch,
        False,
        "language",
        "Whether a request may name its encoders (`x-encoder-hosts-ports: host:port,...`).",
    )
    tell_sources: bool = _setting(
        switch,
        True,
        "language",
        "Whether answers of `/generate` say where their media came from "
        "(`meta_info.media_sources`). A user learns from it whether somebody with the same cache "
        "salt has sent the same media before.",
    )
    encode: bool = _setting(
        switch,
        True,
        "language, with `--enable-adaptive-dispatch-to-encoder`",
        "Whether anything goes to encoders.",
    )
    min_patches: int = _setting(
        int,
        0,
        "language, with `--enable-adaptive-dispatch-to-encoder`",
        "Requests whose images are all smaller than so many patches (14 x 14 px) do not go to "
        "encoders.",
        least=0,
    )
    receive_budget_mb: int | None = _setting(
        int,
        None,
        "language",
        "Embeddings that it holds at a time: granted, received, being read or kept. Encoders "
        "wait for more. Unless given, a sixteenth of the memory that the server may use, from "
        "2048 to 16384.",
    )
    embedding_cache_mb: int | None = _setting(
        int,
        None,
        "language",
        "Of that budget, embeddings that nobody uses any more, kept for the next request with "
        "the same image; they go when their room is needed. Half of the budget unless given.",
        least=0,
    )
    grant_timeout_s: float = _setting(
        float, 30.0, "language", "How long an encoder may take from a grant to the payload."
    )
    max_body_mb: int = _setting(int, 512, "encoders", "Largest encode request.")
    encoder_max_items: int = _setting(
        int,
        1024,
        "encoders",
        "Items in work at a time; more are answered with 503. Items whose media are still being "
        "fetched are three quarters of them at most, and so are items of requests of more than 16.",
    )
    encoder_queue_mb: int | None = _setting(
        int,
        None,
        "encoders",
        "Encoded media in work at a time; more is answered with 503. Fetched media have three "
        "quarters of it at most, and wait for room. Unless given, a thirty-second of the memory "
        "that the server may use, from 1024 to 8192.",
    )
    decode_mb: int | None = _setting(
        int,
        None,
        "encoders; language with `--enable-adaptive-dispatch-to-encoder`",
        "MiB that media are decoded and preprocessed in. Items wait for their share; one that "
        "takes more is answered with 413. The workers of `--dp-size` and `--tp-size` share them. "
        "Unless given, an eighth of the memory that the server may use, from 4096 to 32768.",
    )
    encoder_batch_patches: int | None = _setting(
        int,
        None,
        "encoders",
        "Patches in one forward pass; a single item may have more. 16384, or 2048 on a CPU, "
        "unless given.",
    )
    encoder_batch_items: int = _setting(int, 32, "encoders", "Items in one forward pass.")
    encoder_advertise_url: str = _setting(
        str,
        "",
        "encoders with `--encoder-register-urls`",
        "How language servers reach it; its host and port unless given.",
    )
    url_cache_entries: int = _setting(
        int,
        8192,
        "encoders",
        "URLs whose content is known for as long as HTTP caching lets it; 0 asks for each anew.",
        least=0,
    )
    shared_memory: bool = _setting(
        switch,
        True,
        "encoders",
        "Whether it writes into the memory of language servers on its own machine, instead of "
        "sending over a socket.",
    )
    checksum: bool = _setting(
        switch,
        False,
        "encoders",
        "Whether a digest goes with each embedding, to be compared where it arrives.",
    )
    store: str = _setting(
        str,
        "",
        "encoders",
        "URL of a store of embeddings that they share: `file://`, `redis://`, `mooncake://`.",
        secret=True,
    )
    store_timeout_ms: float = _setting(
        float, 250.0, "encoders", "How long the store may delay an item."
    )
    fingerprint: str = _setting(
        fingerprint,
        "samples",
        "encoders, language",
        "What of each tensor of a tower tells two servers that they hold the same: three `samples` "
        "of 512 bytes, which is done in milliseconds and finds every training run, or the `full` "
        "tensor, which finds a sparse edit too and reads all of the tower when a server starts. "
        "The same on all servers.",
    )
    content_identity: bool = _setting(
        switch,
        False,
        "servers that encode all media themselves",
        "Whether inline media have the names in the prefix cache that they have on language "
        "servers, of their bytes and not of their pixels.",
    )
    log_format: str = _setting(
        log_format,
        "text",
        "encoders, language, decode",
        "How this package's own log lines are written: `text`, in SGLang's format, or `json`, one "
        "object a line. Both say whose request a line is about.",
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read and check the settings.

        Raises:
            ConfigError: an unknown variable or a value out of range, by name.
        """
        fields = {f"{PREFIX}{one.name.upper()}": one for one in dataclasses.fields(cls)}
        told = environment(env)
        values: dict[str, Any] = {}
        for one in dataclasses.fields(cls):
            if theirs := told.get(one.metadata["instead_of"]):
                values[one.name] = _read(one.metadata["instead_of"], theirs, one.metadata)
        for name, raw in told.items():
            if not name.startswith(PREFIX) or name in _OTHER or name.startswith(_MEDIA_PREFIX):
                continue
            if name not in fields:
                raise ConfigError(
                    f"{name} is not a setting of sglang-epd; known: {', '.join(sorted(fields))}"
                )
            values[fields[name].name] = _read(name, raw, fields[name].metadata)
        if "encoder_timeout_s" not in values:
            # Or a longer deadline would not be any encoder's.
            half = values.get("request_timeout_s", 0.0) / 2
            values["encoder_timeout_s"] = max(half, cls.encoder_timeout_s)
        return cls(**values)


def declared() -> list[Declared]:
    """The settings of this module, in their order."""
    return [
        Declared(
            f"{PREFIX}{one.name.upper()}",
            _KINDS[one.metadata["kind"]],
            _typed(one.default),
            one.metadata["servers"],
            one.metadata["text"],
        )
        for one in dataclasses.fields(Settings)
    ]


def environment(env: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """The environment, and beneath it what the file has that `SGLANG_EPD_CONFIG` names.

    Raises:
        ConfigError: the file cannot be used.
    """
    env = os.environ if env is None else env
    path = env.get(CONFIG_FILE, "")
    if not path:
        return env
    return {**variables(read_file(Path(path)).get("settings", {}), path), **env}


def read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a configuration file; its settings are not looked at yet.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1)
        if len(text) > _MOST_FILE_BYTES:
            raise ConfigError(f"{path} has more than {_MOST_FILE_BYTES} bytes")
        told = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        raise ConfigError(f"{path} is not YAML{line}") from None
    if told is None:
        return {}
    if not isinstance(told, dict) or not all(isinstance(one, dict) for one in told.values()):
        raise ConfigError(f"{path} has to have the sections {', '.join(SECTIONS)}")
    if unknown := sorted(map(str, told.keys() - set(SECTIONS))):
        raise ConfigError(f"{path}: {', '.join(unknown)}: not one of {', '.join(SECTIONS)}")
    return told


def variables(told: Mapping[str, Any], where: str) -> dict[str, str]:
    """Settings of a file, as the environment would have them.

    Args:
        where: they come from, for messages.

    Raises:
        ConfigError: a name that cannot be one, or a value that is nested or empty.
    """
    found = {}
    for key, value in told.items():
        name = f"{PREFIX}{key}".upper()
        if not isinstance(key, str) or key != key.lower() or name in _OTHER:
            raise ConfigError(f"{where}: {key!r} is not a setting")
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str | int | float) for part in parts):
            raise ConfigError(f"{where}: {key} has to be one value, or a list of them")
        found[name] = ",".join(map(_typed, parts))
    return found


def _typed(value: Any) -> str:
    """A value as it would be typed into the environment."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)


def _read(name: str, raw: str, told: Mapping[str, Any]) -> Any:
    kind = told["kind"]
    try:
        value = kind(raw)
    except ValueError:
        raise ConfigError(f"{name}={raw!r} is not a valid {kind.__name__}") from None
    if kind is float and not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be greater than 0 and finite")
    if kind is int and value < told["least"]:
        raise ConfigError(f"{name} must be {told['least']} or more")
    return value
