"""Servers in SGLang's place: small ones, of HTTP alone."""

from __future__ import annotations

from sglang_epd.cli.processes import free_port
from sglang_epd.cli.topology import Role, Server

SERVER = """
import http.server, sys
print("Uvicorn running", flush=True)
http.server.ThreadingHTTPServer(
    ("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler
).serve_forever()
"""


def server(name: str, role: Role, code: str = SERVER, *more: str, needs=()) -> Server:
    port = free_port()
    command = ("-c", code, str(port), *more)
    return Server(name, role, command, f"http://127.0.0.1:{port}", ready_path="/", needs=needs)
