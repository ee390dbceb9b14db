"""An accelerator that is not there: forward passes that take as long as a profile says.

The passes are real, of small weights on the CPU; after each its process sleeps until an
accelerator would have been done. `platform.emulation` hooks SGLang's forward passes; this
module is the accelerator's clock, and knows neither SGLang nor torch.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sglang_epd.config import Settings
from sglang_epd.profile import Profile, load_profile

SETTING = "SGLANG_EPD_EMULATE"


@dataclass
class Pass:
    """One forward pass.

    Attributes:
        seconds: its emulated time by kind (tower, prefill, decode), not dilated yet.
        ends: when it is done, by the accelerator's clock; 0 until it was launched.
        overrun_s: by how much the real pass took longer than the emulated one.
        encodes: whether a tower runs now.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    ends: float = 0.0
    overrun_s: float = 0.0
    encodes: bool = False

    def add(self, kind: str, seconds: float) -> None:
        """A part of the pass.

        Args:
            kind: `prefill` or `decode`, say; parts of one kind add up.
        """
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds


class EmulatedAccelerator:
    """Runs passes one after the other. One thread launches them.

    Args:
        profile: what they cost.
        dilation: by what factor they are stretched.
        clock, sleep: as of `time`, in seconds.

    Attributes:
        listen: called with each pass that was launched.
    """

    def __init__(
        self,
        profile: Profile,
        dilation: float = 1.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.profile, self.dilation = profile, dilation
        self.listen: Callable[[Pass], None] | None = None
        self.launching: Pass | None = None
        self._clock, self._sleep = clock, sleep
        self._free_at = 0.0

    @contextmanager
    def launch(self) -> Iterator[Pass]:
        """Run the real pass within, and add its parts.

        The pass begins at once, or when the one before it is done; the time that the real pass
        takes is part of it. One that fails takes none.
        """
        begins = max(self._clock(), self._free_at)
        self.launching = launched = Pass()
        try:
            yield launched
        finally:
            self.launching = None
        launched.seconds = {
            kind: seconds * self.dilation for kind, seconds in launched.seconds.items()
        }
        ends, now = begins + sum(launched.seconds.values()), self._clock()
        launched.overrun_s = max(0.0, now - ends)
        self._free_at = launched.ends = max(ends, now)
        if self.listen is not None:
            self.listen(launched)

    def done(self, launched: Pass) -> bool:
        return self._clock() >= launched.ends

    def wait(self, launched: Pass) -> None:
        """Sleep until the pass is done."""
        while (left := launched.ends - self._clock()) > 0:
            self._sleep(left)


@functools.cache
def accelerator() -> EmulatedAccelerator | None:
    """The one of this process; None where nothing is emulated.

    Raises:
        ConfigError: the settings or the profile cannot be used.
    """
    if not os.environ.get(SETTING):
        return None
    settings = Settings.from_env()
    return EmulatedAccelerator(load_profile(settings.emulate), settings.emulate_dilate)


def mark() -> dict[str, Any]:
    """What a server says of its emulated accelerator; nothing where it has none."""
    found = accelerator()
    if found is None:
        return {}
    return {"emulated": {"profile": found.profile.name, "dilation": found.dilation}}
