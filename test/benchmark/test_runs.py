"""Every benchmark starts, and does as much as it can without servers, in small."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmark"
NAMES = sorted(
    path.name for path in BENCHMARK.glob("*.py") if "__main__" in path.read_text().splitlines()[-2]
)
# `OUT` is a folder that has what is named behind it from results/, if anything.
SMALL = {
    "zipf": ("zipf.py", "--requests", "40", "--seeds", "1", "--out", "OUT/dispatch.md"),
    "scale": ("simulator.py", "scale", "--cells", "1", "--out", "OUT/simulator.md"),
    "restarts": ("mechanisms.py", "restarts", "--seeds", "1", "--out", "OUT/mechanisms.json"),
    "dry run": ("compare.py", "--dry-run"),
    "compare's page": ("compare.py", "--render", "OUT/images_sweep.json"),
    "ttft's page": ("ttft.py", "--render", "OUT/single_image.json"),
    "hostile's page": ("hostile.py", "--render", "--out", "OUT/hostile.md"),
}
KEPT = ("simulator.json", "images_sweep.json", "single_image.json", "hostile.json")
COMMANDS = {name: (name, "--help") for name in NAMES} | SMALL


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for name in KEPT:
        shutil.copy(BENCHMARK / "results" / name, folder)
    return folder


@pytest.fixture(scope="module")
def errors(out: Path) -> dict[str, str]:
    """What came of each command: nothing, if all is well."""
    commands = [
        [str(BENCHMARK / name), *(word.replace("OUT", str(out)) for word in words)]
        for name, *words in COMMANDS.values()
    ]
    (out / "commands").write_text(json.dumps(commands))
    runner = Path(__file__).with_name("run_each.py")
    done = subprocess.run(
        [sys.executable, runner, out / "commands", out / "errors"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(COMMANDS, json.loads((out / "errors").read_text()), strict=True))


def test_benchmarks_are_found() -> None:
    assert {"zipf.py", "transfer.py", "compare.py", "validate_emulated.py"} <= set(NAMES)
    assert len(NAMES) > 10


@pytest.mark.parametrize("name", COMMANDS)
def test_it_runs(name: str, errors: dict[str, str]) -> None:
    assert not errors[name], errors[name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dispatch.md", "| rendezvous alone |"),
        ("simulator.md", "| 25 |"),
        ("images_sweep.md", "TTFT"),
        ("single_image.md", "time to the first token"),
        ("hostile.md", "| tiff | sglang-epd"),
        ("mechanisms.json", '"restarts"'),
    ],
)
@pytest.mark.usefixtures("errors")
def test_its_page_is_written(out: Path, name: str, said: str) -> None:
    assert said in (out / name).read_text()


@pytest.mark.extended
@pytest.mark.servers  # six processes that import torch, and one that imports SGLang
def test_embeddings_travel_by_every_way(tmp_path: Path) -> None:
    page = tmp_path / "transfer.md"
    command = [sys.executable, BENCHMARK / "transfer.py", "--sizes", "1", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--out", page], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in page.read_text().splitlines() if " GB/s" in line]
    assert len(rows) == 7, rows
