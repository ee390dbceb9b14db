"""The installation: versions, plug-ins, SGLang's seams, libraries, settings."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import SimpleNamespace

from sglang_epd.cli.checks import Finding, fail, note, ok, warn
from sglang_epd.config import Settings
from sglang_epd.errors import ConfigError
from sglang_epd.media.limits import MediaLimits
from sglang_epd.seams.contract import pinned, violations
from sglang_epd.store.url import StoreUrl
from sglang_epd.trust import Trust

_LOAD_TIMEOUT_S = 60.0
_PLUGINS_TIMEOUT_S = 180.0
# What SGLang itself writes comes before.
_SAYS = "sglang-epd says:"
_HOLD = f"""
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_epd.seams.hooks import misfit
print({_SAYS!r}, misfit())
"""
# An HMAC-SHA256 key of fewer characters is among the first that an attacker tries.
_LEAST_TOKEN = 16
# SGLang's flags of serving, none of them given.
_FLAGS = ("api_key", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")
_NO_FLAGS = SimpleNamespace(**dict.fromkeys(_FLAGS))
# SGLang 0.5.23's torch is built for CUDA 13.
_CUDA = "pip uninstall mooncake-transfer-engine; pip install mooncake-transfer-engine-cuda13"
_APT = "apt-get install libibverbs1 librdmacm1 libnuma1"


def versions() -> Iterator[Finding]:
    """The versions that this package was written for are the ones that are here."""
    yield ok("sglang-epd", f"{version('sglang-epd')}, Python {sys.version.split()[0]}")
    for name, wanted in pinned().items():
        try:
            found = version(name)
        except PackageNotFoundError:
            yield fail(name, "is not installed", f"pip install {name}=={wanted}")
            continue
        # Its local part says how a version was built.
        if found.partition("+")[0] == wanted:
            yield ok(name, found)
        else:
            yield fail(name, f"{found}, not {wanted}", f"pip install {name}=={wanted}")


def plugins(env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """SGLang will find this package, and is not told to leave it out."""
    found = {one.name for one in entry_points(group="sglang.srt.plugins")}
    if "sglang_epd" not in found:
        yield fail(
            "plug-ins",
            "SGLang will not find sglang_epd",
            "pip install --force-reinstall --no-deps . in a clone of sglang-epd",
        )
        return
    chosen = env.get("SGLANG_PLUGINS")
    if chosen is not None and "sglang_epd" not in [one.strip() for one in chosen.split(",")]:
        yield warn(
            "plug-ins", f"SGLANG_PLUGINS={chosen} leaves sglang_epd out", "unset SGLANG_PLUGINS"
        )
    elif env.get("SGLANG_EPD", "").strip().lower() in {"off", "0", "false", "no"}:
        yield warn(
            "plug-ins", "SGLANG_EPD is off: servers run SGLang's own EPD", "unset SGLANG_EPD"
        )
    else:
        yield ok("plug-ins", ", ".join(sorted(found)))


def seams() -> Iterator[Finding]:
    """The functions of SGLang that this package leans on are as they were."""
    try:
        moved = violations()
    except ModuleNotFoundError as error:
        yield fail("seams", str(error), "install sglang first")
        return
    for one in moved:
        yield fail("seams", one, "install the version of SGLang that is named above")
    if not moved:
        yield ok("seams", "all functions of SGLang that are hooked or called are as they were")


def hooks(env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The hooks hold beside those of other plug-ins, as a server would load them."""
    chosen = env.get("SGLANG_PLUGINS", "")
    others = {
        one.name
        for one in entry_points(group="sglang.srt.plugins")
        if one.dist is None or one.dist.name != "sglang-epd"
    }
    if chosen:
        others &= {one.strip() for one in chosen.split(",")}
    if not others:
        return  # nothing but SGLang's own version can differ
    named = ", ".join(sorted(others))
    mend = f"SGLANG_PLUGINS=sglang_epd,sglang_epd_cpu leaves the others out: {named}"
    try:
        tried = _tried(_HOLD, _PLUGINS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield fail("hooks", f"{named}: do not load in {_PLUGINS_TIMEOUT_S:.0f} s", mend)
        return
    told = tried.stdout.rpartition(_SAYS)[2].strip()
    if tried.returncode or _SAYS not in tried.stdout:
        last = tried.stderr.strip().rpartition("\n")[2] or f"status {tried.returncode}"
        yield fail("hooks", f"plug-ins do not load: {last}", mend)
    elif told:
        yield fail("hooks", told, mend)
    else:
        yield ok("hooks", f"hold beside {named}")


def _tried(code: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Of a process of its own: what is broken may end it."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def settings(env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """`SGLANG_EPD_*` can be honoured; there is a token, and it is one."""
    try:
        found = Settings.from_env(env)
        MediaLimits.from_env(env)
        if found.store:
            StoreUrl.parse(found.store)
    except ConfigError as error:
        yield fail("settings", str(error), "docs/settings.md has every setting and its values")
        return
    changed = [name for name in env if name.startswith("SGLANG_EPD_")]
    yield ok("settings", ", ".join(sorted(changed)) or "all as they come")
    if not found.token:
        yield warn(
            "token",
            "there is none: any host that reaches an encoder may use it",
            "export SGLANG_EPD_TOKEN=$(openssl rand -hex 32), the same on every server",
        )
        return
    try:
        Trust.of(found.token, _NO_FLAGS)
    except ConfigError as error:
        yield fail("token", str(error), "use letters and digits: openssl rand -hex 32")
        return
    if len(found.token) < _LEAST_TOKEN:
        yield warn(
            "token", f"has {len(found.token)} characters", "use a longer one: openssl rand -hex 32"
        )
    else:
        yield ok("token", f"has {len(found.token)} characters")


def libraries() -> Iterator[Finding]:
    """Mooncake loads, and so do the libraries that read videos."""
    wanted = "for prefill and decode apart, and the mooncake backend"
    try:
        tried = _tried("import mooncake.engine", _LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        mend = "try `python -c 'import mooncake.engine'`"
        yield fail("Mooncake", f"does not load in {_LOAD_TIMEOUT_S:.0f} s", mend)
    else:
        last = tried.stderr.strip().rpartition("\n")[2]
        if not tried.returncode:
            yield ok("Mooncake", "loads")
        elif "ModuleNotFoundError" in last:
            mend = 'pip install ".[mooncake]" in a clone of sglang-epd (mooncake-cpu without CUDA)'
            yield note("Mooncake", f"is not installed; it is needed {wanted}", mend)
        else:
            mend = _CUDA if "libcudart" in last else _APT if "lib" in last else "reinstall it"
            yield fail("Mooncake", f"does not load: {last or tried.returncode}", mend)
    if ctypes.util.find_library("avdevice"):
        yield ok("FFmpeg", "its libraries are here")
    else:
        yield note("FFmpeg", "no libraries: encoders cannot read videos", "apt-get install ffmpeg")
