"""The pages of docs/ as a site: mkdocs builds them without a warning, and without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

import pytest

import site_files

ROOT = Path(__file__).resolve().parents[2]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site],
        capture_output=True,
        text=True,
        # Whoever asks the network is told at once that there is none.
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://127.0.0.1:9"},
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; links, anchors and pages that nobody finds are errors of the build."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


class Resources(HTMLParser):
    """What a browser loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag == "link" and told.get("rel") in ("canonical", "next", "prev"):
            return
        names = {"script": "src", "img": "src", "link": "href", "iframe": "src"}
        if url := told.get(names.get(tag, "")):
            self.urls.append(url)


def test_reading_it_asks_nobody(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 20
    for page in pages:
        resources = Resources()
        resources.feed(page.read_text())
        assert resources.urls
        for url in resources.urls:
            assert not re.match(r"(https?:)?//", url), (page.name, url)
            place = url.partition("?")[0].partition("#")[0]
            there = site / place.lstrip("/") if url.startswith("/") else page.parent / place
            assert there.exists(), (page.name, url)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:", sheet.read_text())


def test_files_of_the_repository_that_pages_link_to_are_there(site: Path) -> None:
    for path in ("benchmark/results/chaos.html", "benchmark/results/simulator-sglang.svg"):
        assert (site / path).is_file()
    assert 'href="planner.html' in (site / "topology.html").read_text()
    assert 'href="../../planner.html' in (site / "benchmark/results/simulator.html").read_text()


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    wrong = {
        "other.md": "other.md",
        "index.md#no-such-place": "no-such-place",
        "../results/no-such.md": "results/no-such.md",
        "../results/there.md#nor-here": "nor-here",
    }
    links = "".join(f"[x]({link})\n" for link in wrong)
    for place, text in {"docs": f"# A page\n\n{links}", "results": "# Figures\n"}.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / f"{'index' if place == 'docs' else 'there'}.md").write_text(text)
    ours = (ROOT / "mkdocs.yml").read_text()
    head, _, rest = ours.replace("scripts/", f"{ROOT}/scripts/").partition("\nnav:")
    config = tmp_path / "mkdocs.yml"
    config.write_text(head + "\nvalidation:" + rest.partition("\nvalidation:")[2])
    done = build(config, tmp_path / "site")
    assert done.returncode == 1
    for said in wrong.values():
        assert said in done.stderr


def test_what_is_a_link_and_what_is_not() -> None:
    page = PurePosixPath("benchmark/results/a.md")
    text = """[one](b.md#there) and ![two](c.svg), [out](https://example.com/d.md), `[code](e.md)`

```sh
echo "[fenced](f.md)"
```
[three](../../docs/g.md)
"""
    found = site_files.targets(text, page)
    assert {path.as_posix() for path in found} == {
        "benchmark/results/b.md",
        "benchmark/results/c.svg",
        "docs/g.md",
    }


def test_links_between_other_pages_lead_somewhere() -> None:
    """Those that the site does not have: README and its kind."""
    others = [*ROOT.glob("*.md"), *(ROOT / "benchmark").glob("*.md")]
    assert len(others) > 3
    for page in others:
        for target in site_files.targets(page.read_text(), page.relative_to(ROOT)):
            assert (ROOT / target).exists(), (page.name, target)
