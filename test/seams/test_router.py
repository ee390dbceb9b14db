"""What SGLang's router hands on of a request, which the docs warn of."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import requests

from sglang_epd.cli.processes import ServerProcess, free_port

PICTURE = {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}, "fps": 2}


class Worker(BaseHTTPRequestHandler):
    """A server that notes the bodies of chat requests."""

    bodies: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        self._say({"model_path": "m", "served_model_name": "m"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/chat/completions":
            self.bodies.append(json.loads(body))
        self._say({"id": "1", "object": "chat.completion", "created": 1, "model": "m"})

    def _say(self, told: Any) -> None:
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def router(tmp_path: Path) -> Iterator[str]:
    worker = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    threading.Thread(target=worker.serve_forever, daemon=True).start()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", f"http://127.0.0.1:{worker.server_address[1]}"]
    process = ServerProcess(
        "router", command, log_path=tmp_path / "router.log", ready_url=f"{url}/readiness"
    )
    process.start()
    try:
        process.wait_ready(60.0)
        yield url
    finally:
        process.stop()
        worker.shutdown()
        worker.server_close()


def test_it_drops_salts_and_options_of_items(router: str) -> None:
    Worker.bodies.clear()
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What?"}]}],
        "max_tokens": 4,
        "cache_salt": "tenant",
    }
    requests.post(f"{router}/v1/chat/completions", json=asked, timeout=20).raise_for_status()
    (body,) = Worker.bodies
    picture, text = body["messages"][0]["content"]
    assert (picture["image_url"]["url"], text["text"]) == ("data:,x", "What?")
    assert body["max_completion_tokens"] == 4, "it sends what it has read, and not the bytes"
    assert "cache_salt" not in body, "say so no more in docs/security.md"
    assert "fps" not in picture, "say so no more in docs/compatibility.md"
