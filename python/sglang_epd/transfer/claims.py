"""A scheduler's end of the control channel: asks for items, never blocks.

The receiver may run in this process or in another of the same server; it makes no
difference here.
"""

from __future__ import annotations

from pathlib import Path

import zmq

from sglang_epd.errors import ProtocolError, UnavailableError
from sglang_epd.transfer.arena import Address, Arena
from sglang_epd.wire import messages as wire


class Claims:
    """Claims tickets at this server's receiver. Use it from one thread.

    Args:
        control_path: Unix socket of the control channel.
        first_reader, readers: the processes that read what is claimed here.

    Attributes:
        socket: readable when something has settled.
    """

    def __init__(self, control_path: Path, first_reader: int = 0, readers: int = 1) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(f"ipc://{control_path}")
        self._first_reader = first_reader
        self._readers = readers

    def connect(self, timeout_s: float) -> Arena:
        """Map the receiver's arena.

        Raises:
            UnavailableError: no receiver answered in time.
        """
        self._send(wire.Hello())
        if not self.socket.poll(int(timeout_s * 1e3)):
            raise UnavailableError(f"this server's receiver did not answer within {timeout_s:g} s")
        reply = wire.decode_message(self.socket.recv())
        if not isinstance(reply, wire.Welcome):
            raise ProtocolError(f"expected Welcome, got {type(reply).__name__}")
        return Arena.open(Address(reply.path, reply.size, reply.seal, reply.readers))

    def claim(
        self,
        claim: str,
        expect: wire.Expect,
        covered: tuple[int, ...] = (),
        *,
        prefix: bool = False,
    ) -> None:
        """Ask for a ticket's items; `take` will return the outcome under this name.

        Args:
            covered: items that are not needed; they come as None.
            prefix: whether to be told of layouts first, where the prefix cache may have them.
        """
        readers = self._first_reader, self._readers
        self._send(wire.Claim(claim, expect, *readers, covered, prefix))

    def again(self, rid: str, expect: wire.Expect) -> None:
        """Have the tokenizer send for items of a request that it had sent for before."""
        self._send(wire.Again(rid, expect))

    def abandon(self, claim: str) -> None:
        """The items are not wanted any more; their outcome comes all the same."""
        self._send(wire.Abandon(claim))

    def take(self) -> list[wire.Settled | wire.Laid]:
        """What has become of claims since the last call; never blocks."""
        settled: list[wire.Settled | wire.Laid] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return settled
            message = wire.decode_message(frame, wire.MAX_CONTROL_BYTES)
            if not isinstance(message, wire.Settled | wire.Laid):
                raise ProtocolError(f"{type(message).__name__} from the receiver")
            settled.append(message)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _send(self, message: wire.Message) -> None:
        self.socket.send(wire.encode_message(message), zmq.NOBLOCK)
