from __future__ import annotations

import ast
import re
from functools import partial

import pytest

import reference
from sglang_epd.observability.metrics import Metrics


@pytest.mark.parametrize(
    ("path", "text"), [*reference.pages()], ids=lambda one: getattr(one, "name", "")
)
def test_a_page_is_what_the_code_says(path, text):
    assert path.read_text() == text, "run .venv/bin/python scripts/reference.py"


def test_every_file_is_on_the_page_of_its_package():
    """On one page, with a sentence, however the packages grow."""
    pages = [path.read_text() for path in (reference.DOCS / "design").glob("*.md")]
    told = [file for page in pages for file in reference.files_of(page)]
    files = reference.PACKAGE.parent.glob("*/**/*.py")
    assert sorted(told) == sorted(file for file in files if file.name != "__init__.py")
    assert all(ast.get_docstring(ast.parse(file.read_text())) for file in told)


def test_every_metric_of_the_package_is_on_its_page():
    named = {
        f"{metrics.prefix}{name}"
        for metrics in Metrics.__subclasses__()
        for name, declared in vars(metrics).items()
        if isinstance(declared, partial)
    }
    assert len(named) > 30
    shown = set(re.findall(r"`(sglang:epd_\w+?)(?:_total)?`", reference.metrics_page()))
    assert named <= shown
