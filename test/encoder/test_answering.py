from __future__ import annotations

import asyncio
import gc
from typing import ClassVar

import pytest

from sglang_epd.encoder.answering import Answering
from sglang_epd.trust import Trust
from sglang_epd.wire import http


class Asker:
    """Sends a body in one piece, and stays."""

    headers: ClassVar[dict[str, str]] = {"content-length": "0"}

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def pieces(self):
        yield self._body

    async def gone(self) -> None:
        await asyncio.Event().wait()


def requests_alive() -> set[int]:
    return {id(one) for one in gc.get_objects() if type(one) is http.EncodeRequest}


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 413)], ids=["answered", "refused"])
async def test_the_media_of_a_request_are_gone_with_it(service, metrics, asking, more, status):
    """Without waiting for a collection of cycles, which a bound on bytes knows nothing of."""
    body = http.encode_body(asking(*[b"x"] * (service.admission.max_items + more)))
    answering = Answering(service, metrics, Trust(), 1 << 20)
    gc.collect()
    before = requests_alive()  # of other tests, which their modules keep
    gc.disable()
    try:
        response = await answering.answer(Asker(body))
        assert response.status_code == status
        assert requests_alive() <= before
    finally:
        gc.enable()
