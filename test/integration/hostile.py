"""What a stranger may do to a port."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from integration.topology import Topology

GROWTH = 64 << 20


def flood_the_payload_port(topology: Topology, role: str) -> None:
    """Send bytes that are no message; memory stays."""
    log = topology.servers[role].log_path.read_text()
    host, port = re.findall(r"encoders deliver to tcp://(\S+):(\d+)", log)[-1]
    before = resident(topology, role)
    for size in (1, 4096, 1 << 20):
        with socket.create_connection((host, int(port))) as raw:
            raw.settimeout(5.0)
            try:
                raw.sendall(os.urandom(size))
            except OSError:
                assert size > 4096  # the connection was dropped in the middle
    assert resident(topology, role) < before + GROWTH


def resident(topology: Topology, role: str) -> int:
    """Bytes that a server's processes hold, without what they share."""
    server = psutil.Process(topology.servers[role].pid)
    family = [server, *server.children(recursive=True)]
    return sum(one.memory_full_info().uss for one in family)


@contextmanager
def dear_to_read() -> Iterator[str]:
    """URL of a server whose answers cost their reader most: chunks of a byte at `/chunks`, and
    nothing but interim answers elsewhere, without end."""

    class Answering(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked = self.request.recv(1 << 16)
            head, more = b"", b"HTTP/1.1 103 \r\n\r\n" * 4000
            if b" /chunks" in asked:
                head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                more = b"1\r\nx\r\n" * 10_000
            with contextlib.suppress(OSError):
                self.request.sendall(head)
                while True:
                    self.request.sendall(more)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
