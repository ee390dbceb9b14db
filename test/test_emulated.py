"""The emulated accelerator's clock: no pass is done sooner than its profile says."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocks import Clock
from sglang_epd import emulated
from sglang_epd.emulated import EmulatedAccelerator, Pass
from sglang_epd.errors import ConfigError
from sglang_epd.profile import load_profile

PROFILE = load_profile("h100-qwen2_5-vl-7b")


def run(device: EmulatedAccelerator, clock: Clock, real_s: float, **seconds: float) -> Pass:
    with device.launch() as launched:
        for kind, cost in seconds.items():
            launched.add(kind, cost)
        clock.now += real_s
    return launched


# Idle before it, real time, cost, whether its result is waited for at once.
passes = st.lists(
    st.tuples(*[st.floats(0, 5, allow_nan=False)] * 3, st.booleans()), min_size=1, max_size=20
)


@given(passes=passes, dilation=st.sampled_from([1.0, 2.5, 8.0]))
def test_passes_run_in_order_each_for_its_dilated_cost(passes, dilation):
    clock = Clock(100.0)
    device = EmulatedAccelerator(PROFILE, dilation, clock=clock, sleep=clock.sleep)
    heard: list[Pass] = []
    device.listen = heard.append
    free_at = 0.0
    for idle_s, real_s, cost_s, waits in passes:
        clock.now += idle_s
        begins = max(clock.now, free_at)
        launched = run(device, clock, real_s, prefill=cost_s)
        # What an idle device begins it begins now, what a busy one has behind the others.
        assert launched.ends == pytest.approx(max(begins + cost_s * dilation, clock.now))
        assert launched.ends >= begins + cost_s * dilation - 1e-9
        assert launched.overrun_s == pytest.approx(
            max(0.0, clock.now - begins - cost_s * dilation), abs=1e-9
        )
        assert launched.ends >= free_at
        free_at = launched.ends
        if waits:
            device.wait(launched)
            assert clock.now >= launched.ends and device.done(launched)
        assert device.done(launched) == (clock.now >= launched.ends)
    assert len(heard) == len(passes)


def test_the_parts_of_a_pass_add_up():
    clock = Clock(100.0)
    device = EmulatedAccelerator(PROFILE, 2.0, clock=clock, sleep=clock.sleep)
    with device.launch() as launched:
        assert device.launching is launched
        launched.add("tower", 1.0)
        launched.add("tower", 0.5)
        launched.add("prefill", 2.0)
    assert launched.seconds == {"tower": 3.0, "prefill": 4.0}
    assert (launched.ends, device.launching) == (107.0, None)


def test_a_pass_that_fails_takes_no_time():
    clock = Clock(100.0)
    device = EmulatedAccelerator(PROFILE, clock=clock, sleep=clock.sleep)
    with pytest.raises(RuntimeError), device.launch() as launched:
        launched.add("prefill", 5.0)
        raise RuntimeError
    assert device.launching is None
    assert run(device, clock, 0.0, prefill=1.0).ends == clock.now + 1.0


def test_waiting_takes_no_processor_time():
    device = EmulatedAccelerator(PROFILE)
    with device.launch() as launched:
        launched.add("prefill", 0.4)
    began, used = time.monotonic(), time.thread_time()
    device.wait(launched)
    assert time.monotonic() - began > 0.35
    assert time.thread_time() - used < 0.1


def test_costs_are_lines_above_a_floor():
    costs = PROFILE.language
    least = costs.prefill_s([(1, 0)])
    assert least == costs.prefill_least_s
    long = costs.prefill_s([(8000, 0)])
    assert long == pytest.approx(0.005 + 8000 * (1.8e-5 + 4000 * 1e-9))
    # The context of a chunk behind others is longer.
    assert costs.prefill_s([(8000, 8000)]) == pytest.approx(long + 8000 * 8000 * 1e-9)
    tower = PROFILE.encoder.tower
    assert tower.seconds([(1, 1)]) == tower.least_s
    assert tower.seconds([(10_000, 1)] * 2) - tower.seconds([(10_000, 1)]) == pytest.approx(
        10_000 * 3.2e-6 + 1e8 * 4.2e-11
    )


@pytest.fixture
def settings(monkeypatch):
    """Settings, read anew."""
    emulated.accelerator.cache_clear()
    yield monkeypatch.setenv
    emulated.accelerator.cache_clear()


@pytest.mark.parametrize("env", [{}, {"SGLANG_EPD_EMULATE": ""}])
def test_nothing_is_emulated_unless_asked_for(settings, env):
    for name, value in env.items():
        settings(name, value)
    assert emulated.accelerator() is None
    assert emulated.mark() == {}


def test_the_settings_name_profile_and_dilation(settings, tmp_path):
    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(PROFILE, name="mine")))
    settings("SGLANG_EPD_EMULATE", str(file))
    settings("SGLANG_EPD_EMULATE_DILATE", "8")
    assert emulated.mark() == {"emulated": {"profile": "mine", "dilation": 8.0}}


@pytest.mark.parametrize("dilation", ["0", "-1", "fast"])
def test_a_dilation_that_is_none_is_refused(settings, dilation):
    settings("SGLANG_EPD_EMULATE", PROFILE.name)
    settings("SGLANG_EPD_EMULATE_DILATE", dilation)
    with pytest.raises(ConfigError, match="SGLANG_EPD_EMULATE_DILATE"):
        emulated.accelerator()
