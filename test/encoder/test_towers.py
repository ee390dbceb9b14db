from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from make_checkpoint import ensure
from sglang_epd.encoder.towers import share_of_cores, undrawn
from sglang_epd.errors import ConfigError

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Runs the towers of some flags; what they made, and what their process printed."""
    folder = tmp_path_factory.mktemp("towers")

    def run(
        *flags: str, script: str = "real_towers.py", checkpoint: str = "tiny-qwen2_5-vl"
    ) -> tuple[dict[str, np.ndarray], str]:
        out = folder / ("".join(flags) + checkpoint + "one.npz").replace("/", "_")
        model = ("--model-path", str(ensure(checkpoint)), "--encoder-only")
        command = [sys.executable, str(HERE / script), str(out), *model, "--dtype", "float32"]
        command += flags
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-8000:]
        return dict(np.load(out)), done.stdout

    return run


def said_of(name: str, printed: str) -> str:
    (line,) = [line for line in printed.splitlines() if line.startswith(f"{name} ")]
    return line.removeprefix(f"{name} ")


@pytest.fixture(scope="module")
def reference(start):
    """The engine in the server's own process."""
    return start()


def test_towers_are_given_a_port_each():
    """Each is free when it is drawn, until the first of their workers binds it."""
    free = iter([1, 1, 2, 1, 3])
    assert [undrawn(lambda: next(free)) for _ in range(3)] == [1, 2, 3]
    # Those of towers that are started again and again come back.
    for port in range(4, 300):
        undrawn(lambda port=port: port)
    assert undrawn(lambda: 1) == 1


@pytest.mark.servers
@pytest.mark.extended  # test/integration/test_towers.py compares their answers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [("--dp-size", "2"), ("--tp-size", "2")], ids=str)
def test_workers_make_what_one_process_makes(start, reference, flags):
    expected, namespace = reference
    made, said = start(*flags)
    assert said_of("namespace", said) == said_of("namespace", namespace)
    towers = {"0", "1", "again"} if "--dp-size" in flags else {"0"}
    assert {name.partition("/")[0] for name in made} == towers
    for name, embedding in made.items():
        same = expected[f"0/{name.partition('/')[2]}"]
        assert np.abs(same).max() > 0.01
        np.testing.assert_allclose(embedding, same, rtol=0, atol=1e-5)


@pytest.mark.servers
@pytest.mark.timeout(600)
def test_the_way_through_an_accelerator(start):
    """Passes and copies on streams make what one call after the other makes."""
    flags = ("--mem-fraction-static", "0.3", "--base-gpu-id", "2")
    made, said = start(*flags, script="queued_engine.py")
    names = [name.removeprefix("plain/") for name in made if name.startswith("plain/")]
    assert len(names) == 6
    for name in names:
        np.testing.assert_array_equal(made[f"0/{name}"], made[f"plain/{name}"])
    assert said_of("bound", said) == "epd-land epd-prepare epd-tower"
    assert said_of("memory", said) == "0.3"
    assert said_of("groups", said) == "2", "they would be on another tower's accelerator"
    assert float(said_of("switch", said)) < 0.001, "passes are launched beside preparing threads"
    assert said_of("calls", said) == "stream synchronize copy", "weights are waited for"


@pytest.mark.servers
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param("tiny-qwen2-vl", marks=pytest.mark.extended),
        "tiny-qwen3-vl",
        pytest.param("tiny-qwen3-vl-moe", marks=pytest.mark.extended),
    ],
)
def test_a_long_video_in_several_passes_is_what_it_is_in_one(start, checkpoint):
    made, said = start(script="long_videos.py", checkpoint=checkpoint)
    assert said_of("passes", said) == "5 5 2 2 1 2 2 1"
    assert np.abs(made["one"]).max() > 0.01
    for name in ("several", "queued"):
        np.testing.assert_allclose(made[name], made["one"], rtol=0, atol=1e-5)
    rows = len(made["one"]) // 5
    np.testing.assert_allclose(made["another"][:-rows], made["one"][:-rows], rtol=0, atol=1e-5)
    assert np.abs(made["another"] - made["one"])[-rows:].max() > 0.01


@pytest.mark.servers
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_video_whose_steps_attend_to_each_other_is_run_in_one_pass(start):
    made, said = start(script="long_videos.py")
    assert said_of("passes", said) == "5 5 5 5"
    rows = len(made["one"]) // 5
    assert np.abs(made["another"] - made["one"])[:rows].max() > 1e-4, "the first step heard"
    np.testing.assert_array_equal(made["several"], made["one"])


@pytest.mark.parametrize(
    ("binding", "place", "share"),
    [
        ("0|1", 1, ([1], 1)),
        ("0,1|4-6", 1, ([4, 5, 6], 3)),
        ("0-1,8|4-6", 0, ([0, 1, 8], 3)),
    ],
)
def test_a_binding_names_each_workers_cores(binding, place, share):
    assert share_of_cores(place, 2, {"SGLANG_CPU_OMP_THREADS_BIND": binding}) == share


def test_unbound_workers_share_the_cores_in_number(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert share_of_cores(3, 4, {}) == ([], 2)
    assert share_of_cores(0, 4, {"SGLANG_CPU_OMP_THREADS_BIND": "all"}) == ([], 2)
    assert share_of_cores(9, 12, {}) == ([], 1)


@pytest.mark.parametrize("binding", ["0", "0|", "0|a"])
def test_a_binding_that_leaves_a_worker_without_cores_is_refused(binding):
    with pytest.raises(ConfigError, match="SGLANG_CPU_OMP_THREADS_BIND"):
        share_of_cores(1, 2, {"SGLANG_CPU_OMP_THREADS_BIND": binding})
