"""A hub of models over HTTP, on the loopback interface: what `huggingface_hub` asks of one.

Listings (`/api/models/…/revision/…`, `/tree/…`), and files by HEAD and GET with their ETag,
size and commit. Weights are where a large file is: behind a redirect to another path, with
the ETag of their content. All else is 404, with the hub's own error codes.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from integration.listener import QuietHandler, listening, url_of

_LARGE = (".safetensors", ".bin")
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?$")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
_CHUNK_BYTES = 1 << 20


@dataclass
class Hub:
    """Repositories by name, each with a folder for each of its revisions.

    Args:
        slow_s: how long each GET of a large file takes.
    """

    repositories: dict[str, dict[str, Path]]
    slow_s: float = 0.0
    # Repositories whose terms the asker has not accepted.
    gated: frozenset[str] = frozenset()
    url: str = ""
    # GETs that were answered with a file, by its path below the revision.
    fetched: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def commit(self, folder: Path) -> str:
        """The commit of a revision: of its folder's name, because the content never changes."""
        return hashlib.sha1(str(folder).encode()).hexdigest()

    def folder(self, repository: str, revision: str) -> Path | None:
        revisions = self.repositories[repository]
        by_commit = {self.commit(folder): folder for folder in revisions.values()}
        return revisions.get(revision) or by_commit.get(revision)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    """As git names a small file, and the hub a large one."""
    content = path.read_bytes()
    if path.suffix in _LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub answers at `hub.url` until the context is left."""

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/large/"):
                repository, _, rest = path.removeprefix("/large/").partition("@")
                revision, _, name = rest.partition("/")
                folder = hub.folder(repository, revision)
                assert folder is not None
                if self.command == "GET":
                    time.sleep(hub.slow_s)
                self._file(folder / name, name, {})
            elif found := _API.match(path):
                self._listing(*found.groups())
            elif found := _FILE.match(path):
                self._resolve(*found.groups())
            else:
                self._missing("EntryNotFound")

        def _listing(self, repository: str, kind: str | None, revision: str | None) -> None:
            folder = self._revision(repository, revision or "main")
            if folder is None:
                return
            names = [path.relative_to(folder).as_posix() for path in _files(folder)]
            if kind != "tree":
                siblings = [{"rfilename": name} for name in names]
                self._json({"id": repository, "sha": hub.commit(folder), "siblings": siblings})
                return
            entries = []
            for name in names:
                size, digest = (folder / name).stat().st_size, _digest(folder / name)
                entry = {"type": "file", "path": name, "size": size, "oid": digest}
                if Path(name).suffix in _LARGE:
                    entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 130}
                entries.append(entry)
            self._json(entries)

        def _resolve(self, repository: str, revision: str, name: str) -> None:
            folder = self._revision(repository, revision)
            if folder is None:
                return
            if repository in hub.gated:
                self._missing("GatedRepo", status=HTTPStatus.FORBIDDEN)
                return
            commit = {"X-Repo-Commit": hub.commit(folder)}
            path = folder / name
            if not path.is_file():
                self._missing("EntryNotFound", commit)
            elif path.suffix in _LARGE:
                self.send_response(HTTPStatus.FOUND)
                # Another host, as a hub's store of large files is.
                store = hub.url.replace("127.0.0.1", "localhost")
                place = f"{store}/large/{repository}@{hub.commit(folder)}/{name}"
                size = str(path.stat().st_size)
                linked = {"X-Linked-Etag": f'"{_digest(path)}"', "X-Linked-Size": size}
                self._headers({**commit, **linked, "Location": place, "Content-Length": "0"})
            else:
                self._file(path, name, commit)

        def _file(self, path: Path, name: str, headers: dict[str, str]) -> None:
            size = path.stat().st_size
            ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            begin = int(ranged[1]) if ranged else 0
            self.send_response(HTTPStatus.PARTIAL_CONTENT if ranged else HTTPStatus.OK)
            told = {"ETag": f'"{_digest(path)}"', "Content-Length": str(size - begin)}
            if ranged:
                told["Content-Range"] = f"bytes {begin}-{size - 1}/{size}"
            self._headers({**headers, **told})
            if self.command == "GET":
                with hub.lock:
                    hub.fetched[name] += 1
                with path.open("rb") as file:
                    file.seek(begin)
                    while chunk := file.read(_CHUNK_BYTES):
                        self.wfile.write(chunk)

        def _revision(self, repository: str, revision: str) -> Path | None:
            if repository not in hub.repositories:
                self._missing("RepoNotFound")
                return None
            folder = hub.folder(repository, revision)
            if folder is None:
                self._missing("RevisionNotFound")
            return folder

        def _missing(
            self,
            code: str,
            headers: dict[str, str] | None = None,
            status: HTTPStatus = HTTPStatus.NOT_FOUND,
        ) -> None:
            self.send_response(status)
            self._headers({**(headers or {}), "X-Error-Code": code, "Content-Length": "0"})

        def _json(self, answer: object) -> None:
            body = json.dumps(answer).encode()
            self.send_response(HTTPStatus.OK)
            self._headers({"Content-Type": "application/json", "Content-Length": str(len(body))})
            if self.command == "GET":
                self.wfile.write(body)

        def _headers(self, headers: dict[str, str]) -> None:
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

    with listening(Handler) as server:
        hub.url = url_of(server)
        yield hub
