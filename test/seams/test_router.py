"""What SGLang's router hands on of a request, and when it closes a server; the docs say both."""

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
from sglang_epd.cli.topology import PATIENT

PICTURE = {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}, "fps": 2}


class Worker(BaseHTTPRequestHandler):
    """A server that notes the bodies of chat requests, and has no encoder for their media.

    Attributes:
        key: its `--api-key`; empty for none.
    """

    bodies: ClassVar[list[Any]] = []
    encoders = True
    key = ""

    def do_GET(self) -> None:
        self._say({"model_path": "m", "served_model_name": "m"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.key and self.headers["Authorization"] != f"Bearer {self.key}":
            self._say({"error": "Unauthorized"}, 401)
            return
        if self.path == "/v1/chat/completions":
            self.bodies.append(json.loads(body))
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        self._say(answer, 503 if b"image_url" in body and not self.encoders else 200)

    def _say(self, told: Any, status: int = 200) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def flags() -> tuple[str, ...]:
    return ()


@pytest.fixture
def router(tmp_path: Path, flags: tuple[str, ...]) -> Iterator[str]:
    Worker.bodies.clear()
    worker = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    threading.Thread(target=worker.serve_forever, daemon=True).start()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", f"http://127.0.0.1:{worker.server_address[1]}", *flags]
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


def ask(router: str, *parts: Any, key: str = "", **more: Any) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}
    told = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{router}/v1/chat/completions"
    return requests.post(url, json=body, headers=told, timeout=20).status_code


def test_it_drops_salts_and_options_of_items(router: str) -> None:
    text = {"type": "text", "text": "What?"}
    assert ask(router, PICTURE, text, max_tokens=4, cache_salt="tenant") == 200
    (body,) = Worker.bodies
    picture, text = body["messages"][0]["content"]
    assert (picture["image_url"]["url"], text["text"]) == ("data:,x", "What?")
    assert body["max_completion_tokens"] == 4, "it sends what it has read, and not the bytes"
    assert "cache_salt" not in body, "say so no more in docs/security.md"
    assert "fps" not in picture, "say so no more in docs/compatibility.md"
    assert ask(router, {"type": "audio_url", "audio_url": {"url": "data:,x"}}) == 400


@pytest.mark.parametrize(
    ("flags", "tries", "text"), [((), 5, 503), (PATIENT, 2, 200)], ids=["its own", "ours"]
)
def test_media_without_encoders_close_a_server_to_text_by_its_defaults(
    router: str, monkeypatch: pytest.MonkeyPatch, tries: int, text: int
) -> None:
    monkeypatch.setattr(Worker, "encoders", False)
    for number in (1, 2):
        assert ask(router, PICTURE) == 503
        assert len(Worker.bodies) == number * tries
    assert ask(router, {"type": "text", "text": "What?"}) == text


@pytest.mark.parametrize("flags", [(), ("--api-key", "secret")], ids=["servers'", "and its own"])
def test_users_give_it_the_servers_key(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hands their key on, and checks it where it has one too."""
    monkeypatch.setattr(Worker, "key", "secret")
    text = {"type": "text", "text": "What?"}
    asked = [ask(router, text, key=key) for key in ("secret", "", "another")]
    assert asked == [200, 401, 401]
    assert len(Worker.bodies) == 1
