"""Admission to the payload port: only peers that know its address may speak there.

libzmq reads all frames of a message before it hands out the first, and sets no limit to
their number. So a connection speaks only after a handshake (ZMTP's PLAIN) with a secret
that is part of the address, `tcp://SECRET@HOST:PORT`, which encoders receive with each
request. A stranger's connection ends at its handshake.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any

import zmq

from sglang_epd.wire.urls import host_port

_USER = b"epd"


class Gate:
    """Admits connections of a listening socket. Use it from the thread that polls `socket`.

    Args:
        context: the listening socket's; it has no other gate.
        listener: the socket, before it is bound.
    """

    def __init__(self, context: zmq.Context[Any], listener: zmq.Socket[Any]) -> None:
        self._secret = secrets.token_hex(16)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        # Where libzmq asks (RFC 27, ZAP).
        self.socket.bind("inproc://zeromq.zap.01")
        listener.setsockopt(zmq.ZAP_DOMAIN, _USER)
        listener.setsockopt(zmq.PLAIN_SERVER, 1)

    def address(self, host: str, port: int) -> str:
        """The address that encoders receive."""
        return f"tcp://{self._secret}@{host_port(host, port)}"

    def answer(self) -> None:
        """Answer one handshake that waits."""
        version, number, _domain, _address, _identity, mechanism, *proof = (
            self.socket.recv_multipart()
        )
        admitted = mechanism == b"PLAIN" and hmac.compare_digest(proof[-1], self._secret.encode())
        status = (b"200", b"") if admitted else (b"400", b"not the secret of this port")
        self.socket.send_multipart([version, number, *status, b"", b""])


def dial(socket: zmq.Socket[Any], endpoint: str) -> str:
    """Connect to an address that a gate made; one without a secret is taken too.

    Returns:
        The address without its secret.

    Raises:
        zmq.ZMQError: it is not an address.
    """
    secret, _, place = endpoint.removeprefix("tcp://").rpartition("@")
    if secret:
        socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
        socket.setsockopt(zmq.PLAIN_PASSWORD, secret.encode())
    socket.connect(f"tcp://{place}")
    return place
