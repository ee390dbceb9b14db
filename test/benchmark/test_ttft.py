"""Every millisecond of a request has one owner."""

from typing import Any

import pytest
from ttft import OWNERS, Sample, steps

# As SGLang reports the times of a request: seconds.
META = {
    "request_received_ts": 100.002,
    "forward_entry_time": 100.110,
    "queue_time": 0.001,
    "prefill_finished_time": 100.150,
    "request_finished_ts": 100.153,
}
STAGES_MS = {"acquire": 0.5, "preprocess": 9.5, "forward": 80.0, "deliver": 3.0}


def item(began_at: float, ended_at: float, **ms: float) -> dict[str, Any]:
    return {"began_at": began_at, "ended_at": ended_at, "ms": STAGES_MS | ms}


def sample(arm: str, *items: dict[str, Any], apart: bool = True) -> Sample:
    return Sample(arm, 1, apart, 100.0, 100.155, META, list(items))


@pytest.mark.parametrize(
    ("one", "owner"),
    [
        (sample("a", item(100.010, 100.105)), "encoder_forward"),
        (sample("a", apart=True), "elsewhere"),
        (sample("a", apart=False), "prepare"),
    ],
)
def test_steps_add_up_to_the_whole(one: Sample, owner: str) -> None:
    found = steps(one)
    assert sum(found.values()) == pytest.approx(155)
    assert owner in found and found.keys() <= OWNERS.keys()
    assert list(found) == [name for name in OWNERS if name in found]


def test_each_step_is_what_was_reported() -> None:
    found = steps(sample("a", item(100.010, 100.105)))
    known = {
        "http_in": 2,
        "to_encoder": 8,
        "encoder_preprocess": 9.5,
        "encoder_forward": 80,
        "encoder_others": 0,
        "encoder_grant": 0,
        "to_queue": 9,
        "queue": 1,
        "prefill": 40,
        "answer": 3,
        "http_out": 2,
    }
    assert {name: found[name] for name in known} == pytest.approx(known)


def test_of_several_items_the_last_one_is_followed() -> None:
    early, late = item(100.010, 100.050), item(100.011, 100.108, wait=1.0)
    assert steps(sample("a", late, early)) == steps(sample("a", late))


def test_what_the_tower_does_for_the_request_is_no_queue() -> None:
    # Two before it, of which the second's forward is half over while it is preprocessed.
    first = item(100.010, 100.100, acquire=0.0, preprocess=0.0, forward=20.0)
    second = item(100.010, 100.100, acquire=0.0, preprocess=0.0, queue=20.0, forward=20.0)
    last = item(100.010, 100.108, acquire=0.0, preprocess=30.0, queue=25.0, forward=30.0)
    found = steps(sample("a", first, second, last))
    shown = {name: found[f"encoder_{name}"] for name in ("preprocess", "others", "queue")}
    assert shown == pytest.approx({"preprocess": 30, "others": 10, "queue": 15})
    assert sum(found.values()) == pytest.approx(155)
    # Two in one batch count once.
    assert steps(sample("a", first, second, second, last)) == pytest.approx(found)
