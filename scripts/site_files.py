"""Hook of mkdocs (mkdocs.yml): what the pages link to outside docs/ is part of the site.

Pages link to files of the repository (`../benchmark/results/chaos.md`), as the repository's
own readers follow them. Each file that is linked to, from docs/ or from such a file, is put
into the site at its path in the repository, and links between the two are turned to where
their targets are there. A link to what does not exist is left as it is, for mkdocs to report.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_DOCS = PurePosixPath("docs")
# Code, in which nothing is a link, or a link's target and anchor.
_CODE_OR_LINK = re.compile(
    r"^(?P<fence>`{3,}).*?^(?P=fence)|`[^`\n]+`|(?<=\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))",
    re.MULTILINE | re.DOTALL,
)


def targets(text: str, page: PurePosixPath) -> set[PurePosixPath]:
    """The paths in the repository that `page`, one of its paths, links to; they may not exist."""
    found: set[PurePosixPath] = set()

    def note(path: PurePosixPath, anchor: str) -> str:
        found.add(path)
        return ""

    _each_link(text, page, note)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside docs/."""
    waiting = [file for file in files if file.is_documentation_page()]
    while waiting:
        page = waiting.pop()
        for path in targets(page.content_string, _in_repository(page, config)):
            uri, place = _in_site(path), _root(config) / path
            if uri in files.src_uris or not place.is_file():
                continue
            added = File.generated(config, uri, abs_src_path=str(place))
            files.append(added)
            if added.is_documentation_page():
                waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to where their targets are in the site."""
    here = PurePosixPath(page.file.src_uri).parent

    def turn(path: PurePosixPath, anchor: str) -> str:
        return os.path.relpath(_in_site(path), here) + anchor

    return _each_link(markdown, _in_repository(page.file, config), turn)


def _each_link(text: str, page: PurePosixPath, change: Callable[[PurePosixPath, str], str]) -> str:
    def changed(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or ":" in target:
            return match[0]
        path = PurePosixPath(os.path.normpath(page.parent / target))
        return change(path, match["anchor"] or "")

    return _CODE_OR_LINK.sub(changed, text)


def _in_site(path: PurePosixPath) -> str:
    inside = path.is_relative_to(_DOCS)
    return (path.relative_to(_DOCS) if inside else path).as_posix()


def _in_repository(file: File, config: MkDocsConfig) -> PurePosixPath:
    """The path of a file of the site."""
    assert file.abs_src_path is not None
    return PurePosixPath(Path(file.abs_src_path).relative_to(_root(config)).as_posix())


def _root(config: MkDocsConfig) -> Path:
    """The repository, in which mkdocs.yml lies."""
    return Path(config.config_file_path).parent
