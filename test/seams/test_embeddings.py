"""Requests for embeddings, as SGLang makes them, through the tokenizer process and a scheduler."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seams.test_tokenizer import FakeCollector, FakeFrontend, attach
from sglang_epd.errors import MediaError, from_code
from sglang_epd.language import manifest
from sglang_epd.language.backend import Backend, Leader
from sglang_epd.language.layouts import Board
from sglang_epd.seams import embeddings, prefix, rundir
from sglang_epd.seams.scheduler import SchedulerSeam
from sglang_epd.seams.tokenizer import TokenizerSeam
from sglang_epd.spans import OFF
from sglang_epd.wire.messages import Expect, Settled

LAID_OUT = SimpleNamespace(input_ids=[1, 2, 3], mm_items=[])


@pytest.fixture(autouse=True)
def field(sglang, monkeypatch):
    """The one that `create_frontend` gives the class; it is taken away afterwards."""
    cls = sglang("managers.io_struct").EmbeddingReqInput
    name = "need_wait_for_mm_inputs"
    assert not hasattr(cls, name), "SGLang has it itself by now"
    monkeypatch.setattr(cls, name, None, raising=False)
    embeddings.give_field()
    # The stricter of SGLang's two encodings.
    monkeypatch.setattr(sglang("managers.io_struct"), "_USE_PICKLE_IPC", False)


@pytest.fixture
def disagg(sglang, flags, monkeypatch):
    def set_flags(backend: str = "zmq_to_scheduler", *, adapts: bool = False) -> None:
        told = {
            "language_only": True,
            "encoder_transfer_backend": backend,
            "enable_adaptive_dispatch_to_encoder": adapts,
        }
        flags(disagg=told)
        get = sglang("runtime_context").get_disagg
        monkeypatch.setattr(sglang("managers.tokenizer_manager"), "get_disagg", get)

    set_flags()
    return set_flags


@pytest.fixture
def manager(sglang, hooked, disagg, monkeypatch):
    """SGLang's tokenizer manager, as far as it makes a scheduler's request of a user's."""
    for name in ("SGLANG_EPD_RUN_ID", "SGLANG_EPD_RUN_SECRET"):
        monkeypatch.setenv(name, "")
    rundir.draw_run_id()
    hooked("TokenizerManager._handle_epd_disaggregation_encode_request")
    hooked("TokenizerManager._create_tokenized_object")
    module = sglang("managers.tokenizer_manager")
    features = SimpleNamespace(
        enable_watermark=False,
        watermark_key=None,
        watermark_context_window=None,
        watermark_default_enabled=False,
        watermark_enforce_all=False,
    )
    monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(features=features))
    manager = module.TokenizerManager.__new__(module.TokenizerManager)
    manager.preferred_sampling_params = None
    manager.sampling_params_class = sglang("sampling.sampling_params").SamplingParams
    manager.tokenizer = None
    manager.enable_trace = False
    manager.model_config = SimpleNamespace(vocab_size=100)
    manager.rid_to_state = {}
    seam = TokenizerSeam(FakeFrontend(), FakeCollector(), 60.0, secret=rundir.secret())
    manager.mm_receiver = seam
    return manager


@pytest.fixture
def asked(sglang, manager) -> Callable[..., Any]:
    """A user's request, as far as `generate_request` is with it when it turns to encoders."""

    def ask(**values: Any) -> Any:
        obj = sglang("managers.io_struct").EmbeddingReqInput(**values)
        obj.normalize_batch_and_arguments()
        manager._handle_epd_disaggregation_encode_request(obj)
        return obj

    return ask


@pytest.fixture
def tokenized(sglang, manager) -> Callable[..., Any]:
    """What a scheduler gets of a prompt."""
    structs = sglang("managers.io_struct")

    def tokenize(prompt: Any, mm_inputs: Any = None) -> Any:
        stats = sglang("observability.req_time_stats").APIServerReqTimeStats()
        manager.rid_to_state[prompt.rid] = SimpleNamespace(time_stats=stats)
        made = manager._create_tokenized_object(prompt, prompt.text, [5, 6], None, mm_inputs)
        made.wrap_pickle_fields()
        received = structs.msgpack_decode(structs.msgpack_encode(made))
        received.unwrap_pickle_fields()
        return received

    return tokenize


def started(manager: Any) -> list[str]:
    return [rid for rid, _ in manager.mm_receiver.frontend.started]


def test_a_request_waits_for_its_media_with_its_manifest(manager, asked, tokenized):
    secret = rundir.secret()
    rundir.draw_run_id()  # another engine of this process
    obj = asked(text="a page", image_data=b"1", rid="a")
    assert started(manager) == ["a"]
    received = tokenized(obj)
    assert manifest.waits(received)
    expect = manifest.read_announced(manifest.carried(received), secret)
    assert expect.ticket == "ticket of a"


def test_of_a_batch_those_with_media_wait(manager, asked, tokenized):
    obj = asked(
        text=["page", "words", "film"],
        image_data=[b"1", None, None],
        video_data=[None, None, b"2"],
        rid=["a", "b", "c"],
    )
    assert started(manager) == ["a", "c"]
    received = [tokenized(obj[number]) for number in range(3)]
    assert [manifest.waits(one) for one in received] == [True, False, True]
    read = [
        manifest.read_announced(manifest.carried(one), rundir.secret()).ticket
        for one in received[::2]
    ]
    assert read == ["ticket of a", "ticket of c"]


def test_a_picture_that_cannot_be_read_is_said_before_anything_is_sent(manager, asked):
    with pytest.raises(ValueError, match="image 1 of 1"):
        asked(text=["a", "b"], image_data=[b"1", "not base64!"])
    assert not started(manager)


def test_text_goes_on_without_encoders(manager, asked, tokenized):
    received = tokenized(asked(text="words", rid="a"))
    assert not started(manager)
    assert not manifest.waits(received)


def test_a_generation_goes_sglangs_way(sglang, manager):
    obj = sglang("managers.io_struct").GenerateReqInput(text="a", image_data=b"1", rid="a")
    obj.normalize_batch_and_arguments()
    manager._handle_epd_disaggregation_encode_request(obj)
    assert started(manager) == ["a"]
    assert manifest.waits(SimpleNamespace(**vars(obj)))


def test_what_the_tokenizer_receives_it_asks_for_later(manager, disagg, asked, tokenized):
    disagg("zmq_to_tokenizer")
    obj = asked(text="a page", image_data=b"1")
    assert obj.need_wait_for_mm_inputs
    assert not started(manager)
    assert not manifest.waits(tokenized(obj))


@pytest.mark.parametrize("away", [True, False])
def test_an_adaptive_server_decides(manager, disagg, asked, monkeypatch, away):
    disagg(adapts=True)
    monkeypatch.setattr(type(manager), "_should_dispatch_to_encoder", lambda _self, _obj: away)
    obj = asked(text="a page", image_data=b"1", rid="a")
    assert obj.need_wait_for_mm_inputs is away
    assert started(manager) == (["a"] if away else [])


@pytest.mark.parametrize("written", ["x", {"a": 1}, 7, None, ["x"], ["AAAA"]], ids=str)
def test_what_a_user_wrote_is_no_manifest(asked, tokenized, claims, written):
    parameters = {"custom_params": {"sglang_epd_manifest": written}}
    received = tokenized(asked(text="words", sampling_params=parameters))
    leader = Leader(claims, rundir.secret(), prefix=False, resume=lambda _trace: OFF)
    (passed,) = leader.pass_on([received])
    assert not claims.claimed
    if isinstance(written, list):
        read = manifest.read_settled(manifest.carried(passed), rundir.secret())
        assert read.code == "ProtocolError"


class Claims:
    """Has what settles; takes what is claimed."""

    def __init__(self) -> None:
        self.claimed: list[tuple[str, Expect]] = []
        self.settled: list[Settled] = []

    def claim(self, name, expect, covered, *, prefix, early):
        self.claimed.append((name, expect))

    def take(self) -> list[Settled]:
        taken, self.settled = self.settled, []
        return taken


@pytest.fixture
def claims():
    return Claims()


@pytest.fixture
def schedulers(manager, claims) -> SchedulerSeam:
    """The only rank's."""
    secret = rundir.secret()

    def receive(settled: Settled) -> list[Any]:
        if settled.code:
            raise from_code(settled.code, settled.message)
        return list(settled.items)

    backend = Backend(
        receive,
        0,
        assemble=lambda _request, _items: LAID_OUT,
        abortable=embeddings.abortable,
        secret=secret,
        lay_out=lambda _request, _expect: LAID_OUT,
        gate=None,
        span_of=lambda _request: OFF,
    )
    leader = Leader(claims, secret, prefix=False, resume=lambda _trace: OFF)
    return SchedulerSeam(backend, leader)


def test_a_scheduler_holds_it_until_its_media_are_there(schedulers, claims, asked, tokenized):
    received = tokenized(asked(text="a page", image_data=b"1", rid="a"))
    words = tokenized(asked(text="words", rid="b"))
    assert schedulers.pass_on([received, words]) == [words]
    ((name, expect),) = claims.claimed
    assert expect.ticket == "ticket of a"
    claims.settled = [Settled(name, ())]
    passed = schedulers.pass_on([])
    ready, failed = schedulers.process_waiting_requests(passed)
    assert (ready, failed) == ([received], [])
    assert received.mm_inputs is LAID_OUT
    assert received.input_ids == array("q", [1, 2, 3])


def test_prompts_of_token_ids_come_as_a_batch_and_go_apart(
    sglang, schedulers, claims, asked, tokenized
):
    obj = asked(input_ids=[[1], [2]], image_data=[b"1", None], rid=["a", "b"])
    batch = sglang("managers.io_struct").BatchTokenizedEmbeddingReqInput(
        batch=[tokenized(obj[0]), tokenized(obj[1])]
    )
    assert [one.rid for one in schedulers.pass_on([batch])] == ["b"]
    assert [expect.ticket for _, expect in claims.claimed] == ["ticket of a"]


@pytest.mark.parametrize("laid_out", [True, False])
def test_one_that_fails_is_sent_as_sglang_sends_it(
    sglang, schedulers, claims, asked, tokenized, laid_out
):
    """Through SGLang's streamer and its message to the detokenizer, which takes no None."""
    received = tokenized(asked(text="a page", image_data=b"1", rid="a"))
    if not laid_out:
        received.input_ids = None
    schedulers.pass_on([received])
    error = MediaError("image 1 of 1: no picture")
    claims.settled = [Settled(claims.claimed[0][0], (), error.code, error.message)]
    ready, failed = schedulers.process_waiting_requests(schedulers.pass_on([]))
    assert not ready
    ((request, message, status),) = failed
    assert status == HTTPStatus.BAD_REQUEST
    sglang("disaggregation.utils").prepare_abort(request, message, status_code=status)
    sent = streamed(sglang, [request])
    assert sent.rids == ["a"]
    assert sent.embeddings == [[]]
    assert sent.finished_reasons[0]["message"] == error.message
    assert sent.finished_reasons[0]["status_code"] == HTTPStatus.BAD_REQUEST


def streamed(sglang: Any, requests: list[Any]) -> Any:
    """What a detokenizer gets."""
    structs = sglang("managers.io_struct")
    sent: list[bytes] = []
    output = SimpleNamespace(send_output=lambda it: sent.append(structs.msgpack_encode(it)))
    streamer = sglang("managers.scheduler_components.output_streamer").SchedulerOutputStreamer(
        send_to_detokenizer=output,
        tree_cache=None,
        server_args=None,
        is_generation=False,
        spec_algorithm=None,
        disaggregation_mode=None,
        enable_hicache_storage=lambda: False,
    )
    streamer.stream_output(requests, False)
    return structs.msgpack_decode(sent[0])


@pytest.mark.parametrize("language", [True, False])
def test_embeddings_are_given_back_when_an_answer_is_sent(sglang, hooked, monkeypatch, language):
    """SGLang keeps the media of its last batch; on a language server they are memory that the
    next one may wait for."""
    hooked("SchedulerOutputStreamer._stream_output_embedding")
    hooked("MultimodalInputs.release_features")
    monkeypatch.setattr(prefix.Installed, "releases", language)
    batch = sglang("managers.schedule_batch")
    item = batch.MultimodalDataItem(modality=batch.Modality.IMAGE, offsets=[(0, 1)])
    item.set_identity(bytes(32))
    name = "precomputed_embeddings" if language else "feature"
    setattr(item, name, torch.zeros(2, 4))
    output = batch.MultimodalProcessorOutput(input_ids=[9, 9], mm_items=[item])
    request = finished(sglang)
    request.multimodal_inputs = batch.MultimodalInputs.from_processor_output(output)
    (kept,) = request.multimodal_inputs.mm_items
    streamed(sglang, [request, finished(sglang)])
    # Elsewhere they stay SGLang's.
    assert (getattr(kept, name) is None) is language


def finished(sglang: Any) -> Any:
    batch = sglang("managers.schedule_batch")
    parameters = sglang("sampling.sampling_params").SamplingParams(max_new_tokens=0)
    request = batch.Req("a", "text", array("q", [1]), parameters)
    request.embedding = [0.5]
    request.finished_reason = batch.FINISH_LENGTH(0)
    return request


async def test_the_tokenizer_process_gives_a_prompts_inputs(manager, disagg, asked, monkeypatch):
    """zmq_to_tokenizer: SGLang's own `_tokenize_one_request` asks for them, prompt by prompt."""
    disagg("zmq_to_tokenizer")
    seam = manager.mm_receiver
    attach(seam)
    obj = asked(text=["a", "b"], image_data=[b"1", b"2"], rid=["a", "b"])
    failure = MediaError("image 1 of 1: no picture")
    seam._control.error = failure
    from fastapi import HTTPException

    with pytest.raises(HTTPException, match="no picture"):
        await asyncio.wait_for(
            seam.recv_mm_data(obj[0], None, "a", obj[0].need_wait_for_mm_inputs), 10
        )
    assert started(manager) == ["a"]


ROWS = {"format": "processor_output", "precomputed_embeddings": torch.zeros(4, 8)}
PIXELS = {"format": "processor_output", "pixel_values": torch.zeros(4, 8)}


@pytest.fixture
def generation(sglang, manager) -> Callable[..., Any]:
    def ask(**values: Any) -> Any:
        obj = sglang("managers.io_struct").GenerateReqInput(**values)
        obj.normalize_batch_and_arguments()
        manager._handle_epd_disaggregation_encode_request(obj)
        return obj

    return ask


@pytest.mark.parametrize("backend", ["zmq_to_scheduler", "zmq_to_tokenizer"])
async def test_no_encoder_is_asked_for_what_is_an_embedding(manager, disagg, generation, backend):
    disagg(backend)
    one = generation(input_ids=[1, 2], image_data=[ROWS], rid="a", need_wait_for_mm_inputs=True)
    assert one.need_wait_for_mm_inputs is False
    batch = generation(input_ids=[[1], [2]], image_data=[[ROWS], None], rid=["b", "c"])
    assert not started(manager)
    for prompt in (one, batch[0]):
        assert not prompt.need_wait_for_mm_inputs
        # SGLang then processes it itself.
        assert await manager.mm_receiver.recv_mm_data(prompt, None, [1], None) is None


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([[PIXELS]], "holds no tower"),
        # As JSON has it.
        ([[{**ROWS, "precomputed_embeddings": [[0.5]]}]], "holds no tower"),
        ([[{"format": "precomputed_embedding", "feature": [[0.5]]}]], "holds no tower"),
        ([[ROWS, b"1"]], "and not both"),
        ([[ROWS], [b"1"]], "and not both"),
    ],
    ids=str,
)
def test_what_only_one_server_takes_is_a_clear_error(manager, generation, images, said):
    manager.mm_receiver.layouts = board = Board()
    rooms = list(range(len(images)))
    with pytest.raises(ValueError, match=said):
        generation(input_ids=[[1]] * len(images), image_data=images, bootstrap_room=rooms)
    assert not started(manager)
    # A decode server does not wait for them.
    assert all(board.look(room).settled for room in rooms)
