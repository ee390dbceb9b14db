"""Figures in the pages stand in the rows of the results that the pages name for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from claims import (
    CLAIMS,
    RESULTS,
    columns_of,
    figures,
    named,
    numbers,
    quotes,
    rows,
    sentences,
    stands,
)
from docs.shell import PAGES, ROOT

# Of a measurement, more likely than of a setting.
_MEASURED = re.compile(r"\d times\b|\d ms\b|\d of a colocated|\d of in-tree")
CLAIMING = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def wrong(figure: str, words: str, result: str) -> str:
    """Why the figure does not stand in the row of the result, or nothing."""
    found = [row for row in rows(result) if row.has(words)]
    if len(found) != 1:
        return f"{words!r} are the words of {len(found)} rows"
    row = found[0]
    told = numbers(f"{row.above}\n{row.text}")
    return "" if stands(figure, told) else f"not in {row.text!r}"


@pytest.mark.parametrize("page", [page for page in PAGES if quotes(page)], ids=lambda p: p.name)
def test_figures_stand_in_the_rows_that_are_named(page: Path) -> None:
    entries = named(page.read_text())
    for (result, figure), every in entries.items():
        text = (RESULTS / f"{result}.md").read_text()
        for words in every:
            assert not (why := wrong(figure, words, text)), (result, figure, why)
    cited = {(figure, tuple(names)) for text, names in quotes(page) for figure in figures(text)}
    for figure, names in cited:
        assert any((name, figure) in entries for name in names), f"{figure} ({names}) has no row"
    quoted = {(name, figure) for figure, names in cited for name in names}
    assert entries.keys() <= quoted, f"nobody quotes {entries.keys() - quoted}"


@pytest.mark.parametrize("page", CLAIMING, ids=lambda p: p.name)
def test_a_measurement_links_to_its_page(page: Path) -> None:
    """Ours to a result, another's to where it was published."""
    quoted = "".join(part for part, _ in quotes(page))
    plain = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    for part in plain.splitlines():
        assert not _MEASURED.search(part) or "](" in part or part in quoted, part


RESULT = """# Times

Of 1,048,576 bytes in
two runs, and of 1080p.

| rate | arm | time | ratio |
|---|---|---|---|
| 0.8 | 1E1PD | 3.41 | 3.3x |
| 1.0 | 1E1PD | 4.90 | 3.6x |
| 1.0 | 2E1PD | 4.71 | 3.7x |

## With load

| rate | arm | time | ratio |
|---|---|---|---|
| 1.0 | 2E1PD | 9.66 | 1.0x |
"""


@pytest.mark.parametrize(
    ("figure", "words", "why"),
    [
        ("3.6", "1.0, 1E1PD", ""),
        ("5", "1.0, 1E1PD", ""),
        ("4.9", "rate, time, 1.0, 1E1PD", ""),
        ("9.7", "## With load, 2E1PD", ""),
        ("9.7", "## With, 2E1PD", "of 0 rows"),
        ("1048576", "bytes, two runs", ""),
        ("3.4", "1.0, 1E1PD", "not in"),
        ("1080", "bytes", "not in"),
        ("3.7", "1.0, 2E1PD", "of 2 rows"),
        ("3.6", "1, 1E1PD", "of 0 rows"),
        ("9.66", "1E1PD, With load", "of 0 rows"),
    ],
)
def test_what_stands_in_a_row(figure: str, words: str, why: str) -> None:
    told = wrong(figure, words, RESULT)
    assert why in told and bool(why) == bool(told), told


def test_a_figure_is_what_is_told_as_one() -> None:
    text = "24 ms for 40 of 9,468, 3 times, 6%, at 1080p ([x](../benchmark/results/a.md), 2.5)"
    told = figures(text + " [y, 2026](https://example.com/2026)")
    assert told == ["24", "9468", "3", "6", "2.5"]


def test_readers_find_every_result() -> None:
    told = (ROOT / "benchmark" / "README.md").read_text()
    for path in set(RESULTS.glob("*.md")) - {CLAIMS}:
        assert f"](results/{path.name})" in told, path.name


def test_pages_cite_results() -> None:
    assert {page.name for page in PAGES if quotes(page)} >= {"topology.md", "comparison.md"}


def test_a_claim_of_a_table_names_its_column() -> None:
    row = "| x ([y](../benchmark/results/z.md)) | 1 ms | | 3 |"
    columns = columns_of(f"Text.\n\n| | an arm | page | another |\n|---|---|---|---|\n{row}\n")[row]
    told = [*sentences(row, columns)]
    assert told == [("x, an arm: ", "1 ms"), ("x, page: ", ""), ("x, another: ", "3")]
