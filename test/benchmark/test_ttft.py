"""Every millisecond of a request has one owner."""

from pathlib import Path
from typing import Any

import pytest
from comparison.files import read
from ttft import MODEL, OWNERS, Arm, Sample, page, steps

# As SGLang reports the times of a request: seconds.
META = {
    "request_received_ts": 100.002,
    "forward_entry_time": 100.110,
    "queue_time": 0.001,
    "prefill_finished_time": 100.150,
    "request_finished_ts": 100.153,
}
STAGES_MS = {"acquire": 0.5, "preprocess": 9.5, "forward": 80.0, "deliver": 2.0}


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
        "encoder_grant": 0,
        "encoder_other": 3,
        "to_queue": 4,
        "queue": 1,
        "prefill": 40,
        "answer": 3,
        "http_out": 2,
    }
    assert {name: found[name] for name in known} == pytest.approx(known)


def test_of_several_items_the_last_one_is_followed() -> None:
    early, late = item(100.010, 100.050), item(100.011, 100.108, wait=1.0)
    assert steps(sample("a", late, early)) == steps(sample("a", late))


def test_a_server_that_tells_no_times_is_an_error() -> None:
    with pytest.raises(KeyError):
        steps(Sample("a", 1, False, 0.0, 1.0, {}, []))


def test_the_page_has_each_owner_once(benchmark_folder: Path) -> None:
    arms = [read(benchmark_folder / "arms" / f"{n}.toml", Arm) for n in ("colocated", "epd-1e1p")]
    samples = [
        sample("colocated", apart=False),
        sample("epd-1e1p", item(100.010, 100.105)),
        sample("epd-1e1p", item(100.012, 100.105)),
    ]
    text = page(samples, arms, "here", ["python -m server"])
    assert "| prefill forward | 40.0 | 40.0 |" in text
    assert "| planned, announced, sent to the encoder |  | 9.0 |" in text
    assert "| **time to the first token** | 155.0 | 155.0 |" in text
    assert "| of it beside tower and prefill | 115.0 | 35.0 |" in text
    assert set(MODEL) <= OWNERS.keys()
    assert "elsewhere" not in text and OWNERS["elsewhere"] not in text
