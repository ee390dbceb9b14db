"""Figures in the pages stand in the results that they link to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.shell import PAGES, ROOT

RESULTS = ROOT / "benchmark" / "results"
_LINK = re.compile(r"\]\(\.\./benchmark/results/(\w+\.md)\)")
_NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w,]*\d)")


def numbers(text: str) -> list[str]:
    return [one.replace(",", "") for one in _NUMBER.findall(text)]


def quotes(page: Path) -> list[tuple[str, list[str]]]:
    """Paragraphs and rows that link to results, each with the names of these."""
    parts = re.split(r"\n\n|\n(?=[|-])", page.read_text())
    return [(part, _LINK.findall(part)) for part in parts if _LINK.search(part)]


def stands(number: str, told: list[str]) -> bool:
    """Whether it is there, rounded perhaps."""
    places = len(number.partition(".")[2])
    return any(round(float(one), places) == float(number) for one in told)


@pytest.mark.parametrize("page", [page for page in PAGES if quotes(page)], ids=lambda p: p.name)
def test_figures_stand_in_what_is_cited(page: Path) -> None:
    for text, names in quotes(page):
        told = [one for name in names for one in numbers((RESULTS / name).read_text())]
        # Counts below a hundred are words as often as figures.
        cited = [one for one in numbers(_LINK.sub("]", text)) if "." in one or float(one) >= 100]
        wrong = [one for one in cited if not stands(one, told)]
        assert not wrong, (names, wrong, text)


def test_rounding() -> None:
    told = numbers("| 243.66 ms, 1,048,576 | 0.48 |")
    assert told == ["243.66", "1048576", "0.48"]
    assert stands("244", told) and stands("243.7", told) and stands("1048576", told)
    assert not stands("245", told) and not stands("0.5", told[:2])


def test_readers_find_every_result() -> None:
    told = (ROOT / "benchmark" / "README.md").read_text()
    for path in RESULTS.glob("*.md"):
        assert f"](results/{path.name})" in told, path.name


def test_pages_cite_results() -> None:
    assert {page.name for page in PAGES if quotes(page)} >= {"topology.md", "comparison.md"}
