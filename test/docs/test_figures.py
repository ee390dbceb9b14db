"""Figures in the pages stand in the rows of the results that the pages name for them.

A page ends in a comment with a line for each row that it takes figures from: the result, the
figures, and words that tell the row from the result's others. The words are the row's own, its
table's head's, or those of a heading above it:

    <!-- Rows of the figures:
    simulator 3.6: 1.0, 1E1PD
    single_image 324 343 411: median
    -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs.shell import PAGES, ROOT

RESULTS = ROOT / "benchmark" / "results"
_LINK = re.compile(r"\]\((?:\.\./)*benchmark/results/(\w+)\.md\)")
_OTHER_LINK = re.compile(r"\[[^]]*\]\(https?:[^)]*\)")
# Not those of sizes, as 1080p.
_NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w,]*\d|p\b)")
_ROWS = re.compile(r"^<!-- Rows of the figures:\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"(\w+) ([\d. ]+): (.+)")


@dataclass(frozen=True)
class Row:
    """A row of a table, or a paragraph.

    Attributes:
        above: the headings that it stands under, and its table's head.
    """

    text: str
    above: str = ""

    def has(self, words: str) -> bool:
        """Whether all of these are there, which commas part; `# ...` is a whole heading."""
        told = f"{self.above}\n{self.text}"

        def has_one(word: str) -> bool:
            if word.startswith("#"):
                return word in self.above.splitlines()
            return bool(re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.]*\w)", told))

        return all(map(has_one, words.split(", ")))


def rows(page: str) -> Iterator[Row]:
    headings: list[str] = []
    for block in page.split("\n\n"):
        if block.startswith("#"):
            depth = len(block) - len(block.lstrip("#"))
            headings[depth - 1 :] = [block]
        elif block.startswith("|"):
            head, *lines = block.splitlines()
            yield from (Row(line, "\n".join([*headings, head])) for line in lines)
        else:
            yield Row(block.replace("\n", " "), "\n".join(headings))


def numbers(text: str) -> list[str]:
    return [one.replace(",", "") for one in _NUMBER.findall(text)]


def quotes(page: Path) -> list[tuple[str, list[str]]]:
    """Paragraphs and rows that link to results, each with the names of these."""
    parts = re.split(r"\n\n|\n(?=[|-])", _ROWS.sub("", page.read_text()))
    return [(part, _LINK.findall(part)) for part in parts if _LINK.search(part)]


def figures(text: str) -> list[str]:
    """What is told as a figure; counts below a hundred are words as often."""
    found = numbers(_OTHER_LINK.sub("", _LINK.sub("]", text)))
    return [one for one in found if "." in one or float(one) >= 100]


def named(page: str) -> dict[tuple[str, str], list[str]]:
    """The words of the rows, by result and figure."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in "".join(_ROWS.findall(page)).splitlines():
        entry = _ENTRY.fullmatch(line)
        assert entry, line
        for figure in entry[2].split():
            found.setdefault((entry[1], figure), []).append(entry[3])
    return found


def stands(number: str, told: list[str]) -> bool:
    """Whether it is there, rounded perhaps."""
    places = len(number.partition(".")[2])
    return any(round(float(one), places) == float(number) for one in told)


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
    text = "244 ms for 40 of 9,468, 3.6 times, at 1080p ([x](../benchmark/results/a.md), 2.5)"
    assert figures(text + " [y, 2026](https://example.com/2026)") == ["244", "9468", "3.6", "2.5"]


def test_readers_find_every_result() -> None:
    told = (ROOT / "benchmark" / "README.md").read_text()
    for path in RESULTS.glob("*.md"):
        assert f"](results/{path.name})" in told, path.name


def test_pages_cite_results() -> None:
    assert {page.name for page in PAGES if quotes(page)} >= {"topology.md", "comparison.md"}
