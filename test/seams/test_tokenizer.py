from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_epd.language import manifest
from sglang_epd.seams.tokenizer import (
    TokenizerSeam,
    _answer_before_streaming,
    _cancel_at_encoders,
)
from sglang_epd.wire import Expect


class FakeFrontend:
    def __init__(self) -> None:
        self.started: list[tuple] = []
        self.cancelled: list[str] = []

    def start(self, rid, items, consumers) -> Expect:
        self.started.append((rid, [item.data for item in items], consumers))
        return Expect(f"ticket of {rid}", len(items), consumers, 60.0)

    def cancel(self, rid) -> None:
        self.cancelled.append(rid)


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
def seam(frontend):
    return TokenizerSeam(frontend)


def test_a_request_carries_its_manifest_to_the_scheduler(seam, frontend):
    request = Request(images=[b"1", b"2"])
    assert seam.send_encode_request(request) is None
    assert frontend.started == [("rid", [b"1", b"2"], 1)]
    assert request.need_wait_for_mm_inputs is True
    assert manifest.read(request.encoder_urls) == Expect("ticket of rid", 2, 1, 60.0)


def test_each_sample_and_the_warm_up_wait_for_the_items(seam, frontend):
    seam.send_encode_request(Request(images=[b"1"], parallel_sample_num=3))
    assert frontend.started[0][2] == 4


def test_each_prompt_of_a_batch_is_a_request(seam, frontend):
    with_image, without, other = Request("a", [b"1"]), Request("b"), Request("c", [b"2"])
    seam.send_encode_request(Batch(with_image, without, other))
    assert [(rid, data) for rid, data, _ in frontend.started] == [("a", [b"1"]), ("c", [b"2"])]
    assert without.need_wait_for_mm_inputs is None
    assert without.encoder_urls is None


def test_a_batch_with_one_bad_prompt_starts_nothing(seam, frontend):
    with pytest.raises(ValueError, match="image 1 of 1"):
        seam.send_encode_request(Batch(Request("a", [b"1"]), Request("b", ["not base64!"])))
    assert not frontend.started


def test_an_aborted_request_is_cancelled_at_the_encoders(frontend):
    manager = SimpleNamespace(mm_receiver=SimpleNamespace(frontend=frontend))
    _cancel_at_encoders(None, manager, "rid")
    _cancel_at_encoders(None, manager, rid="rid2")
    _cancel_at_encoders(None, manager, "")
    assert frontend.cancelled == ["rid", "rid2"]


@pytest.fixture
def finish():
    """Call the hook on one finished request; gives what the original method was called with."""

    async def call(status, *, is_stream=True, completion_tokens=0, waited=True):
        seen = []

        async def original(manager, out, state, is_stream):
            seen.append((manager, out["meta_info"]["finish_reason"].get("status_code"), is_stream))
            return "answer"

        reason = {"type": "abort"} if status is None else {"type": "abort", "status_code": status}
        out = {"meta_info": {"finish_reason": reason, "completion_tokens": completion_tokens}}
        state = SimpleNamespace(obj=SimpleNamespace(need_wait_for_mm_inputs=waited))
        assert await _answer_before_streaming(original, "manager", out, state, is_stream) == (
            "answer"
        )
        return seen

    return call


@pytest.mark.parametrize("status", [400, 403, 413, 415])
async def test_a_stream_refused_before_its_first_token_is_an_http_error(finish, status):
    assert await finish(status) == [("manager", 400, False)]


@pytest.mark.parametrize(
    "finished",
    [
        {"status": 500},
        {"status": None},
        {"status": 400, "completion_tokens": 3},
        {"status": 400, "waited": None},
    ],
)
async def test_any_other_stream_ends_as_sglang_ends_it(finish, finished):
    assert await finish(**finished) == [("manager", finished["status"], True)]


async def test_a_request_that_is_not_streamed_is_left_alone(finish):
    assert await finish(413, is_stream=False) == [("manager", 413, False)]
