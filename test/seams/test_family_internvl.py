"""InternVL, with the methods of SGLang's own processor."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from sglang_epd.errors import MediaError
from sglang_epd.families import family_of
from sglang_epd.families.expansion import Expansion, Part
from sglang_epd.modality import IMAGE, VIDEO

FAMILY = family_of("InternVLChatModel")
TILE = 64
ROOM = 8192


@pytest.fixture
def processor(sglang):
    cls = sglang("multimodal.processors.internvl").InternVLProcessor
    processor = object.__new__(cls)
    processor.video_token_id = 7
    processor.VIDEO_CONTEXT_TOKEN = "<|video_pad|>"
    processor.num_image_token = TILE
    processor.max_context_len = ROOM
    processor.mm_tokens = SimpleNamespace(
        image_token=cls.IMAGE_PLACEHOLDER_TOKEN,
        image_token_regex=re.compile("<image>"),
        video_token=cls.VIDEO_PLACEHOLDER_TOKEN,
        video_token_regex=re.compile("<video>"),
    )
    processor._token_len = len
    return processor


def film(frames: int = 32) -> Part:
    return Part(VIDEO, Expansion("", 7, [TILE] * frames))


def picture(tiles: int) -> Part:
    return Part(IMAGE, Expansion("", 6, [TILE * tiles]))


def test_marks_that_are_missing_stand_before_the_assistants_turn(processor):
    completed = FAMILY.complete(processor, "a<|im_start|>assistant", [picture(1), film()])
    # One server puts in those of pictures first.
    assert completed == "a\n<image>\n\n<video>\n<|im_start|>assistant"
    assert FAMILY.complete(processor, "<video>x", [film()]) == "<video>x"


def test_a_video_has_the_frames_that_there_is_room_for(processor):
    fits = [film(), film(), film()]
    FAMILY.complete(processor, "<video>" * 3, fits)
    frames = 32 * TILE
    # What SGLang keeps for the answer is 256.
    longest = ROOM - 256 - frames - len("<video>")
    FAMILY.complete(processor, "<video>" + "a" * longest, [film()])
    for prompt, parts in (
        ("<video>" + "a" * (longest + 1), [film()]),
        ("<video>" * 4, [film()] * 4),
        ("<image>" * 8 + "<video>" * 2, [*[picture(10)] * 8, film(), film()]),
        # The encoder had less room than this server.
        ("<video>", [film(20)]),
    ):
        with pytest.raises(MediaError, match=r"leaves room for \d+ frames"):
            FAMILY.complete(processor, prompt, parts)


def test_more_marks_than_videos_are_left_to_whoever_counts_them(processor):
    assert FAMILY.complete(processor, "<video><video>", [film()]) == "<video><video>"


def test_language_models_without_a_placeholder_for_videos_have_none(processor):
    processor.video_token_id = None
    assert FAMILY.mark(processor, VIDEO) is None
    assert FAMILY.mark(processor, IMAGE) == "<image>"
