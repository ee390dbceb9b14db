from __future__ import annotations

import asyncio
import contextvars
import time
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from PIL import Image
from prometheus_client import CollectorRegistry

from sglang_epd.dispatch.pool import Health, Snapshot, View
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    MediaError,
    NamespaceError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from sglang_epd.language import manifest, planner
from sglang_epd.language.local_images import LocalImage
from sglang_epd.observability.language import DecisionMetrics
from sglang_epd.seams import adaptive, requests
from sglang_epd.seams.adaptive import Adaptive

URL = "http://encoder:1"
TIMEOUT_S = 10.0


class Prompt(SimpleNamespace):
    """Shaped as SGLang's `GenerateReqInput`."""

    def __init__(self, rid="rid", images=("1",), **changes) -> None:
        values = {
            "rid": rid,
            "image_data": [image.encode() for image in images],
            "video_data": None,
            "audio_data": None,
            "is_single": True,
            "need_wait_for_mm_inputs": None,
            "encoder_urls": None,
            "stream": False,
            "background": False,
        }
        super().__init__(**{**values, **changes})

    def contains_mm_input(self) -> bool:
        return bool(self.image_data or self.video_data or self.audio_data)


class Batch(Prompt):
    def __init__(self, *prompts, samples: int = 1) -> None:
        rids = [prompt.rid for prompt in prompts]
        rids += [f"{rid}-{sample}" for rid in rids for sample in range(1, samples)]
        super().__init__(rid=rids, is_single=False, batch_size=len(prompts))
        self.prompts = prompts

    def __getitem__(self, index):
        return self.prompts[index]


class FakeFrontend:
    def __init__(self) -> None:
        self.live: dict[str, asyncio.Future] = {}
        self.cancelled: list[str] = []
        self.here = 0

    def encoded_here(self, rid: str, items: int) -> None:
        self.here += items

    def cancel(self, rid: str) -> None:
        self.cancelled.append(rid)
        gone = RequestCancelledError("the request was cancelled")
        asyncio.get_running_loop().call_soon(self.end, rid, gone)

    def underway(self, rid: str) -> asyncio.Future | None:
        return self.live.get(rid)

    def end(self, rid: str, error: Exception | None) -> None:
        if rid in self.live:
            self.live.pop(rid).set_result(error)


class FakeImages:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.read_items: list = []
        self.deadline = 0.0

    async def read(self, items, deadline):
        self.deadline = deadline
        self.read_items.append([item.data for item in items])
        if self.error is not None:
            raise self.error
        picture = Image.new("RGB", (28, 28))
        return [LocalImage(picture, bytes([item.item]) * 32) for item in items]


class Item(SimpleNamespace):
    def set_identity(self, identity: bytes) -> None:
        self.identity = identity


class Manager:
    """SGLang's own methods, as far as they are hooked."""

    def __init__(self, seam: Adaptive, frontend: FakeFrontend) -> None:
        self.seam = seam
        self.frontend = frontend
        self.places = 1
        self.tokenized: list[Prompt] = []
        self.rid_to_state: dict[str, SimpleNamespace] = {}
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.to_scheduler = True

    def dispatch(self, obj) -> None:
        def original(_manager, obj):
            if self.seam.should_dispatch(None, self, obj):
                for prompt in adaptive._prompts(obj):
                    if prompt.contains_mm_input() and self.to_scheduler:
                        prompt.need_wait_for_mm_inputs = True
                        manifest.attach(prompt, ["a manifest"])
                        ended = asyncio.get_running_loop().create_future()
                        self.frontend.live[prompt.rid] = ended

        self.seam.handle(original, self, obj)

    async def tokenize(self, prompt):
        async def original(_manager, prompt):
            await self.gate.wait()
            self.tokenized.append(prompt)
            # Only where SGLang would wait for encoders itself.
            if self.error is not None and prompt.need_wait_for_mm_inputs is not False:
                raise self.error
            mm_items = []
            if prompt.need_wait_for_mm_inputs is False:
                places = prompt.image_data[: self.places]
                image = SimpleNamespace(name="IMAGE")
                mm_items = [Item(modality=image, offsets=[(0, 1)]) for _ in places]
            output = SimpleNamespace(mm_items=mm_items, padded_input_ids=[1, 2])
            return SimpleNamespace(mm_inputs=output, prompt=prompt)

        return await self.seam.tokenize(original, self, prompt)


class Http:
    gone = False

    async def is_disconnected(self) -> bool:
        return self.gone


@pytest.fixture
def views():
    return [View(URL, Health.READY, rate=1e6)]


@pytest.fixture
async def build(views, monkeypatch):
    monkeypatch.setattr(adaptive, "_LOOK_S", 0.01)
    monkeypatch.setattr(adaptive, "_current", contextvars.ContextVar("test", default=None))
    monkeypatch.setattr(requests, "_http", contextvars.ContextVar("test", default=None))

    def run(min_items=1, plan=planner.plan):
        frontend, images = FakeFrontend(), FakeImages()
        registry = CollectorRegistry()
        seam = Adaptive(
            frontend=frontend,
            images=images,
            snapshot=lambda: Snapshot(tuple(views)),
            min_items=min_items,
            metrics=DecisionMetrics(registry),
            timeout_s=TIMEOUT_S,
            plan=plan,
        )
        manager = Manager(seam, frontend)
        manager.images = images

        def counted() -> dict[tuple[str, str], int]:
            return {
                (sample.labels["where"], sample.labels["why"]): int(sample.value)
                for metric in registry.collect()
                for sample in metric.samples
                if sample.name.endswith("_total")
            }

        manager.counted = counted
        return manager

    return run


async def test_what_stays_is_read_here_and_has_an_encoders_keys(build):
    manager = build(min_items=3)
    manager.places = 2
    prompt = Prompt(images=["10", "20"])
    manager.dispatch(prompt)
    assert prompt.need_wait_for_mm_inputs is False
    tokenized = await manager.tokenize(prompt)
    assert manager.images.read_items == [[b"10", b"20"]]
    assert all(isinstance(image, Image.Image) for image in prompt.image_data)
    keys = [item.identity for item in tokenized.mm_inputs.mm_items]
    assert keys == [bytes(32), bytes([1]) * 32]
    assert tokenized.mm_inputs.padded_input_ids is None, "a prompt of the old names"
    assert manager.counted() == {("local", "few"): 1}


async def test_a_picture_that_stays_keeps_the_option_that_a_model_follows(build):
    from sglang.srt.utils import ImageData

    manager = build(min_items=3)
    manager.places = 2
    prompt = Prompt(images=["10", "20"])
    prompt.image_data[0] = ImageData(prompt.image_data[0], max_long_side_pixel=224)
    manager.dispatch(prompt)
    await manager.tokenize(prompt)
    kept, plain = prompt.image_data
    assert (kept.max_long_side_pixel, kept.url.size) == (224, plain.size)


async def test_options_that_no_encoder_follows_are_refused_here_too(build):
    def refuse(_prompt):
        raise MediaError("takes no such options")

    manager = build(plan=refuse)
    with pytest.raises(ValueError, match="takes no such options"):
        manager.dispatch(Prompt(images=["10"]))


async def test_a_batch_goes_one_way(build):
    manager = build(min_items=3)
    prompts = [Prompt("a", ["10"]), Prompt("b", []), Prompt("c", ["20"])]
    manager.dispatch(Batch(*prompts))
    # SGLang copies the batch's own to none of them.
    assert [prompt.need_wait_for_mm_inputs for prompt in prompts] == [False, None, False]
    await asyncio.gather(*(manager.tokenize(prompt) for prompt in prompts))
    assert sorted(manager.images.read_items) == [[b"10"], [b"20"]]
    assert manager.counted() == {("local", "few"): 2}
    prompts = [Prompt("a", ["10"]), Prompt("b", []), Prompt("c", ["20", "30"])]
    manager.dispatch(Batch(*prompts))
    assert [prompt.need_wait_for_mm_inputs for prompt in prompts] == [True, None, True]
    for rid in "ac":
        manager.frontend.end(rid, None)
    await asyncio.gather(*(manager.tokenize(prompt) for prompt in prompts))


async def test_no_prompt_of_a_batch_waits_where_others_are_behind_it(build):
    """Those would not be claimed meanwhile, and could hold the memory that it waits for."""
    manager = build(min_items=1)
    prompts = [Prompt("a", ["10"]), Prompt("b", ["20"])]
    manager.dispatch(Batch(*prompts))
    tokenized = [await asyncio.wait_for(manager.tokenize(prompt), 5) for prompt in prompts]
    assert [one.prompt.need_wait_for_mm_inputs for one in tokenized] == [True, True]
    assert not manager.images.read_items


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/chat/completions", HTTPException), ("/generate", requests.StreamError)]
)
async def test_a_fault_of_this_server_is_told_as_such_in_streams_too(build, path, kind):
    manager = build(min_items=3)
    manager.images.error = OverloadedError("too much is being decoded")
    requests._http.set(SimpleNamespace(url=SimpleNamespace(path=path)))
    prompt = Prompt(images=["10"], stream=True)
    manager.dispatch(prompt)
    with pytest.raises(kind) as raised:
        await manager.tokenize(prompt)
    assert raised.value.status_code == 503


@pytest.mark.parametrize("media", [{"video_data": [b"9"]}, {"audio_data": [b"9"]}])
async def test_videos_and_sounds_always_go_to_encoders(build, views, media):
    views.clear()
    manager = build(min_items=9)
    prompt = Prompt(images=["1"], **media)
    manager.dispatch(prompt)
    assert prompt.need_wait_for_mm_inputs is True
    failure = UnavailableError("no encoder is known to this server")
    asyncio.get_running_loop().call_later(0.1, manager.frontend.end, "rid", failure)
    # The scheduler knows of the failure, and ends the request.
    assert (await manager.tokenize(prompt)).prompt.need_wait_for_mm_inputs is True
    assert manager.counted() == {("remote", "no_tower"): 1}
    assert not manager.images.read_items


async def test_a_turn_of_a_session_goes_to_encoders_and_is_not_taken_back(build, views):
    """SGLang has the items of all turns in one request."""
    views.clear()
    manager = build(min_items=9)
    prompt = Prompt(images=["1"], session_params={"id": "session"})
    manager.dispatch(prompt)
    asyncio.get_running_loop().call_later(0.1, manager.frontend.end, "rid", UnavailableError("x"))
    assert (await manager.tokenize(prompt)).prompt.need_wait_for_mm_inputs is True
    assert manager.counted() == {("remote", "session"): 1}
    assert not manager.images.read_items


@pytest.mark.parametrize("error", [UnavailableError, OverloadedError, NamespaceError])
async def test_what_no_encoder_took_is_encoded_here(build, error):
    manager = build()
    prompt = Prompt(images=["1000"])
    manager.dispatch(prompt)
    manager.frontend.end("rid", error("nobody took it"))
    sent = time.monotonic()
    tokenized = await manager.tokenize(prompt)
    assert manager.images.deadline <= sent + TIMEOUT_S, "there is one deadline"
    assert tokenized.prompt.need_wait_for_mm_inputs is False
    manifest.hand_on(prompt, request := SimpleNamespace(encoder_urls=None))
    assert request.encoder_urls is None
    assert tokenized.mm_inputs.mm_items[0].identity == bytes(32)
    assert manager.counted() == {("remote", "items"): 1, ("local", "failed"): 1}


@pytest.mark.parametrize("error", [EncodeError, MediaError, DeadlineError])
async def test_what_encoders_failed_at_is_not_tried_here(build, error):
    """It might be the end of this server as well, or is the user's own fault."""
    manager = build()
    prompt = Prompt(images=["1000"])
    manager.dispatch(prompt)
    manager.frontend.end("rid", error("no"))
    assert (await manager.tokenize(prompt)).prompt.need_wait_for_mm_inputs is True
    assert not manager.images.read_items


@pytest.mark.parametrize(("status", "here"), [(503, True), (500, False), (403, False)])
async def test_the_tokenizers_backend_falls_back_by_status(build, status, here):
    manager = build()
    manager.to_scheduler = False
    manager.error = HTTPException(status, "no encoder")
    prompt = Prompt(images=["1000"])
    manager.dispatch(prompt)
    if here:
        assert (await manager.tokenize(prompt)).prompt.need_wait_for_mm_inputs is False
    else:
        with pytest.raises(HTTPException):
            await manager.tokenize(prompt)
    assert manager.counted().get(("local", "failed"), 0) == here


@pytest.mark.parametrize("to_scheduler", [True, False])
async def test_a_request_whose_encoders_are_gone_does_not_wait(build, views, to_scheduler):
    manager = build()
    manager.to_scheduler = to_scheduler
    prompt = Prompt(images=["1000"])
    manager.dispatch(prompt)
    if not to_scheduler:
        manager.gate.clear()
        asyncio.get_running_loop().call_later(0.1, manager.gate.set)
    views[0] = View(URL, Health.SUSPECT)
    async with asyncio.timeout(5):
        tokenized = await manager.tokenize(prompt)
    assert tokenized.prompt.need_wait_for_mm_inputs is False
    assert manager.frontend.cancelled == ["rid"]
    assert manager.counted()["local", "failed"] == 1


async def test_one_moment_without_an_encoder_changes_nothing(build, views, monkeypatch):
    monkeypatch.setattr(adaptive, "_LOOKS_WITHOUT", 1000)
    manager = build()
    prompt = Prompt(images=["1000"])
    manager.dispatch(prompt)
    views[0] = View(URL, Health.SUSPECT)
    asyncio.get_running_loop().call_later(0.1, manager.frontend.end, "rid", None)
    assert (await manager.tokenize(prompt)).prompt.need_wait_for_mm_inputs is True
    assert not manager.frontend.cancelled


async def test_a_client_that_leaves_meanwhile_is_noticed(build):
    manager = build()
    prompt = Prompt(images=["1000"])
    http = Http()
    requests.noted(None, None, prompt, http)
    # The copies that SGLang makes of a sampled request come without it.
    requests.noted(None, None, prompt)
    manager.dispatch(prompt)
    asyncio.get_running_loop().call_later(0.05, setattr, http, "gone", True)
    with pytest.raises(ValueError, match="left"):
        await manager.tokenize(prompt)
    assert manager.frontend.cancelled == ["rid"]


async def test_it_can_be_cancelled_while_it_waits(build):
    manager = build()
    prompt = Prompt(images=["1000"])
    manager.dispatch(prompt)
    waiting = asyncio.create_task(manager.tokenize(prompt))
    await asyncio.sleep(0.03)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert manager.frontend.cancelled == ["rid"]


async def test_a_prompt_with_fewer_placeholders_is_the_users_fault(build):
    """SGLang would answer as if the image were not there."""
    manager = build(min_items=2)
    manager.places = 0
    prompt = Prompt()
    manager.dispatch(prompt)
    with pytest.raises(ValueError, match="placeholders do not match"):
        await manager.tokenize(prompt)


async def test_a_change_is_logged_once(build, views, caplog):
    manager = build()
    caplog.set_level("INFO")
    ready = list(views)
    for state in (ready, [], ready):
        views[:] = state
        for _ in range(3):
            manager.dispatch(Prompt(images=["1000"]))
    said = [record.message for record in caplog.records]
    remote, local = "Encoding of media: remote (items)", "Encoding of media: local (no_encoder)"
    assert said == [remote, local, remote]


def live(first_token_time: float) -> SimpleNamespace:
    """SGLang's state of a request."""
    return SimpleNamespace(time_stats=SimpleNamespace(first_token_time=first_token_time))


@pytest.mark.parametrize(
    ("states", "decided"),
    [
        ({}, ("local", "few")),
        ({"rid": live(0)}, ("local", "few")),
        ({"rid": live(0), "decodes": live(12.5)}, ("local", "few")),
        ({"rid": live(0), "waits": live(0)}, ("remote", "load")),
    ],
)
async def test_few_images_stay_while_no_other_request_waits(build, states, decided):
    manager = build(min_items=2)
    manager.rid_to_state = states
    manager.dispatch(Prompt())
    assert manager.counted() == {decided: 1}


async def test_samples_and_prompts_of_one_request_are_no_others(build):
    manager = build(min_items=3)
    batch = Batch(Prompt("a"), Prompt("b"), samples=2)
    manager.rid_to_state = {rid: live(0) for rid in batch.rid}
    manager.dispatch(batch)
    assert manager.counted() == {("local", "few"): 2}


@pytest.mark.parametrize(
    ("encoders", "decided"),
    [
        ([], ("local", "no_encoder")),
        ([Health.SUSPECT], ("local", "no_encoder")),
        (["full"], ("local", "busy")),
        (["full", Health.READY], ("remote", "items")),
        (["full", Health.JOINING], ("local", "busy")),
    ],
)
async def test_what_encoders_cannot_take_now_stays(build, views, encoders, decided):
    views[:] = [
        View(f"http://e{index}:1", Health.READY if state == "full" else state, busy=state == "full")
        for index, state in enumerate(encoders)
    ]
    manager = build()
    manager.rid_to_state = {"another": live(0)}
    manager.dispatch(Prompt())
    assert manager.counted() == {decided: 1}
