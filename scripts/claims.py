"""The claims of README.md and docs/ that rest on figures, as benchmark/results/README.md.

A page that quotes results ends in a comment with a line for each row that it takes figures from:
the result, the figures, and words that tell the row from the result's others. The words are the
row's own, its table's head's, or those of a heading above it:

    <!-- Rows of the figures:
    simulator 3.6: 1.0, 1E1PD
    single_image 324 343 411: median
    -->

The table is made of these, of the sentences that have the figures, and of the rows themselves.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
CLAIMS = RESULTS / "README.md"
_LINK = re.compile(r"\]\((?:\.\./)*benchmark/results/(\w+)\.md\)")
_ANY_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_LINKS_ALONE = re.compile(r" ?\((?:\[[^]]*\]\([^)]*\)(?:,? )?)+\)")
_OTHER_LINK = re.compile(r"\[[^]]*\]\(https?:[^)]*\)")
# Not those of sizes, as 1080p.
_NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w,]*\d|p\b)")
_UNIT = re.compile(rf"({_NUMBER.pattern})(?:%| (?:ms|s|MB|GB|GiB|times)\b)")
_ROWS = re.compile(r"^<!-- Rows of the figures:\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"(\w+) ([\d. ]+): (.+)")
_RANGE = re.compile(r"[\d.]+ to [\d.]+")
_COMMAND = re.compile(r"(?:^ {4}|`)([^`\n]*benchmark/\w[^`\n]*\.py[^`\n]*)", re.MULTILINE)
_STAMP = re.compile(r"<!-- (\w+): (\S+) (\S+) (\S+) -->")
_HEAD = """# Claims

Figures of README.md and docs/ that were measured or simulated, with the row of the result that each stands in. `scripts/reference.py` writes this page from those pages and the results. A test fails where a paragraph or a table that links to a result has a figure without a row; whole numbers below a hundred count where a unit stands behind them.

The spread is that of the rounds, where the result has one. A claim without one comes from a single run, or from a median. The commit is the one that brought the figures, or that they were measured on. [Benchmarks](../README.md) says what each command measures.
"""  # noqa: E501


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


def rows(result: str) -> Iterator[Row]:
    headings: list[str] = []
    for block in result.split("\n\n"):
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
    """Paragraphs and rows that link to results, each with the names of these.

    The rows of a table below such a paragraph that ends in a colon have its links.
    """
    found: list[tuple[str, list[str]]] = []
    lent: list[str] = []
    for block in _ROWS.sub("", page.read_text()).split("\n\n"):
        for line, part in enumerate(re.split(r"\n(?=[|-])", block)):
            in_table = part.startswith("|") and line > 1  # below its head
            if names := _LINK.findall(part) or (lent if in_table else []):
                found.append((part, names))
        lent = _LINK.findall(block) if block.endswith(":") else []
    return found


def figures(text: str) -> list[str]:
    """What is told as a figure; counts below a hundred are words as often, but for units."""
    told = _OTHER_LINK.sub("", _LINK.sub("]", text))
    units = {one.replace(",", "") for one in _UNIT.findall(told)}
    return [one for one in numbers(told) if "." in one or float(one) >= 100 or one in units]


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


def page(pages: list[Path]) -> str:
    """The page, as Markdown."""
    told: dict[str, list[str]] = {}
    for one in pages:
        for name, row in _claims(one):
            told.setdefault(name, []).append(row)
    lines, stamps = [_HEAD], []
    for name in sorted(told):
        content, date, commit = _stamp(name)
        stamps.append(f"<!-- {name}: {content} {date} {commit} -->")
        command = _COMMAND.search((RESULTS / f"{name}.md").read_text())
        assert command, name
        lines.append(f"## [{name}]({name}.md)\n\n`{command[1]}`, {date}, commit {commit}\n")
        lines.append("| claim | figures | spread | said in |\n|---|---|---|---|")
        lines += [*told[name], ""]
    return "\n".join([*lines, *stamps, ""])


def _claims(page: Path) -> Iterator[tuple[str, str]]:
    """The results that a page quotes, and the row of each sentence that quotes them."""
    text = page.read_text()
    words, columns = named(text), columns_of(text)
    place = page.relative_to(ROOT)
    # The site of docs/ has pages that these link to, and no README.md.
    link = f"[{page.stem}](../../{place})" if place.parent.parts else page.name
    for part, names in quotes(page):
        for name in dict.fromkeys(names):
            result = [*rows((RESULTS / f"{name}.md").read_text())]
            for case, sentence in sentences(part, columns.get(part, [])):
                mine = [one for one in numbers(sentence) if (name, one) in words]
                if not mine:
                    continue
                found = [*(one for one in numbers(case) if (name, one) in words), *mine]
                # Of the figures that have one row only.
                spreads = {
                    figure: _spread(figure, row.text)
                    for figure in found
                    for row in result
                    if len(words[name, figure]) == 1 and row.has(words[name, figure][0])
                }
                shown = [f"{figure}: {spread}" for figure, spread in spreads.items() if spread]
                cells = [case + sentence, ", ".join(found), ", ".join(shown), link]
                yield name, f"| {' | '.join(cells)} |"


def columns_of(page: str) -> dict[str, list[str]]:
    """What the cells behind the first of each row of a table are, by the row."""
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    return {
        row: [cell.strip() for cell in head.strip("|").split("|")[1:]]
        for head, *table in tables
        for row in table
    }


def sentences(part: str, columns: list[str]) -> Iterator[tuple[str, str]]:
    """Those of a paragraph or a row of a table, without links, and the case of a row's cells.

    Args:
        columns: what the cells of a row are.
    """
    plain = _ANY_LINK.sub(r"\1", _LINKS_ALONE.sub("", part)).replace("\n", " ").replace("*", "")
    case, *cells = re.split(r"\s*\|\s*", plain.strip("|- "))
    if cells:
        for column, cell in zip_longest(columns, cells, fillvalue=""):
            yield (f"{case}, {column}: " if column else f"{case}: "), cell
    else:
        for sentence in re.split(r"(?<=[.;]) (?=[A-Z`\d])|(?<=;) ", case):
            yield "", sentence.rstrip(".;:")


def _spread(figure: str, row: str) -> str:
    """The range that a row has behind a figure, in the figure's cell or the next one."""
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    for cell, behind in zip(cells, [*cells[1:], ""], strict=True):
        first, _, rest = cell.partition(" (")
        if stands(figure, numbers(first)[-1:]):
            spread = _RANGE.match(rest) or _RANGE.fullmatch(behind)
            return spread.group() if spread else ""
    return ""


def _stamp(name: str) -> tuple[str, str, str]:
    """The content, date and commit of a result: as they were, unless its content has changed."""
    data = RESULTS / f"{name}.json"
    if not data.exists():
        data = data.with_suffix(".md")
    read = data.read_bytes()
    content = hashlib.sha1(b"blob %d\0%b" % (len(read), read)).hexdigest()[:12]
    before = _stamps().get(name)
    if before and before[0] == content:
        return before
    given = ["log", "-1", "--format=%as %h", "--abbrev=8"]
    kept = _git("ls-tree", "--format=%(objectname)", "HEAD", str(data))[:12] == content
    date, commit = _git(*given, *(["--", str(data)] if kept else [])).split()
    return content, date, commit


@cache
def _stamps() -> dict[str, tuple[str, str, str]]:
    text = CLAIMS.read_text() if CLAIMS.exists() else ""
    return {name: (content, date, of) for name, content, date, of in _STAMP.findall(text)}


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True, timeout=30)
