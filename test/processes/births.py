"""What children of the tests' nurseries do."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any


def echo(end: socket.socket, options: dict[str, Any]) -> None:
    """Answers each packet with what it was told and how many packets came before."""
    count = 0
    while packet := end.recv(1 << 16):
        end.send(b"%s %d %s" % (options["name"].encode(), count, packet))
        count += 1


def speak(end: socket.socket, _options: dict[str, Any]) -> None:
    """Begins the conversation."""
    end.send(b"first")


def describe(end: socket.socket, _options: dict[str, Any]) -> None:
    """Says which descriptors it has, and its niceness."""
    fds = {int(fd) for fd in os.listdir("/proc/self/fd")}
    held = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]
    end.send(repr((sorted(held), end.fileno(), os.nice(0), "json.tool" in sys.modules)).encode())


def fail(_end: socket.socket, _options: dict[str, Any]) -> None:
    raise RuntimeError("a child's own failure")


def sleep(_end: socket.socket, _options: dict[str, Any]) -> None:
    time.sleep(600)
