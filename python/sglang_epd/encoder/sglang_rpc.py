"""SGLang's own gRPC service of an encoder, for SGLang's own language servers.

Encode               encodes pictures, and pushes their embeddings to ports of a host
SchedulerReceiveUrl  names such a port, where Encode names none (zmq_to_scheduler)
Send                 is Mooncake's, which SGLang's language servers do not have over gRPC: refused

Those servers have no token, and the caller says where embeddings go. So a place has to be in
`SGLANG_EPD_ENCODER_PUSH_NETWORKS`, unless the caller has the token. A pushed message is a pickle
for SGLang, and has no answer: nothing is unpickled here.

Leans on `disaggregation.encoder.receiver.EmbeddingData` and on
`disaggregation.encoder.runtime.validate_encode_request`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pickle import dumps
from typing import Any

import grpc
import torch
import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError
from smg_grpc_proto import sglang_encoder_pb2 as pb

from sglang_epd import logs
from sglang_epd.encoder.answering import Answering, read_body
from sglang_epd.encoder.rpc import Call
from sglang_epd.encoder.service import Room
from sglang_epd.errors import (
    DeadlineError,
    EpdError,
    MediaTooLargeError,
    ProtocolError,
    UnavailableError,
    from_code,
)
from sglang_epd.media import EscapeBudget, MediaSource, parse_source
from sglang_epd.transfer.delivery import Granted, Offered
from sglang_epd.wire.http import EncodeItem, EncodeRequest, ItemOutcome, ReplyTo
from sglang_epd.wire.messages import Grant, Inline, Offer
from sglang_epd.wire.urls import host_port

logger = logging.getLogger(__name__)

# SGLang's own, of SGLANG_ENCODER_REQ_TIMEOUT.
_REQUEST_S = 180.0
# SGLang's own, of SGLANG_ENCODER_SEND_TIMEOUT.
_PUSH_S = 180.0
_LOOK_S, _MOST_LOOK_S = 0.002, 0.05
# For what has been handed to a socket, and not been written yet.
_LINGER_MS = 5000
_MAX_PLACES = 64
_MAX_MEETINGS = 4096
_MAX_ID_CHARS = 4096
# Digits of a port.
_MOST_DIGITS = 5


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Around a request.

    Raises:
        DeadlineError: it takes too long.
    """
    try:
        async with asyncio.timeout(_REQUEST_S):
            yield
    except TimeoutError:
        raise DeadlineError(f"it took longer than {_REQUEST_S:g} s") from None


def _check_name(req_id: str) -> None:
    if len(req_id) > _MAX_ID_CHARS:
        raise ProtocolError(f"a req_id has at most {_MAX_ID_CHARS} characters")


class SglangService:
    """Use it from one event loop.

    Args:
        answering: of encode requests, within the same bounds.
        networks: CIDRs that callers without the token may have embeddings pushed into.
    """

    name = pb.DESCRIPTOR.services_by_name["SglangEncoder"].full_name

    def __init__(self, answering: Answering, networks: Iterable[str]) -> None:
        self._answering = answering
        self._networks = tuple(map(ipaddress.ip_network, networks))
        self._meetings: dict[str, _Meeting] = {}
        self._zmq = zmq.asyncio.Context()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Of each method. A message is read when its sender is known, so it is a stream's."""
        methods = {
            "Encode": self._encode,
            "SchedulerReceiveUrl": self._receive_url,
            "Send": self._send,
        }
        return {
            name: grpc.stream_unary_rpc_method_handler(self._answered(method))
            for name, method in methods.items()
        }

    def close(self) -> None:
        self._zmq.destroy(linger=0)

    def _answered(
        self, method: Callable[[Call], Awaitable[Any]]
    ) -> Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[bytes]]:
        async def answer(
            messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
        ) -> bytes:
            call = Call(messages, context)
            # SGLang's do not say it, and a stranger's word would keep room from others.
            call.headers["content-length"] = ""
            try:
                return bytes((await method(call)).SerializeToString())
            except EpdError as refusal:
                logger.warning("Refused a request of SGLang's: %s (%s)", refusal, refusal.code)
                # As SGLang's own: the request's fault, or the encoder's.
                codes = grpc.StatusCode
                code = codes.INVALID_ARGUMENT if refusal.status < 500 else codes.INTERNAL
                await context.abort(code, refusal.message)
                raise  # what `abort` does already

        return answer

    async def _encode(self, call: Call) -> Any:
        metrics, status = self._answering.metrics, 499
        try:
            service = self._answering.service
            with metrics.request_seconds.time(), service.receiving() as room, service.at_work():
                async with _in_time():
                    await self._encode_and_push(call, room)
            status = 200
        except EpdError as error:
            status = error.status
            metrics.refusals.labels(error.code).inc()
            raise
        except Exception:
            status = 500
            raise
        finally:
            metrics.requests.labels(str(status)).inc()
        return pb.EncodeResponse()

    async def _encode_and_push(self, call: Call, room: Room) -> None:
        trusted = self._check_caller(call)
        body = await read_body(call, self._answering.max_body_bytes, room)
        asked = _decoded(body, pb.EncodeRequest)
        del body
        from sglang.srt.disaggregation.encoder.runtime import validate_encode_request

        fields = {
            "req_id": asked.req_id,
            "modality": "IMAGE",
            "mm_items": list(asked.mm_items),
            "num_parts": asked.num_parts,
            "part_idx": asked.part_idx,
        }
        if problem := validate_encode_request(fields):
            raise ProtocolError(problem)
        _check_name(asked.req_id)
        if len(asked.embedding_port) > _MAX_PLACES:
            raise _too_many_places()
        host, ports = asked.prefill_host, asked.embedding_port
        named = [self._place(host, port, trusted) for port in ports]
        meeting = None if named else self._meet(asked.req_id)
        try:
            with logs.about(asked.req_id):
                frames = await self._frames(call, room, asked)
                places = named if meeting is None else await meeting.places()
                await self._push_all(places, frames)
        finally:
            if meeting is not None:
                del self._meetings[asked.req_id]

    async def _receive_url(self, call: Call) -> Any:
        trusted = self._check_caller(call)
        # A full encoder hears it as well: it may be of a request that is in work.
        async with _in_time():
            body = await anext(call.pieces(), b"")
        asked = _decoded(body, pb.SchedulerReceiveUrlRequest)
        _check_name(asked.req_id)
        host, _, port = asked.receive_url.rpartition(":")
        is_port = port.isdecimal() and len(port) <= _MOST_DIGITS
        if not host or not is_port or not 0 < asked.receive_count <= _MAX_PLACES:
            raise ProtocolError(
                f"a receive_url is host:port, and a receive_count from 1 to {_MAX_PLACES}"
            )
        place = self._place(host, int(port), trusted)
        # It may come before the encode request that it belongs to, which a caller may make
        # when this is answered.
        meeting = self._meeting(asked.req_id)
        meeting.join(place, asked.receive_count)
        return pb.SchedulerReceiveUrlResponse()

    async def _send(self, _call: Call) -> Any:
        raise ProtocolError("Mooncake is not served over SGLang's gRPC: use HTTP")

    def _check_caller(self, call: Call) -> bool:
        """Whether the caller has the token.

        Raises:
            ProtocolError: it has not, and nothing may be pushed for such callers.
        """
        secret = self._answering.trust.token
        trusted = bool(secret) and self._answering.authorised(call.headers)
        if not trusted and not self._networks:
            raise ProtocolError(
                "this encoder pushes no embeddings: SGLANG_EPD_ENCODER_PUSH_NETWORKS has to "
                "name the networks of SGLang's own language servers"
            )
        return trusted

    def _place(self, host: str, port: int, trusted: bool) -> str:
        """Where embeddings are pushed to. No name is looked up: SGLang's servers give addresses.

        Raises:
            ProtocolError: it is no address and port, or may not be pushed to.
        """
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            raise ProtocolError(f"embeddings are pushed to addresses, not to {host!r}") from None
        if not 0 < port < 1 << 16:
            raise ProtocolError(f"{port} is no port")
        if not trusted and not any(address in network for network in self._networks):
            raise ProtocolError(
                f"nothing is pushed to {address}: it is not in SGLANG_EPD_ENCODER_PUSH_NETWORKS"
            )
        return f"tcp://{host_port(str(address), port)}"

    def _meet(self, req_id: str) -> _Meeting:
        meeting = self._meeting(req_id)
        if meeting.begun:
            raise ProtocolError(f"the request {req_id!r} is live already")
        meeting.begun = True
        return meeting

    def _meeting(self, req_id: str) -> _Meeting:
        """That of a request, which is forgotten where it is not encoded in time."""
        meeting = self._meetings.get(req_id)
        if meeting is None:
            if len(self._meetings) >= _MAX_MEETINGS:
                raise UnavailableError("too many requests have named where embeddings go")
            meeting = self._meetings[req_id] = _Meeting()
            asyncio.get_running_loop().call_later(_REQUEST_S, self._forget, req_id, meeting)
        return meeting

    def _forget(self, req_id: str, meeting: _Meeting) -> None:
        if self._meetings.get(req_id) is meeting and not meeting.begun:
            del self._meetings[req_id]

    async def _frames(self, call: Call, room: Room, asked: Any) -> list[Any]:
        """What SGLang's receiver reads: facts, pickled, and the rows of all pictures."""
        service = self._answering.service
        sources = await asyncio.to_thread(_sources, asked.mm_items)
        count = len(sources)
        items = [
            EncodeItem(n, "IMAGE", f"image {n + 1} of {count}", data=one.data, url=one.url)
            for n, one in enumerate(sources)
        ]
        request = EncodeRequest(
            f"sglang {asked.req_id} {asked.part_idx}"[:256],
            service.namespace,
            _REQUEST_S,
            ReplyTo("", ""),
            items,
            asker=asked.req_id,
        )
        taken = _Taken(room, service.admission.max_bytes)
        with self._answering.begin_span(call.headers) as span:
            reply = await service.encode(request, room, span, taken)
        for outcome in reply.outcomes:
            if outcome.state == "failed":
                raise from_code(outcome.code, outcome.message)
        return await asyncio.to_thread(_frames, asked, reply.outcomes, taken.rows)

    async def _push_all(self, places: Iterable[str], frames: Sequence[Any]) -> None:
        """To all places, or to no more where one of them fails: what is on its way is not counted
        when the request has ended."""
        pushing = [asyncio.create_task(self._push(place, frames)) for place in places]
        try:
            await asyncio.gather(*pushing)
        finally:
            for one in pushing:
                one.cancel()
            await asyncio.gather(*pushing, return_exceptions=True)

    async def _push(self, place: str, frames: Sequence[Any]) -> None:
        """Hand a message over to a connection; that its peer reads it is not known.

        Raises:
            UnavailableError: no peer is there, or there is no socket for it.
        """
        try:
            push = self._zmq.socket(zmq.PUSH)
        except zmq.ZMQError as error:
            raise UnavailableError(f"no more places can be pushed to: {error}") from None
        push.setsockopt(zmq.IMMEDIATE, 1)
        push.setsockopt(zmq.IPV6, 1)
        try:
            push.connect(place)
            async with asyncio.timeout(_PUSH_S):
                tracker = await push.send_multipart(frames, copy=False, track=True)
                assert tracker is not None
                pause_s = _LOOK_S
                while not tracker.done:  # libzmq signals it to no loop
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MOST_LOOK_S)
        except TimeoutError:
            raise UnavailableError(f"no server takes embeddings at {place}") from None
        finally:
            push.close(linger=_LINGER_MS)


class _Meeting:
    """The places of a request's embeddings, which are told while it is encoded, or before.

    Attributes:
        begun: whether it is being encoded.
    """

    def __init__(self) -> None:
        self.begun = False
        self._full = asyncio.Event()
        self._count = 0
        self._places: list[str] = []

    def join(self, place: str, count: int) -> None:
        """Add a place, of so many.

        Raises:
            ProtocolError: another place has said another count, or there are too many.
        """
        if self._count not in (0, count):
            raise ProtocolError(f"a receive_count of {self._count}, and one of {count}")
        self._count = count
        if place not in self._places:
            if len(self._places) == _MAX_PLACES:
                raise _too_many_places()
            self._places.append(place)
        if len(self._places) >= count:
            self._full.set()

    async def places(self) -> list[str]:
        await self._full.wait()
        return self._places


class _Taken:
    """Takes each embedding as soon as it is there; in the place of a `Sender`.

    Args:
        room: of the request, which has the embeddings' bytes as well.
        most_bytes: of all of them.

    Attributes:
        rows: copies of the embeddings, by their items.
    """

    def __init__(self, room: Room, most_bytes: int) -> None:
        self._room = room
        self._left = most_bytes
        self.rows: dict[int, torch.Tensor] = {}

    @asynccontextmanager
    async def offer(self, _endpoint: str, offer: Offer) -> AsyncIterator[Offered]:
        offered = Offered(offer.nbytes)
        offered.answer(Grant(offer.ticket, offer.item, 1, _REQUEST_S, Inline()))
        yield offered

    async def begin(self, *_: Any) -> None:
        """Nothing: an embedding is taken whole."""

    async def deliver(
        self, _endpoint: str, granted: Granted, embedding: torch.Tensor, timeout_s: float
    ) -> str:
        self._left -= embedding.nbytes
        if self._left < 0:
            raise MediaTooLargeError("the embeddings of one request are too many: ask for fewer")
        self._room.take(embedding.nbytes)
        self.rows[granted.message.item] = await asyncio.to_thread(embedding.clone)
        return "pushed"


def _too_many_places() -> ProtocolError:
    return ProtocolError(f"embeddings are pushed to {_MAX_PLACES} places at most")


def _decoded(body: bytes | bytearray, kind: Any) -> Any:
    try:
        return kind.FromString(bytes(body))
    except DecodeError:
        raise ProtocolError(f"malformed {kind.DESCRIPTOR.name}") from None


def _sources(items: Iterable[str]) -> list[MediaSource]:
    escapes = EscapeBudget()
    return [parse_source(item, escapes) for item in items]


def _frames(
    asked: Any, outcomes: Iterable[ItemOutcome], rows: dict[int, torch.Tensor]
) -> list[Any]:
    from sglang.srt.disaggregation.encoder.receiver import EmbeddingData
    from sglang.srt.managers.schedule_batch import Modality

    grid: list[list[int]] = []
    beside: dict[str, list[Any]] = {}
    for outcome in sorted(outcomes, key=lambda one: one.item):
        assert outcome.layout is not None
        grid += outcome.layout.grid
        for name, value in outcome.layout.extra.items():
            beside.setdefault(name, []).extend(value)
    embedding = torch.cat([rows[n] for n in sorted(rows)])
    facts = EmbeddingData(
        asked.req_id,
        asked.num_parts,
        asked.part_idx,
        torch.tensor(grid),
        Modality.IMAGE,
        embedding,
        **beside,
    ).copy_without_embedding()
    return [dumps(facts), embedding.view(torch.uint8).numpy().data]
