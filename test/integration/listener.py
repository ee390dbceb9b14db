"""HTTP servers of tests, in this process."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def listening(
    handler: type[http.server.BaseHTTPRequestHandler],
) -> Iterator[http.server.HTTPServer]:
    """A server on a free port of the loopback interface, until the context is left."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        # Seconds after which it sees that it is to end; half of one by itself.
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def url_of(server: http.server.HTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


class Site:
    """A media server's files, and what it is asked for.

    Attributes:
        files: bodies by path; any other path is a 404.
        headers: sent with each body.
        slow_s: how long each answer takes, at most until `released`.
        asked: the path of each request, in order.
    """

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self.slow_s = 0.0
        self.released = threading.Event()
        self.asked: list[str] = []

    def linked(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same messages, their pictures behind addresses of this site."""
        moved = copy.deepcopy(messages)
        for message in moved:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] == "image_url":
                    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                    path = f"/{hashlib.sha256(data).hexdigest()}.png"
                    self.files[path] = data
                    part["image_url"]["url"] = f"{self.url}{path}"
        return moved

    def take(self) -> list[str]:
        """The paths of the requests since the last time."""
        taken, self.asked = self.asked, []
        return taken


@contextmanager
def serving() -> Iterator[Site]:
    """A site, until the context is left."""
    site = Site()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            site.asked.append(self.path)
            site.released.wait(site.slow_s)
            if self.path not in site.files:
                self.send_error(404)
                return
            body = site.files[self.path]
            self.send_response(200)
            for name, value in {**site.headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        do_POST = do_GET

    with listening(Handler) as server:
        site.url = url_of(server)
        try:
            yield site
        finally:
            site.released.set()
