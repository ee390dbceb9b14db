"""The metrics of an emulated accelerator."""

from __future__ import annotations

from sglang_epd.emulated import Pass
from sglang_epd.observability.metrics import Metrics, counter


class EmulationMetrics(Metrics):
    prefix = "sglang:epd_emulated_"
    passes = counter("Forward passes of the emulated accelerator")
    seconds = counter(
        "Emulated time of forward passes, dilated, by tower, prefill and decode: its rate is the "
        "share of time in which the accelerator would be busy; summed over ranks",
        "kind",
    )
    overrun_seconds = counter(
        "By how much passes took longer in real time: many of these seconds make a run unfaithful"
    )

    def count(self, launched: Pass) -> None:
        """Count a pass; `EmulatedAccelerator.listen`."""
        self.passes.inc()
        for kind, seconds in launched.seconds.items():
            self.seconds.labels(kind).inc(seconds)
        if launched.overrun_s > 0:
            self.overrun_seconds.inc(launched.overrun_s)
