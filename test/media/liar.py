"""A fetching process that says what is no message, or speaks of fetches that nobody asked for."""

from __future__ import annotations

import os
import socket
from typing import Any

from sglang_epd.media.fetching_child import TO_CHILD, Fetched, Grow
from sglang_epd.media.freshness import Trail
from sglang_epd.processes.packets import receive_now, send_now, write_file


def serve(end: socket.socket, _options: dict[str, Any]) -> None:
    asked, _ = receive_now(end, TO_CHILD)
    for number in range(100):
        file = write_file(bytes(100_000))
        send_now(end, Fetched(asked.number + 1 + number, Trail(()), bytes(32)), [file])
        os.close(file)
    send_now(end, Grow(asked.number + 1000, 1))
    end.send(b"\xc1 is no message")
    end.recv(1)
