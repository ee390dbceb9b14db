from __future__ import annotations

import asyncio
import copy
import gc
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from fastapi import HTTPException

from sglang_epd.errors import (
    DeadlineError,
    EpdError,
    MediaError,
    MediaForbiddenError,
    MediaTooLargeError,
    RequestCancelledError,
    UnavailableError,
)
from sglang_epd.language import manifest, reading
from sglang_epd.language.layouts import Board, Slot
from sglang_epd.seams import rundir
from sglang_epd.seams.requests import StreamError
from sglang_epd.seams.tokenizer import TokenizerSeam
from sglang_epd.transfer.arena import ReceivedItem
from sglang_epd.wire.http import LayoutReply, decode_body
from sglang_epd.wire.messages import MAX_ITEMS, Expect, Layout, Settled, TensorSpec
from waiting import until


class FakeFrontend:
    def __init__(self) -> None:
        self.started: list[tuple] = []
        self.slots: list[Slot | None] = []
        self.cancelled: list[str] = []
        self.sent_again: list[tuple] = []
        self.outcomes: dict[str, asyncio.Future] = {}

    def start(self, rid, items, slot=None, known=None, parent=None) -> Expect:
        self.started.append((rid, [item.data for item in items]))
        self.slots.append(slot)
        return Expect(f"ticket of {rid}", len(items), 60.0)

    def underway(self, rid):
        return self.outcomes.get(rid)

    def cancel(self, rid) -> None:
        self.cancelled.append(rid)

    def cancel_all(self, which) -> None:
        self.cancelled += [rid for rid, *_ in self.started if which(rid)]

    def again(self, rid, items, expect, parent=None) -> None:
        self.sent_again.append((rid, [item.data for item in items], expect))


class FakeCollector:
    """Has a prompt's items, or what became of them instead, when the test says so."""

    def __init__(self) -> None:
        self.expected: list[Expect] = []
        self.ready = asyncio.Event()
        self.ready.set()
        self.items: list[ReceivedItem] = []
        self.error: BaseException | None = None

    async def collect(self, expect: Expect) -> list[ReceivedItem]:
        self.expected.append(expect)
        await self.ready.wait()
        if self.error is not None:
            raise self.error
        return self.items


class Request(SimpleNamespace):
    """Shaped as SGLang's `GenerateReqInput`."""

    def __init__(self, rid="rid", images=None, **changes) -> None:
        values = {
            "rid": rid,
            "image_data": images,
            "video_data": None,
            "audio_data": None,
            "is_single": True,
            "parallel_sample_num": 1,
            "need_wait_for_mm_inputs": None,
            "encoder_urls": None,
            "bootstrap_room": None,
            "sampling_params": {},
        }
        super().__init__(**{**values, **changes})

    def contains_mm_input(self) -> bool:
        return bool(self.image_data)


class Batch(Request):
    def __init__(self, *prompts, **changes) -> None:
        super().__init__(is_single=False, batch_size=len(prompts), **changes)
        self.prompts = prompts

    def __getitem__(self, index):
        return self.prompts[index]


@pytest.fixture
def frontend():
    return FakeFrontend()


@pytest.fixture
async def collector():
    return FakeCollector()


@pytest.fixture
async def seam(frontend, collector, monkeypatch):
    # So that what `draw_run_id` writes is undone.
    for name in ("SGLANG_EPD_RUN_ID", "SGLANG_EPD_RUN_SECRET"):
        monkeypatch.setenv(name, "")
    rundir.draw_run_id()
    seam = TokenizerSeam(
        frontend, collector, 60.0, lays_out=lambda processor: processor, secret=rundir.secret()
    )
    attach(seam)
    return seam


def attach(seam: TokenizerSeam, **live: Request) -> dict[str, SimpleNamespace]:
    """To a manager with these requests; its books of them."""
    states = {rid: SimpleNamespace(obj=request) for rid, request in live.items()}
    seam.attach(manager_of(states))
    return states


def manager_of(states: dict[str, SimpleNamespace]) -> SimpleNamespace:
    return SimpleNamespace(
        rid_to_state=states, mm_processor=Processor(), bootstrap_server=None, context_len=1000
    )


@pytest.mark.parametrize("lays_out", [None, lambda processor: processor])
def test_schedulers_that_lay_prompts_out_get_token_ids(frontend, collector, lays_out):
    manager = manager_of({})
    manager.mm_processor.generates_input_ids_from_raw_prompt = True
    TokenizerSeam(frontend, collector, 60.0, lays_out=lays_out).attach(manager)
    assert manager.mm_processor.generates_input_ids_from_raw_prompt is (lays_out is not None)


def test_a_request_opens_no_more_rooms_than_it_may_have_prompts(seam):
    seam.layouts = Board()
    prompts = [Request(str(n), [b"1"], bootstrap_room=n) for n in range(MAX_ITEMS + 1)]
    batch = Batch(*prompts, image_data=[b"1"], bootstrap_room=[*range(MAX_ITEMS + 1)])

    async def generate_request(_manager, _obj):
        yield {}

    seam.read_first(generate_request, None, batch)
    with pytest.raises(ValueError, match="at most 4096 prompts"):
        seam.send_encode_request(batch)
    assert not seam.layouts._slots


def told(seam: TokenizerSeam, room: int) -> tuple[str, str]:
    """Code and message of the error that a decode server hears of."""
    error = decode_body(seam.layouts.look(room).body, LayoutReply, 1 << 20).error
    return error.code, error.message


async def test_items_are_sent_for_again_while_their_request_is_live(seam, frontend):
    live = attach(seam, rid=Request(images=[b"1", b"2"]))
    expect = Expect("another ticket", 2, 60.0)
    await seam.send_again("rid", expect)
    assert frontend.sent_again == [("rid", [b"1", b"2"], expect)]
    del live["rid"]
    with pytest.raises(RequestCancelledError):
        await seam.send_again("rid", expect)
    assert len(frontend.sent_again) == 1


def test_each_prompt_of_a_batch_is_a_request(seam, frontend):
    with_image, without, other = Request("a", [b"1"]), Request("b"), Request("c", [b"2"])
    seam.send_encode_request(Batch(with_image, without, other))
    assert frontend.started == [("a", [b"1"]), ("c", [b"2"])]
    assert without.need_wait_for_mm_inputs is None
    for prompt in (with_image, without, other):
        carried = SimpleNamespace(encoder_urls=None)
        assert seam.carry(lambda _manager, _prompt, one=carried: one, None, prompt) is carried
        assert (carried.encoder_urls is None) == (prompt is without)


@pytest.mark.parametrize("waits", [True, False])
async def test_each_sample_of_a_prompt_is_announced_for_itself(seam, frontend, sglang, waits):
    """SGLang sends copies: one that fills the prefix cache, then one a sample."""
    sglang("managers.io_struct")
    seam._lays_out = None
    live = attach(seam)
    prompts = [Request("a", [b"1"]), Request("b", [b"2"])]
    seam.begin_to_encode(
        lambda _manager, obj: seam.send_encode_request(obj),
        None,
        Batch(*prompts, parallel_sample_num=2),
    )
    made = [SimpleNamespace(rid="", encoder_urls=None, need_wait_for_mm_inputs=True) for _ in "ab"]
    for prompt, one in zip(prompts, made, strict=True):
        seam.carry(lambda _manager, _prompt, one=one: one, None, prompt)
        one.need_wait_for_mm_inputs = waits  # not, where its media are encoded here
    sent = []

    async def send(_manager, one):
        told = manifest.carried(one)
        sent.append(told and manifest.read_announced(told, rundir.secret()).ticket)

    began = []
    for which, rid in ((0, "w0"), (1, "w1"), (0, "s0"), (0, "s1"), (1, "s2"), (1, "s3")):
        one = copy.copy(made[which])
        one.rid = rid
        live[rid] = SimpleNamespace(obj=copy.copy(prompts[which]))
        if rid in ("w0", "w1", "s0"):
            began.append([rid for rid, _ in frontend.started])
        await seam.send(send, None, one)
    if waits:
        assert sent == [f"ticket of {rid}" for rid in ("a", "b", "s0", "s1", "s2", "s3")]
        # The next prompt when the one before it is sent, and no sooner: all of them could take
        # the memory that the first one needs.
        assert began == [["a"], ["a", "b"], ["a", "b"]]
    else:
        assert sent == [None] * 6
        assert frontend.started == [("a", [b"1"])]


async def test_samples_of_what_could_not_be_encoded_have_its_error(seam, frontend, sglang):
    """In place of another try each: of a stream SGLang asks for them all the same."""
    sglang("managers.io_struct")
    seam._lays_out = None
    live, prompt = attach(seam), Request("a", [b"1"])
    batch, sent = Batch(prompt, parallel_sample_num=2), []
    frontend.outcomes["a"] = asyncio.get_running_loop().create_future()
    seam.begin_to_encode(lambda _manager, obj: seam.send_encode_request(obj), None, batch)

    async def send(_manager, one):
        sent.append(manifest.read(one.encoder_urls, rundir.secret()))

    for rid in ("w", "s0", "s1"):
        live[rid] = SimpleNamespace(obj=copy.copy(prompt))
        one = SimpleNamespace(rid=rid, encoder_urls=None, need_wait_for_mm_inputs=True)
        await seam.send(send, None, one)
        if rid == "w":
            frontend.outcomes["a"].set_result(UnavailableError("no encoder"))
    assert sent[1:] == [Settled("", (), "UnavailableError", "no encoder")] * 2
    assert len(frontend.started) == 1


def test_what_sglang_logs_of_a_request_has_no_manifest(sglang, seam):
    request = sglang("managers.io_struct").GenerateReqInput(text="a", image_data=[b"1"], rid="r")
    request.normalize_batch_and_arguments()
    seam.send_encode_request(request)
    manifest.hand_on(request, carried := SimpleNamespace(encoder_urls=None))
    assert manifest.read_announced(carried.encoder_urls, rundir.secret()).items == 1
    logged = sglang("utils.request_logger")._dataclass_to_string_truncated(request, 1 << 30)
    assert carried.encoder_urls[0] not in logged
    assert "encoder_urls=None" in logged


def test_a_batch_with_one_bad_prompt_starts_nothing(seam, frontend):
    with pytest.raises(ValueError, match="image 1 of 1"):
        seam.send_encode_request(Batch(Request("a", [b"1"]), Request("b", ["not base64!"])))
    assert not frontend.started


def test_each_prompt_of_a_prefill_server_has_its_room(seam, frontend):
    seam.layouts = Board()
    prompts = [
        Request("a", [b"1"], bootstrap_room=5),
        Request("b", bootstrap_room=6),
        Request("c", [b"2"], bootstrap_room=7),
        Request("d", [b"3"]),
    ]
    seam.send_encode_request(Batch(*prompts))
    assert [slot and slot.room for slot in frontend.slots] == [5, 7, None]
    assert [seam.layouts.look(room) for room in (5, 6, 7)] == [
        frontend.slots[0],
        None,
        frontend.slots[1],
    ]


def test_a_server_without_rooms_keeps_no_layouts(seam, frontend):
    seam.send_encode_request(Request(images=[b"1"], bootstrap_room=5))
    assert frontend.slots == [None]


def test_what_cannot_be_planned_has_failed_for_the_decode_server_too(seam):
    seam.layouts = Board()
    bad = Request("b", ["not base64!"], bootstrap_room=6)
    with pytest.raises(ValueError, match="image 1 of 1"):
        seam.send_encode_request(Batch(Request("a", [b"1"], bootstrap_room=5), bad))
    for room in (5, 6):
        code, message = told(seam, room)
        assert (code, "image 1 of 1" in message) == ("MediaError", True)


def test_whatever_goes_wrong_nobody_waits_for_the_rest(seam, frontend, monkeypatch):
    seam.layouts = Board()
    prompts = [Request(name, [b"1"], bootstrap_room=n) for n, name in enumerate("ab")]
    start = frontend.start

    def second_fails(rid, *args, **options):
        if rid == "b":
            raise OSError("no file descriptors are left")
        return start(rid, *args, **options)

    monkeypatch.setattr(frontend, "start", second_fails)
    with pytest.raises(OSError, match="no file descriptors"):
        seam.send_encode_request(Batch(*prompts))
    assert frontend.cancelled == ["a"]
    for room in (0, 1):
        code, message = told(seam, room)
        assert (code, "descriptors" in message) == ("EncodeError", False)


def test_media_in_lists_within_lists_are_refused(seam):
    """SGLang takes lists of any depth."""
    images = [b"1"]
    for _ in range(2000):
        images = [images]
    seam.layouts = Board()
    with pytest.raises(ValueError, match="nested too deeply"):
        seam.send_encode_request(Request("a", images, bootstrap_room=5))
    assert seam.layouts.look(5).settled


async def test_a_large_request_is_read_before_it_is_begun(
    seam, frontend, monkeypatch, hooked, sglang
):
    """Around SGLang's own `generate_request`, whose answers begin when all of it is done."""
    managers = sglang("managers.tokenizer_manager")
    large, small = [bytes(2 << 20)], [b"1"]
    begun = []

    async def generate_request(self, obj, request=None):
        begun.append(reading.find(obj.image_data[0]) is not None)
        seam.send_encode_request(obj)
        assert reading.find(obj.image_data[0]) is None  # it is planned, and nothing is kept
        for number in range(3):
            yield {"number": number, "request": request}

    monkeypatch.setattr(managers.TokenizerManager, "generate_request", generate_request)
    hooked("TokenizerManager.generate_request")
    manager = managers.TokenizerManager.__new__(managers.TokenizerManager)
    manager.mm_receiver = seam
    for images in (large, small):
        answers = manager.generate_request(Request("a", images), "http")
        assert [answer["number"] async for answer in answers] == [0, 1, 2]
    assert begun == [True, False]
    assert [len(data) for _, (data,) in frontend.started] == [2 << 20, 1]


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (ValueError("Duplicate request ID detected: a"), "MediaError"),
        (RuntimeError("broken"), "EncodeError"),
        (HTTPException(503, "Duplicate of nothing"), "UnavailableError"),
        (HTTPException(413, "too large"), "MediaError"),
        (asyncio.CancelledError(), "RequestCancelledError"),
    ],
)
async def test_a_decode_server_hears_of_what_ends_before_its_media_are_planned(seam, error, heard):
    async def generate_request(_manager, _obj):
        assert not seam.layouts.look(5).settled  # it waits
        raise error
        yield {}

    seam.layouts = Board()
    answers = seam.read_first(generate_request, None, Request("a", [b"1"], bootstrap_room=[5]))
    with pytest.raises(type(error)):
        await anext(answers)
    code, message = told(seam, 5)
    assert code == heard
    assert str(getattr(error, "detail", error)) in message or heard == "RequestCancelledError"


async def test_the_room_of_a_prompt_without_media_waits_for_nothing(seam):
    async def generate_request(_manager, _obj):
        yield {}

    seam.layouts = Board()
    answers = seam.read_first(generate_request, None, Request("a", [b"1"], bootstrap_room=[5, 6]))
    assert [answer async for answer in answers] == [{}]
    assert all(seam.layouts.look(room).settled for room in (5, 6))
    assert seam.layouts.look(5).body is None


async def test_an_earlier_try_says_nothing_of_a_later_one(seam):
    seam.layouts = Board()
    seam.refused(5, MediaError("the first"))

    async def generate_request(_manager, _obj):
        yield {}

    answers = seam.read_first(generate_request, None, Request("a", [b"1"], bootstrap_room=5))
    assert not seam.layouts.look(5).settled
    await answers.aclose()


async def test_what_a_decode_server_was_told_stays_so(seam):
    async def generate_request(_manager, _obj):
        seam.layouts.open(5, 60.0).failed(MediaForbiddenError("forbidden"))
        yield {}
        raise ValueError("later")

    seam.layouts = Board()
    answers = seam.read_first(generate_request, None, Request("a", [b"1"], bootstrap_room=5))
    with pytest.raises(ValueError, match="later"):
        assert [answer async for answer in answers]
    assert told(seam, 5) == ("MediaForbiddenError", "forbidden")


async def test_a_client_that_leaves_while_media_are_read_leaves_nothing(seam, monkeypatch):
    reading_it, begun = asyncio.Event(), []

    async def never(_entries, *, hashed):
        reading_it.set()
        await asyncio.Event().wait()

    async def generate_request(_manager, obj):
        begun.append(obj)
        yield {}

    monkeypatch.setattr(reading, "beforehand", never)
    answers = seam.read_first(generate_request, None, Request(images=[bytes(2 << 20)]))
    asking = asyncio.create_task(anext(answers))
    await reading_it.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not begun


async def test_large_media_are_read_in_a_thread_when_they_are_sent_for_again(seam, frontend):
    request = Request(images=[bytes(2 << 20)])
    attach(seam, rid=request)
    again = asyncio.create_task(seam.send_again("rid", Expect("another ticket", 1, 60.0)))
    await asyncio.sleep(0)
    assert not frontend.sent_again  # the event loop goes on meanwhile
    await again
    assert [data for _, (data,), _ in frontend.sent_again] == [request.image_data[0]]


def test_an_aborted_request_is_cancelled_until_sglang_has_answered_it(
    seam, frontend, hooked, sglang, monkeypatch
):
    """An encoder's last word may be later than the answer, and its client gone by then."""
    managers = sglang("managers.tokenizer_manager")
    monkeypatch.setattr(managers, "get_serving", lambda: SimpleNamespace(tokenizer_worker_num=1))
    hooked("TokenizerManager.abort_request")
    manager = managers.TokenizerManager.__new__(managers.TokenizerManager)
    manager.rid_to_state = {"a": SimpleNamespace(abort_sent=False)}
    manager._dispatch_to_scheduler = lambda _message: None
    manager.enable_metrics = False
    manager.mm_receiver, manager.bootstrap_server = seam, None
    manager.mm_processor = Processor()
    manager.context_len = 1000
    seam.attach(manager)
    manager.abort_request("b")
    assert frontend.cancelled == []
    manager.abort_request("a")
    assert frontend.cancelled == ["a"]


async def test_an_abort_of_all_leaves_what_waits_for_the_end_of_a_pause(
    seam, frontend, hooked, sglang, monkeypatch
):
    """SGLang serves it afterwards: it has begun with none of these."""
    managers = sglang("managers.tokenizer_manager")
    monkeypatch.setattr(managers, "get_serving", lambda: SimpleNamespace(tokenizer_worker_num=1))
    hooked("TokenizerManager.abort_request")
    hooked("TokenizerManager._tokenize_one_request")
    manager = managers.TokenizerManager.__new__(managers.TokenizerManager)
    manager._dispatch_to_scheduler = lambda _message: None
    manager.enable_metrics = False
    manager.mm_receiver, manager.bootstrap_server = seam, None
    manager.mm_processor = Processor()
    manager.context_len = 1000
    states = {"runs": True, "tokenized": False, "waits": False}
    manager.rid_to_state = {
        rid: SimpleNamespace(dispatched=dispatched, abort_sent=False)
        for rid, dispatched in states.items()
    }
    seam.attach(manager)
    frontend.started = [(rid,) for rid in (*states, "samples of it run")]
    aborted = asyncio.Event()

    async def tokenize(_manager, _prompt):
        manager.abort_request(abort_all=True)
        aborted.set()

    await seam.tokenize(tokenize, manager, Request("tokenized"))
    assert aborted.is_set()
    assert frontend.cancelled == ["runs", "tokenized", "samples of it run"]
    manager.abort_request(abort_all=True)
    assert frontend.cancelled[3:] == ["runs", "samples of it run"]


@pytest.mark.parametrize("to_tokenizer", [False, True])
def test_token_ids_of_a_prompt_are_not_told_before_it_is_laid_out(
    frontend, collector, to_tokenizer
):
    lays_out = (lambda processor: processor) if to_tokenizer else None
    seam = TokenizerSeam(frontend, collector, 60.0, lays_out=lays_out, secret=bytes(32))
    request, begun = Request(images=["1"], return_prompt_token_ids=True), []

    def original(_manager, obj):
        begun.append(obj)

    if to_tokenizer:
        seam.begin_to_encode(original, None, request)
        assert begun == [request]
    else:
        with pytest.raises(ValueError, match="token ids of a prompt with media are not returned"):
            seam.begin_to_encode(original, None, request)
        assert not begun


def test_a_request_that_sglang_refuses_after_it_was_sent_is_cancelled(
    seam, frontend, hooked, sglang
):
    """Too long a prompt, say: SGLang counts its tokens when the media are on their way."""
    managers = sglang("managers.tokenizer_manager")
    hooked("TokenizerManager._release_req_states_on_failure")
    manager = managers.TokenizerManager.__new__(managers.TokenizerManager)
    refused = SimpleNamespace(dispatched=False, obj=None, finished=False)
    answered, newer = SimpleNamespace(finished=True), SimpleNamespace()
    manager.rid_to_state = {"a": refused, "b": newer}
    manager.encoder_dispatch_ready = {}
    manager._release_lora_once = lambda _state: None
    manager.mm_receiver, manager.bootstrap_server = seam, None
    manager.mm_processor = Processor()
    manager.context_len = 1000
    seam.attach(manager)
    manager._release_req_states_on_failure({"a": refused, "b": refused, "c": answered})
    assert frontend.cancelled == ["a"], "the id of the other belongs to a newer request"


class Processor:
    """One placeholder (-1) an image, as SGLang's processors lay a prompt out."""

    def get_validated_mm_data(self, prompt, embeddings, img_grid_thw):
        if prompt.count(-1) != len(img_grid_thw):
            raise IndexError("list index out of range")
        ((modality, rows),) = embeddings.items()
        mm_items = []
        for grid in img_grid_thw:
            count = int(grid.prod())
            mm_items.append(MmItem(modality=modality, precomputed_embeddings=rows[:count]))
            rows = rows[count:]
        return SimpleNamespace(mm_items=mm_items, input_ids=prompt)


class MmItem(SimpleNamespace):
    """As SGLang's `MultimodalDataItem`."""

    def set_identity(self, identity: bytes) -> None:
        self.identity = identity


def received(value: float) -> ReceivedItem:
    layout = Layout("IMAGE", TensorSpec("float32", (2, 4)), [[1, 1, 2]])
    return ReceivedItem(bytes([int(value)]) * 32, layout, torch.full((2, 4), value))


@pytest.fixture
def adaptive(flags):
    """Whether SGLang may process media on this server."""

    def set_flag(value: bool) -> None:
        flags(disagg={"enable_adaptive_dispatch_to_encoder": value})

    set_flag(False)
    return set_flag


@pytest.fixture
def receive(seam, adaptive):
    """Call `recv_mm_data` as SGLang does."""

    def call(request, prompt=(7, -1, 8), **changes):
        arguments = {
            "request_obj": request,
            "mm_processor": Processor(),
            "prompt": list(prompt),
            "need_wait_for_mm_inputs": True,
        }
        return seam.recv_mm_data(**{**arguments, **changes})

    return call


async def test_a_prompts_inputs_are_made_of_what_was_received(receive, frontend, collector, sglang):
    collector.items = [received(1.0), received(2.0)]
    inputs = await receive(Request(images=[b"1", b"2"]), [-1, 7, -1])
    assert frontend.started == [("rid", [b"1", b"2"])]
    assert collector.expected == [Expect("ticket of rid", 2, 60.0)]
    image = sglang("managers.schedule_batch").Modality.IMAGE
    assert [item.modality for item in inputs.mm_items] == [image, image]
    for mm_item, item in zip(inputs.mm_items, collector.items, strict=True):
        assert mm_item.precomputed_embeddings.data_ptr() == item.embedding.data_ptr()
        assert mm_item.identity == item.key


async def test_what_has_been_sent_holds_no_receive_memory(receive, seam, collector):
    """SGLang keeps the prompt until its answer has ended."""
    attach(seam)
    seam._lays_out = lambda processor: processor
    collector.items = [received(1.0)]
    one = SimpleNamespace(rid="rid", mm_inputs=await receive(Request(images=[b"1"]), [-1]))
    sent = []

    async def send(_manager, tokenized):
        (mm_item,) = tokenized.mm_inputs.mm_items
        sent.append(mm_item.precomputed_embeddings is not None)

    for _ in "ab":
        await seam.send(send, None, one)
    assert sent == [True, False]


async def test_what_has_no_media_is_sent_as_it_is(seam):
    attach(seam)
    seam._lays_out = lambda processor: processor
    await seam.send(lambda *_: asyncio.sleep(0), None, SimpleNamespace(rid="r", mm_inputs=None))


async def test_a_prompt_that_is_sampled_holds_no_receive_memory(receive, seam, collector):
    """Its samples come when all prompts beside it are in the prefix cache."""
    collector.items = [received(1.0)]
    sampled = Request(images=[b"1"], sampling_params={"n": 2})
    (mm_item,) = (await receive(sampled, [-1])).mm_items
    assert torch.equal(mm_item.precomputed_embeddings, collector.items[0].embedding)
    assert mm_item.precomputed_embeddings.data_ptr() != collector.items[0].embedding.data_ptr()


@pytest.mark.parametrize(
    ("may_be_local", "wait", "encoded"),
    [
        *((False, wait, True) for wait in (True, False, None)),
        *((True, wait, wait is not False) for wait in (True, False, None)),
    ],
)
async def test_which_prompts_are_encoded(
    receive, frontend, collector, adaptive, may_be_local, wait, encoded
):
    """Those of a batch too, to which SGLang does not copy the flag: they would reach a tower
    that is not there. A user may have written one. Prompts without media are SGLang's."""
    adaptive(may_be_local)
    collector.items = [received(1.0)]
    made = await receive(Request(images=[b"1"]), need_wait_for_mm_inputs=wait)
    assert (made is not None) is bool(frontend.started) is encoded
    frontend.started.clear()
    assert await receive(Request(), need_wait_for_mm_inputs=wait) is None
    assert not frontend.started


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (MediaError, 400),
        (MediaForbiddenError, 403),
        (MediaTooLargeError, 413),
        (DeadlineError, 504),
        (UnavailableError, 503),
        (RequestCancelledError, 400),
        (EpdError, 500),
    ],
)
async def test_an_error_is_answered_with_its_status(receive, collector, kind, status):
    collector.error = kind("what went wrong")
    with pytest.raises(HTTPException) as raised:
        await receive(Request(images=[b"1"]))
    assert (raised.value.status_code, raised.value.detail) == (status, "what went wrong")


@pytest.mark.parametrize("path", [None, "/generate", "/v1/chat/completions"])
async def test_an_error_has_its_status_in_streams_too(receive, collector, monkeypatch, path):
    """SGLang has begun the answer of a stream of /generate, and tells only a ValueError in it."""
    http = None if path is None else SimpleNamespace(url=SimpleNamespace(path=path))
    monkeypatch.setattr("sglang_epd.seams.requests.client", lambda: http)
    collector.error = MediaForbiddenError("what went wrong")
    kind = HTTPException if path == "/v1/chat/completions" else StreamError
    with pytest.raises(kind, match="what went wrong") as raised:
        await receive(Request(images=[b"1"], stream=True))
    assert raised.value.status_code == 403


async def test_the_tokenizers_items_have_rooms_too(receive, seam, frontend, collector):
    seam.layouts = Board()
    collector.items = [received(1.0)]
    await receive(Request(images=[b"1"], bootstrap_room=5))
    assert frontend.slots == [seam.layouts.look(5)]
    with pytest.raises(HTTPException):
        await receive(Request(images=["not base64!"], bootstrap_room=6))
    assert told(seam, 6)[0] == "MediaError"


async def test_a_prompt_that_does_not_match_its_media_is_the_users_fault(receive, collector):
    collector.items = [received(1.0)]
    with pytest.raises(HTTPException, match="placeholders do not match") as raised:
        await receive(Request(images=[b"1"]), [-1, -1])
    assert raised.value.status_code == 400


async def test_it_can_be_cancelled_while_it_waits(receive, frontend, collector):
    collector.ready.clear()
    receiving = asyncio.create_task(receive(Request(images=[b"1"])))
    await asyncio.sleep(0)
    assert collector.expected
    assert not frontend.cancelled
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert frontend.cancelled == ["rid"]


@pytest.fixture
def counted():
    """Nothing dies but by its last reference."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", [IndexError, MediaError])
async def test_an_error_keeps_no_item_alive(receive, collector, counted, monkeypatch, kind):
    """Neither by its own trace nor by that of its cause, for as long as SGLang keeps it."""

    def refuse(*_arguments, **_grids):
        raise kind("no")

    monkeypatch.setattr(Processor, "get_validated_mm_data", refuse)
    collector.items = [received(1.0)]
    embedding = weakref.ref(collector.items[0].embedding)
    with pytest.raises(HTTPException) as raised:
        await receive(Request(images=[b"1"]))
    assert raised.value.__traceback__
    collector.items = []
    assert embedding() is None


@pytest.mark.parametrize(
    ("status", "finished", "told"),
    [
        # Refused before its first token.
        *((status, {}, (400, False)) for status in (400, 403, 413, 415)),
        # Any other stream ends as SGLang ends it.
        (500, {}, (500, True)),
        (None, {}, (None, True)),
        (400, {"completion_tokens": 3}, (400, True)),
        (400, {"waited": None}, (400, True)),
        (413, {"is_stream": False}, (413, False)),
    ],
)
async def test_a_stream_refused_before_its_first_token_is_an_http_error(
    seam, status, finished, told
):
    given = {"is_stream": True, "completion_tokens": 0, "waited": True, **finished}
    seen = []

    async def original(manager, out, state, is_stream):
        seen.append((manager, out["meta_info"]["finish_reason"].get("status_code"), is_stream))
        return "answer"

    reason = {"type": "abort"} | ({} if status is None else {"status_code": status})
    meta = {"finish_reason": reason, "completion_tokens": given["completion_tokens"]}
    state = SimpleNamespace(obj=SimpleNamespace(need_wait_for_mm_inputs=given["waited"]))
    answered = await seam.answer_before_streaming(
        original, "manager", {"meta_info": meta}, state, given["is_stream"]
    )
    assert (answered, seen) == ("answer", [("manager", *told)])


async def test_the_tokenizer_says_how_late_its_event_loop_is(sglang, hooked, frontend, collector):
    hooked("TokenizerManager.auto_create_handle_loop")
    lags: list[float] = []
    kind = sglang("managers.tokenizer_manager").TokenizerManager
    manager = kind.__new__(kind)
    manager.event_loop = asyncio.get_running_loop()
    manager.mm_receiver = TokenizerSeam(frontend, collector, 60.0, observe_lag=lags.append)
    for _ in range(2):  # as at each request
        manager.auto_create_handle_loop()
    await asyncio.sleep(0.15)
    time.sleep(0.5)  # noqa: ASYNC251 - this is what is measured
    await until(lambda: max(lags, default=0.0) >= 0.3)
    manager.mm_receiver.lag.stop()


@pytest.mark.parametrize("tells", [True, False])
async def test_answers_say_where_media_came_from_unless_they_are_not_to(tells, collector):
    async def answers(_manager, _obj):
        yield {"meta_info": {}}

    frontend = SimpleNamespace(account={"rid": {"computed": 1}}.get)
    seam = TokenizerSeam(frontend, collector, 60.0, tells_sources=tells)
    (answer,) = [one async for one in seam.attend(answers, None, Request(images=[b"1"]))]
    assert answer["meta_info"] == ({"media_sources": {"computed": 1}} if tells else {})
