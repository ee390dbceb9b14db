"""README's rows are found in the pages of short runs, too."""

from __future__ import annotations

import subprocess
import sys

import pytest
import readme

from claims import RESULTS, rows


@pytest.mark.parametrize("result", readme.COMMANDS)
def test_every_row_that_readme_quotes_stands_beside_that_of_the_run(result: str) -> None:
    page = (RESULTS / f"{result}.md").read_text()
    told = list(readme.beside(result, page))
    assert len(told) == len(readme.quoted(result)) > 0
    texts = {row.text for row in rows(page)}
    for block in told:
        _, kept, now = block.splitlines()
        assert kept.removeprefix("  README ") in texts
        assert now.removeprefix("  now    ") == kept.removeprefix("  README ")


def test_a_row_that_the_run_does_not_have_is_left_out() -> None:
    assert not list(readme.beside("chaos", "# Another page\n\n| a | b |\n|---|---|\n| 1 | 2 |"))


@pytest.mark.parametrize("result", readme.COMMANDS)
def test_the_runs_have_options_that_their_benchmarks_know(result: str) -> None:
    script, *flags = readme.COMMANDS[result].split()
    told = subprocess.run(
        [sys.executable, str(readme.ROOT / "benchmark" / script), *flags, "--no-such-option"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    ).stderr
    assert told.splitlines()[-1].endswith("unrecognized arguments: --no-such-option")
