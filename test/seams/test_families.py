"""Families with SGLang's own classes: names in prompts, decoders, InternVL's prompts."""

from __future__ import annotations

import re
from array import array
from types import SimpleNamespace

import pytest
import torch

from families.conftest import Processor
from sglang_epd.errors import ConfigError, MediaError
from sglang_epd.families import Family, family_of
from sglang_epd.families.expansion import Expansion, Part
from sglang_epd.families.films import drawn
from sglang_epd.families.proof import adapt, prove_names
from sglang_epd.modality import IMAGE, VIDEO
from sglang_epd.seams.vision_weights import ReleasedTower

ARCHITECTURE = "SomeForConditionalGeneration"


@pytest.fixture
def adapter(sglang, monkeypatch):
    """Of a processor whose outputs are SGLang's own."""
    module = sglang("managers.schedule_batch")
    adapter = adapt(Processor(), ARCHITECTURE, Family())
    process = adapter.process

    def with_theirs(*arguments):
        made = process(*arguments)
        items = [
            module.MultimodalDataItem(
                modality=module.Modality[item.modality.name],
                offsets=item.offsets,
                feature=item.feature,
                model_specific_data=item.model_specific_data,
            )
            for item in made.mm_items
        ]
        return module.MultimodalProcessorOutput(mm_items=items, input_ids=list(made.input_ids))

    monkeypatch.setattr(adapter, "process", with_theirs)
    return adapter


def fill_in(ids, inputs):
    """As most of SGLang's models do it."""
    filled = list(ids)
    for item in inputs.mm_items:
        for first, last in item.offsets:
            filled[first : last + 1] = item.padding_sequence(last - first + 1)
    return array("q", filled)


def test_a_model_that_goes_by_places_is_served(adapter):
    prove_names(SimpleNamespace(pad_input_ids=fill_in), adapter, ARCHITECTURE)
    prove_names(SimpleNamespace(), adapter, ARCHITECTURE)


def of_pixels(_ids, inputs):
    return [item.image_sizes for item in inputs.mm_items]


def elsewhere(ids, inputs):
    """Only where the pixels are not known."""
    filled = fill_in(ids, inputs)
    return filled if inputs.mm_items[0].feature is not None else filled[::-1]


def by_order(ids, inputs):
    """One item's name at another's place."""
    items = inputs.mm_items
    names = [SimpleNamespace(offsets=[], padding_sequence=item.padding_sequence) for item in items]
    for name, item in zip(names, reversed(items), strict=True):
        name.offsets = item.offsets
    return fill_in(ids, SimpleNamespace(mm_items=names))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (of_pixels, "image_sizes"),
        (elsewhere, "elsewhere than one server"),
        (by_order, "the name of another"),
    ],
)
def test_a_model_that_does_not_is_refused(adapter, function, reason):
    with pytest.raises(ConfigError, match=f"{ARCHITECTURE} cannot.*{reason}"):
        prove_names(SimpleNamespace(pad_input_ids=function), adapter, ARCHITECTURE)


def test_a_video_before_pictures_is_named_as_well(adapter):
    seen = []

    def remember(ids, inputs):
        seen.append([item.modality.name for item in inputs.mm_items])
        return fill_in(ids, inputs)

    prove_names(SimpleNamespace(pad_input_ids=remember), adapter, ARCHITECTURE)
    # Ours in the order of the prompt, one server's as its processor has them.
    assert seen == [["VIDEO", "IMAGE", "IMAGE"], ["IMAGE", "IMAGE", "VIDEO"]]


def test_what_a_tower_says_of_prompts_stays():
    class Tower(torch.nn.Linear):
        def pad_input_ids(self, ids, inputs):
            return fill_in(ids, inputs)

    released = ReleasedTower(Tower(4, 4))
    item = SimpleNamespace(offsets=[(1, 2)], padding_sequence=lambda length: [7] * length)
    inputs = SimpleNamespace(mm_items=[item])
    assert released.pad_input_ids([0, 1, 2, 3], inputs).tolist() == [0, 7, 7, 3]
    assert not list(released.parameters())
    assert not hasattr(ReleasedTower(torch.nn.Linear(4, 4)), "pad_input_ids")


def test_sglang_hands_them_on_as_they_are(sglang):
    film = drawn(3, 28, 56, 2.0)
    assert sglang("utils").load_video(film) is film


def test_drawn_frames_are_shown_again_after_they_are_closed():
    film = drawn(5, 28, 56, 2.5)
    film.close()
    assert (len(film), film.avg_fps, film.frame_shape) == (5, 2.5, (56, 28))
    assert film.get_frames_at([4, 0]).shape == film.get_frames_as_tensor([1, 1]).shape
    assert film[2].shape == (56, 28, 3)


FAMILY = family_of("InternVLChatModel")
TILE = 64
ROOM = 8192


@pytest.fixture
def processor(sglang):
    cls = sglang("multimodal.processors.internvl").InternVLProcessor
    processor = object.__new__(cls)
    processor.video_token_id = 7
    processor.llm_arch = "Qwen2ForCausalLM"
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
