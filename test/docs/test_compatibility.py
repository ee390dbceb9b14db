"""Each row of docs/compatibility.md is shown by tests that exist, or says why none shows it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "compatibility.md"
ROW = re.compile(r"^\| (?P<feature>[^|]+) \| (?P<state>[^|]+) \| (?P<tests>[^|]*)\|$", re.MULTILINE)
# Of a state: whether a test has to show it. One without has to say more.
STATES = {"served": True, "refused": True, "not run": False, "not served": False}


def rows() -> list[tuple[str, str, str]]:
    found = [(row["feature"], row["state"], row["tests"]) for row in ROW.finditer(PAGE.read_text())]
    return [row for row in found if not row[0].startswith(("feature", "---"))]


@cache
def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize(("feature", "state", "tests"), rows(), ids=lambda cell: cell[:60])
def test_a_row_is_shown_by_tests_that_exist(feature: str, state: str, tests: str) -> None:
    (kind,) = [one for one in STATES if re.match(rf"{one}\b", state)]
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
    assert re.sub(r"[`,\s]", "", tests) == "".join(f"{file}::{name}" for file, name in named)
    assert named if STATES[kind] else len(state) > len(kind) + 10, f"{feature}: nothing shows it"
    for file, name in named:
        assert name in functions(TESTS / file), f"{file} has no {name}"


def test_every_line_of_a_table_is_a_row() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(lines) - len([line for line in lines if line.startswith("| feature")]) == len(rows())
    assert len(rows()) > 50
