"""The tokenizer process as the reader of items (the backend zmq_to_tokenizer)."""

from __future__ import annotations

from sglang_epd.errors import from_code
from sglang_epd.language.assembly import ReceivedItem
from sglang_epd.transfer.control import Control
from sglang_epd.wire.messages import Expect

_READER = 0


class Collector:
    """Waits for the items of requests, and reads them where they landed.

    Args:
        control: the channel to this server's receiver.
    """

    def __init__(self, control: Control) -> None:
        self._control = control

    async def collect(self, expect: Expect) -> list[ReceivedItem]:
        """The items of an announced request, once all are there.

        Raises:
            EpdError: what became of them instead.
        """
        arena = await self._control.arena(expect.ttl_s)
        settled = await self._control.claim(expect, _READER)
        # Nothing is awaited here: cancelled, it would leave the items to nobody.
        items = [
            ReceivedItem(item.key, item.layout, arena.read(item, _READER))
            for item in settled.items
            if item is not None
        ]
        if settled.code:
            # The error's trace will hold this frame.
            items.clear()
            raise from_code(settled.code, settled.message)
        return items
