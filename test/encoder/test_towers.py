from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from make_checkpoint import ensure
from sglang_epd.encoder.towers import read_limits, share_of_cores, write_limits
from sglang_epd.errors import ConfigError
from sglang_epd.media import MediaLimits

SCRIPT = Path(__file__).with_name("real_towers.py")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Runs the towers of some flags; what they made, and their namespace."""
    folder = tmp_path_factory.mktemp("towers")

    def run(*flags: str, status: int = 0) -> tuple[dict[str, np.ndarray], str]:
        out = folder / ("".join(flags) + "one.npz").replace("/", "_")
        model = ("--model-path", str(ensure("tiny-qwen2_5-vl")), "--encoder-only")
        command = [sys.executable, str(SCRIPT), str(out), *model, "--dtype", "float32", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == status, done.stderr[-8000:]
        if status:
            return {}, done.stderr
        (said,) = [line for line in done.stdout.splitlines() if line.startswith("namespace ")]
        return dict(np.load(out)), said

    return run


@pytest.fixture(scope="module")
def reference(start):
    """The engine in the server's own process."""
    return start()


@pytest.mark.servers
@pytest.mark.extended  # test/integration/test_towers.py compares their answers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [("--dp-size", "2"), ("--tp-size", "2")], ids=str)
def test_workers_make_what_one_process_makes(start, reference, flags):
    expected, namespace = reference
    made, said = start(*flags)
    assert said == namespace
    towers = {"0", "1", "again"} if "--dp-size" in flags else {"0"}
    assert {name.partition("/")[0] for name in made} == towers
    for name, embedding in made.items():
        same = expected[f"0/{name.partition('/')[2]}"]
        assert np.abs(same).max() > 0.01
        np.testing.assert_allclose(embedding, same, rtol=0, atol=1e-5)


@pytest.mark.servers
@pytest.mark.timeout(600)
def test_heads_that_do_not_divide_are_refused(start):
    _, said = start("--tp-size", "3", status=1)
    assert "ConfigError: --tp-size 3 with --encoder-only: the 2 attention heads" in said


def test_limits_cross_to_a_worker(tmp_path):
    for limits in (
        MediaLimits(),
        MediaLimits(max_pixels=5, allowed_domains=("a.example",), allowed_local_root=tmp_path),
    ):
        packed = msgspec.msgpack.encode(write_limits(limits))
        assert read_limits(msgspec.msgpack.decode(packed)) == limits


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
