"""The pages, and the commands that stand in them, as a shell would take them apart."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# What a substitution stands for, where its value does not matter.
VALUE = "substituted"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BETWEEN = {"|", "||", "&", "&&", ";", ")"}


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: Path
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(page, *found.groups()) for found in _BLOCK.finditer(page.read_text())]


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a script, each as its words; those of substitutions, too.

    Knows comments, continued lines, quotes, pipes, lists, `$(...)` and assignments in front
    of a command, which are left out with it.
    """
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        lexer = shlex.shlex(_opened(line), posix=True, punctuation_chars="|&;()")
        lexer.whitespace_split = True
        yield from _split(iter(lexer))


def _opened(line: str) -> str:
    # What stands in double quotes is one word, but for its substitutions.
    return re.sub(r'"\$\(([^()]*)\)"', r"$(\1)", line)


def _split(words: Iterator[str]) -> Iterator[list[str]]:
    """The commands up to the end, or to the `)` that ends a substitution."""
    found: list[str] = []
    for word in words:
        if word == "(":
            yield from _split(words)
            assert found[-1].endswith("$"), found
            found[-1] = found[-1][:-1] + VALUE
        elif word in _BETWEEN:
            if found:
                yield _without_assignments(found)
            found = []
            if word == ")":
                return
        else:
            found.append(word)
    if found := _without_assignments(found):
        yield found


def _without_assignments(words: list[str]) -> list[str]:
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    return words
