"""SGLang on a machine without an accelerator.

The two entry points are `activate`, which offers `cpu.CpuPlatform` to SGLang where
no accelerator is found, and `register`, which asks for the seams that it needs.
This folder works without the rest of the package and imports only `deferred` of it;
nothing here is imported by the rest. At module level only `sglang.srt.platforms` may be
imported: SGLang loads the platform half-way through its own imports.
"""

from __future__ import annotations

import os

from sglang_epd.platform.accelerators import accelerator_present

PLATFORM_CLASS = "sglang_epd.platform.cpu:CpuPlatform"


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform's path, or None to step aside.

    None where an accelerator is present, so that the package changes nothing on such
    a machine, and where `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU engine.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or accelerator_present():
        return None
    return PLATFORM_CLASS


def register() -> None:
    """Entry point of `sglang.srt.plugins`: ask for this platform's seams in this process."""
    if activate() is None:
        return
    from sglang_epd.platform.seams import install

    install()
