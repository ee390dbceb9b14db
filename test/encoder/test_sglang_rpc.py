"""SGLang's own gRPC service of an encoder, asked by SGLang's own client, over loopback."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
import zmq
import zmq.asyncio
from smg_grpc_proto import sglang_encoder_pb2 as pb
from smg_grpc_proto import sglang_encoder_pb2_grpc

from packages import sglang_module
from sglang_epd.encoder import sglang_rpc
from sglang_epd.encoder.answering import Answering
from sglang_epd.encoder.rpc import RpcServer
from sglang_epd.encoder.sglang_rpc import SglangService
from sglang_epd.errors import EncodeError, MediaForbiddenError
from sglang_epd.trust import Trust
from sglang_epd.wire import rpc
from waiting import until

LOOPBACK = ("127.0.0.0/8",)
Serve = Callable[..., Awaitable[str]]


@pytest.fixture(scope="session", autouse=True)
def _sglang() -> None:
    sglang_module("disaggregation.encoder.grpc_server")


@pytest.fixture
async def serve(service, metrics) -> AsyncIterator[Serve]:
    """Starts the encoder's server; its host and port."""
    async with AsyncExitStack() as stack:

        async def start(token: str = "", networks: tuple[str, ...] = LOOPBACK) -> str:
            answering = Answering(service, metrics, Trust(token), 1 << 20)
            sglangs = SglangService(answering, networks)
            server = RpcServer(answering, "127.0.0.1:0", sglangs)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            return f"127.0.0.1:{server.port}"

        yield start


class Receiver:
    """A language server of SGLang's: a port to push to."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pull = self._context.socket(zmq.PULL)
        self.port = self._pull.bind_to_random_port("tcp://127.0.0.1")

    async def take(self) -> tuple[Any, torch.Tensor]:
        """A message, as SGLang's receiver reads it."""
        from sglang.srt.disaggregation.encoder.receiver import safe_pickle_loads

        facts, rows = await asyncio.wait_for(self._pull.recv_multipart(), 10)
        data = safe_pickle_loads(facts)
        return data, torch.frombuffer(bytearray(rows), dtype=data.dtype).reshape(data.shape)

    async def empty(self) -> bool:
        return not await self._pull.poll(200)

    def close(self) -> None:
        self._pull.close(linger=0)
        self._context.destroy(linger=0)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def asked(media: list[bytes | str], *ports: int, req_id: str = "r1", **more: Any) -> dict[str, Any]:
    items = [one if isinstance(one, str) else base64.b64encode(one).decode() for one in media]
    return {
        "mm_items": items,
        "req_id": req_id,
        "num_parts": 2,
        "part_idx": 1,
        "prefill_host": "127.0.0.1",
        "embedding_port": list(ports),
        **more,
    }


async def encode(target: str, request: dict[str, Any]) -> Any:
    """By SGLang's own function, which blocks."""
    from sglang.srt.disaggregation.encoder.receiver import _grpc_encode_request

    return await asyncio.to_thread(_grpc_encode_request, target, request)


async def refused(target: str, request: dict[str, Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        await encode(target, request)
    return raised.value.code(), raised.value.details()


async def test_embeddings_are_pushed_as_sglang_reads_them(serve, service, receiver):
    target = await serve()
    answer = await encode(target, asked([b"four", b"sixsix"], receiver.port))
    assert answer == pb.EncodeResponse()
    data, rows = await receiver.take()
    assert (data.req_id, data.num_parts, data.part_idx) == ("r1", 2, 1)
    assert data.modality.name == "IMAGE"
    assert data.error_msg is None
    assert data.grid_dim.tolist() == [[1, 2, 6], [1, 2, 6]]
    # What the fake tower makes of them, in their order.
    assert rows[:, 0].tolist() == [4.0] * 3 + [6.0] * 3
    assert not service.status()["bytes"]


async def test_sglangs_own_receiver_takes_them(serve):
    """All of its way, from a request to the call of its processor."""
    from sglang.srt.disaggregation.encoder.receiver import MMReceiverGrpc

    receiver = object.__new__(MMReceiverGrpc)
    receiver.host, receiver.recv_timeout, receiver.model_type = "127.0.0.1", 20.0, "qwen2_5_vl"
    receiver.encode_urls = [f"grpc://{await serve()}"]
    receiver.context = zmq.asyncio.Context()
    urls = [base64.b64encode(one).decode() for one in (b"four", b"sixsix")]
    request = SimpleNamespace(
        image_data=urls, video_data=None, audio_data=None, mm_content_hashes=None
    )
    processor = SimpleNamespace(
        get_validated_mm_data=lambda prompt, rows, **beside: (prompt, rows, beside)
    )
    prompt, rows, beside = await receiver.recv_mm_data(request, processor, "a prompt")
    receiver.context.destroy(linger=0)
    assert prompt == "a prompt"
    (embedding,) = rows.values()
    assert embedding[:, 0].tolist() == [4.0] * 3 + [6.0] * 3
    assert beside["img_grid_thw"].tolist() == [[1, 2, 6], [1, 2, 6]]


async def test_each_port_is_given_all(serve, receiver):
    other = Receiver()
    await encode(await serve(), asked([b"four"], receiver.port, other.port))
    for one in (receiver, other):
        _, rows = await one.take()
        assert rows.shape == (3, 4)
    other.close()


@pytest.mark.parametrize("first", ["encode", "receive_url"])
async def test_ports_may_be_named_while_it_encodes_or_before(
    serve, receiver, fakes, service, first
):
    from sglang.srt.disaggregation.encoder.receiver import _grpc_scheduler_receive_url

    target, other = await serve(), Receiver()

    def name(port: int) -> asyncio.Task[None]:
        place = f"127.0.0.1:{port}"
        return asyncio.create_task(_grpc_scheduler_receive_url(target, "r1", place, 2))

    begun = asyncio.create_task(encode(target, asked([b"four"]))) if first == "encode" else None
    if begun:
        await asyncio.wait_for(fakes.forwarded.entered.wait(), 10)
        service.admission.max_items = 1  # it is full
    naming = [name(receiver.port), name(other.port)]
    if not begun:
        # A caller may wait for the answers before it has anything encoded.
        await asyncio.gather(*naming)
        begun = asyncio.create_task(encode(target, asked([b"four"])))
    await asyncio.gather(begun, *naming)
    for one in (receiver, other):
        assert (await one.take())[0].req_id == "r1"
    other.close()


async def test_an_encoder_that_drains_waits_for_what_is_yet_to_be_pushed(serve, receiver, service):
    from sglang.srt.disaggregation.encoder.receiver import _grpc_scheduler_receive_url

    target = await serve()
    begun = asyncio.create_task(encode(target, asked([b"four"])))
    await until(lambda: service.finished == 1)
    service.drain()
    idle = asyncio.create_task(service.wait_idle())
    await asyncio.sleep(0.05)
    assert not idle.done(), "nobody has said where to"
    await _grpc_scheduler_receive_url(target, "r1", f"127.0.0.1:{receiver.port}", 1)
    await begun
    await asyncio.wait_for(idle, 10)
    assert (await receiver.take())[0].req_id == "r1"


async def test_without_a_network_or_the_token_nothing_is_read(serve, fakes, receiver):
    target = await serve("secret", networks=())
    code, text = await refused(target, asked([b"a"], receiver.port))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "SGLANG_EPD_ENCODER_PUSH_NETWORKS" in text
    assert not fakes.acquire.calls
    request = pb.EncodeRequest(**asked([b"a"], receiver.port))
    async with grpc.aio.insecure_channel(target) as channel:
        stub = sglang_encoder_pb2_grpc.SglangEncoderStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Encode(request, metadata=[("authorization", "Bearer wrong")])
        await stub.Encode(request, metadata=[("authorization", "Bearer secret")])
    assert (await receiver.take())[0].req_id == "r1"


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", "it is not in SGLANG_EPD_ENCODER_PUSH_NETWORKS"),
        ("::ffff:10.0.0.1", "it is not in SGLANG_EPD_ENCODER_PUSH_NETWORKS"),
        ("[::1]", "it is not in SGLANG_EPD_ENCODER_PUSH_NETWORKS"),
        ("localhost", "not to 'localhost'"),
        ("10.1", "not to '10.1'"),
        ("10.0.0.1\n", "not to '10.0.0.1"),
        ("", "not to ''"),
    ],
)
async def test_nothing_is_pushed_outside_the_networks(serve, fakes, receiver, host, said):
    target = await serve(networks=("10.0.0.0/8",))
    request = asked([b"a"], receiver.port, prefill_host=host)
    code, text = await refused(target, request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in text
    assert not fakes.acquire.calls
    async with grpc.aio.insecure_channel(target) as channel:
        stub = sglang_encoder_pb2_grpc.SglangEncoderStub(channel)
        place = f"{host}:{receiver.port}"
        named = pb.SchedulerReceiveUrlRequest(req_id="r", receive_url=place, receive_count=1)
        with pytest.raises(grpc.aio.AioRpcError, match=r"receive_url|it is not in|not to"):
            await stub.SchedulerReceiveUrl(named)
    assert await receiver.empty()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mm_items": []}, "missing or empty mm_items"),
        ({"req_id": ""}, "missing or invalid req_id"),
        ({"num_parts": 0}, "num_parts must be a positive integer"),
        ({"part_idx": 2}, "part_idx"),
        ({"mm_items": ["ftp://host/a.png"]}, "unknown URL scheme 'ftp'"),
        ({"embedding_port": list(range(1, 100))}, "64 places at most"),
        ({"embedding_port": [1 << 16]}, "65536 is no port"),
    ],
    ids=str,
)
async def test_a_bad_request_is_its_callers_fault(serve, receiver, changes, said):
    code, text = await refused(await serve(), asked([b"a"], receiver.port) | changes)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MediaForbiddenError("not from there"), grpc.StatusCode.INVALID_ARGUMENT),
        (EncodeError("the tower failed"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_the_text_of_an_error_reaches_its_caller(serve, receiver, fakes, error, code):
    fakes.acquire.failures[b"bad"] = error
    target = await serve()
    assert await refused(target, asked([b"fine", b"bad"], receiver.port)) == (code, str(error))
    assert await receiver.empty()


async def test_embeddings_that_are_held_have_a_bound(serve, receiver, service, fakes):
    target = await serve()
    # Two embeddings of 48 bytes.
    service.admission.max_bytes = 95
    code, text = await refused(target, asked([b"a", b"b"], receiver.port))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "ask for fewer" in text
    service.admission.max_bytes = 1 << 20
    fakes.forwarded.hold()
    call = asyncio.create_task(refused(target, asked([b"c"], receiver.port, req_id="r2")))
    await asyncio.wait_for(fakes.forwarded.entered.wait(), 10)
    service.admission.nbytes += 1 << 20  # of others
    fakes.forwarded.go_on()
    code, text = await call
    assert code is grpc.StatusCode.INTERNAL
    assert "of media in work, at most" in text
    assert service.admission.nbytes == 1 << 20
    assert await receiver.empty()


async def test_a_caller_that_leaves_ends_the_work(serve, receiver, service, fakes, count):
    fakes.forwarded.hold()
    async with grpc.aio.insecure_channel(await serve()) as channel:
        stub = sglang_encoder_pb2_grpc.SglangEncoderStub(channel)
        call = stub.Encode(pb.EncodeRequest(**asked([b"a"], receiver.port)))
        await asyncio.wait_for(fakes.forwarded.entered.wait(), 10)
        call.cancel()
    await until(lambda: not service.status()["requests"])
    await until(lambda: count("requests_total", status="499") == 1)


async def test_a_place_where_nobody_listens_is_given_up(serve, receiver, monkeypatch):
    monkeypatch.setattr(sglang_rpc, "_PUSH_S", 0.3)
    receiver.close()
    code, text = await refused(await serve(), asked([b"a"], receiver.port))
    assert code is grpc.StatusCode.INTERNAL
    assert f"no server takes embeddings at tcp://127.0.0.1:{receiver.port}" in text


async def test_a_place_without_a_socket_fails_the_request_and_leaves_nothing_behind(
    serve, receiver, monkeypatch
):
    make = zmq.asyncio.Context

    def small() -> zmq.asyncio.Context:
        context = make()
        context.set(zmq.MAX_SOCKETS, 1)
        return context

    with monkeypatch.context() as few:
        few.setattr(zmq.asyncio, "Context", small)
        target = await serve()
    nobody, before = receiver.port, len(asyncio.all_tasks())
    receiver.close()
    code, text = await refused(target, asked([b"a"], nobody, nobody))
    assert code is grpc.StatusCode.INTERNAL
    assert "no more places can be pushed to" in text
    # The other push would wait for its peer for minutes.
    await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_port_of_any_number_of_digits_is_none(serve):
    async with grpc.aio.insecure_channel(await serve()) as channel:
        stub = sglang_encoder_pb2_grpc.SglangEncoderStub(channel)
        place = "127.0.0.1:" + "9" * 5000
        named = pb.SchedulerReceiveUrlRequest(req_id="r", receive_url=place, receive_count=1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.SchedulerReceiveUrl(named)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_has_so_many_places_and_no_more(serve):
    async with grpc.aio.insecure_channel(await serve()) as channel:
        stub = sglang_encoder_pb2_grpc.SglangEncoderStub(channel)

        async def name(port: int) -> None:
            await stub.SchedulerReceiveUrl(
                pb.SchedulerReceiveUrlRequest(
                    req_id="r", receive_url=f"127.0.0.1:{port}", receive_count=1
                )
            )

        for port in range(1, 65):
            await name(port)
        with pytest.raises(grpc.aio.AioRpcError, match="64 places at most"):
            await name(65)
        await name(1)


async def test_names_have_a_bound(serve, receiver):
    async with grpc.aio.insecure_channel(await serve()) as channel:
        stub = sglang_encoder_pb2_grpc.SglangEncoderStub(channel)
        place = f"127.0.0.1:{receiver.port}"
        named = pb.SchedulerReceiveUrlRequest(req_id="r" * 4097, receive_url=place, receive_count=1)
        with pytest.raises(grpc.aio.AioRpcError, match="4096 characters"):
            await stub.SchedulerReceiveUrl(named)
    code, said = await refused(await serve(), asked([b"four"], receiver.port, req_id="r" * 4097))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "4096 characters" in said


async def test_a_strangers_word_on_its_bytes_keeps_no_room(serve, service):
    async with grpc.aio.insecure_channel(await serve()) as channel:
        service_name = pb.DESCRIPTOR.services_by_name["SglangEncoder"].full_name
        call = channel.stream_unary(f"/{service_name}/Encode")
        going = call(metadata=[(rpc.LENGTH, str(1 << 20))])
        await going.write(b"x")
        await asyncio.sleep(0.3)
        assert service.admission.nbytes < 1 << 20
        going.cancel()


async def test_a_request_that_takes_too_long_is_counted_as_that(serve, monkeypatch, count):
    """Its places are never named."""
    monkeypatch.setattr(sglang_rpc, "_REQUEST_S", 0.5)
    code, said = await refused(await serve(), asked([b"four"], prefill_host="", embedding_port=[]))
    assert code is grpc.StatusCode.INTERNAL and "took longer" in said
    assert count("refusals_total", code="DeadlineError") == 1
    assert count("requests_total", status="504") == 1


async def test_a_request_that_is_never_made_has_no_places(serve, receiver, monkeypatch):
    monkeypatch.setattr(sglang_rpc, "_REQUEST_S", 3.0)
    monkeypatch.setattr(sglang_rpc, "_MAX_MEETINGS", 1)
    async with grpc.aio.insecure_channel(await serve()) as channel:
        stub = sglang_encoder_pb2_grpc.SglangEncoderStub(channel)
        place = f"127.0.0.1:{receiver.port}"

        async def name(req_id: str) -> None:
            await stub.SchedulerReceiveUrl(
                pb.SchedulerReceiveUrlRequest(req_id=req_id, receive_url=place, receive_count=1)
            )

        await name("r")
        with pytest.raises(grpc.aio.AioRpcError, match="too many requests"):
            await name("another")
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await name("another")
                    break
                await asyncio.sleep(0.1)
        # Nothing is known of the first any more.
        with pytest.raises(grpc.aio.AioRpcError, match="too many requests"):
            await name("r")


async def test_mooncake_is_refused_by_name(serve):
    async with grpc.aio.insecure_channel(await serve()) as channel:
        stub = sglang_encoder_pb2_grpc.SglangEncoderStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="Mooncake"):
            await stub.Send(pb.SendRequest(req_id="r"))
