"""HTTP servers of tests, in this process."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def listening(
    handler: type[http.server.BaseHTTPRequestHandler],
    kind: type[http.server.HTTPServer] = http.server.ThreadingHTTPServer,
) -> Iterator[http.server.HTTPServer]:
    """A server on a free port of the loopback interface, until the context is left."""
    with kind(("127.0.0.1", 0), handler) as server:
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
