from __future__ import annotations

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_epd.device import Host
from sglang_epd.errors import MediaError
from sglang_epd.families import adapter
from sglang_epd.families.adapter import load_processor
from sglang_epd.seams import prompt
from sglang_epd.seams.prompt import (
    _expand,
    _token_ids,
    as_tokenized,
    lays_out,
    robust_placeholders,
)

IMAGE, VIDEO, AUDIO = 101, 102, 103
NAMES = {
    token: SimpleNamespace(name=name)
    for token, name in ((IMAGE, "IMAGE"), (VIDEO, "VIDEO"), (AUDIO, "AUDIO"))
}
tokens = st.integers(0, 5) | st.sampled_from((IMAGE, VIDEO, AUDIO))


def items_of(prompt: list[int], rows: list[int]) -> dict:
    """Items for every placeholder, with these many rows, in turn over the prompt."""
    counts: dict[int, list[int]] = {token: [] for token in NAMES}
    remaining = iter(rows)
    for token in prompt:
        if token in counts:
            counts[token].append(next(remaining))
    return {token: (NAMES[token], counts[token]) for token in NAMES}


@given(st.data())
def test_every_placeholder_becomes_its_items_rows(data):
    prompt = data.draw(st.lists(tokens, max_size=12))
    places = [place for place, token in enumerate(prompt) if token in NAMES]
    rows = data.draw(st.lists(st.integers(1, 9), min_size=len(places), max_size=len(places)))

    input_ids, offsets, modalities = _expand(prompt, items_of(prompt, rows))

    by_place = dict(zip(places, rows, strict=True))
    pieces = [[token] * by_place.get(place, 1) for place, token in enumerate(prompt)]
    assert input_ids == [token for piece in pieces for token in piece]
    assert modalities == [NAMES[prompt[place]] for place in places]
    assert [last - first + 1 for first, last in offsets] == rows
    for (first, last), place in zip(offsets, places, strict=True):
        assert first == sum(len(piece) for piece in pieces[:place])
        assert set(input_ids[first : last + 1]) == {prompt[place]}


@given(st.lists(tokens, max_size=10), st.sampled_from(sorted(NAMES)), st.integers(0, 11))
def test_another_number_of_items_is_the_users_error(prompt, token, count):
    assume(count != prompt.count(token))
    items = {**items_of(prompt, [1] * len(prompt)), token: (NAMES[token], [1] * count)}
    told = f"{prompt.count(token)} {NAMES[token].name.lower()} placeholders for {count} "
    with pytest.raises(MediaError, match=told):
        _expand(prompt, items)


class Tokenizer:
    """One token a character; the placeholder is `#`, as in `<#>`."""

    def encode(self, text: str) -> list[int]:
        return [IMAGE if char == "#" else ord(char) % 100 for char in text]


def processor(**changes) -> SimpleNamespace:
    special = SimpleNamespace(image_token="<#>", image_token_regex=re.compile(r"<#+>|<image>"))
    return SimpleNamespace(
        **{
            "_tokenizer": Tokenizer(),
            "_tokenizer_auto_adds_specials": False,
            "mm_tokens": special,
            "IM_TOKEN_ID": IMAGE,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("prompt", "images", "read_as"),
    [
        ("a<#>b", 1, "a<#>b"),
        ("<#><#>", 2, "<#><#>"),
        ("<image>x", 1, "<#>x"),
        ("<####>", 1, "<#>"),  # expanded already
        ("<####>", 4, "<####>"),  # four side by side
        ("<####> and <image>", 2, "<#> and <#>"),
        ("none", 0, "none"),
        ("<#>", 2, "<#>"),  # wrong either way; told later
    ],
)
def test_a_text_is_read_with_one_placeholder_an_image(prompt, images, read_as):
    items = {IMAGE: (NAMES[IMAGE], [1] * images)}
    assert _token_ids(processor(), prompt, items) == Tokenizer().encode(read_as)


@given(st.lists(st.sampled_from(("<#>", "<##>", "<image>", "a", "bc")), max_size=6), st.data())
def test_token_ids_are_used_where_the_text_would_become_the_same(pieces, data):
    text = "".join(pieces)
    images = data.draw(st.integers(0, 6))
    ids = Tokenizer().encode(text)
    found = as_tokenized(processor(), ids, ["IMAGE"] * images)
    if found is not None:
        assert found == _token_ids(processor(), text, {IMAGE: (NAMES[IMAGE], [1] * images)})
    assert (found is not None) == (ids.count(IMAGE) == images)


def test_token_ids_are_not_used_where_another_modality_is_written_otherwise():
    hears = processor(VIDEO_TOKEN_ID=VIDEO, audio_token_id=AUDIO)
    assert as_tokenized(hears, [1, IMAGE, AUDIO], ["IMAGE", "AUDIO"]) == [1, IMAGE, AUDIO]
    assert as_tokenized(hears, [1, IMAGE, 2], ["IMAGE", "AUDIO"]) is None
    assert as_tokenized(hears, [1, IMAGE, VIDEO, VIDEO], ["IMAGE", "VIDEO"]) is None
    assert as_tokenized(hears, None, []) is None


def test_token_ids_are_taken_as_they_are():
    prompt = [1, IMAGE, IMAGE]
    ids = _token_ids(processor(), prompt, {IMAGE: (NAMES[IMAGE], [1, 1])})
    assert ids == prompt
    assert ids is not prompt


@pytest.mark.parametrize(
    ("ids", "read_as"),
    [
        ([1, IMAGE, IMAGE, IMAGE, 2, AUDIO, AUDIO, 3], [1, IMAGE, 2, AUDIO, 3]),
        ([IMAGE, IMAGE, 7, 7, VIDEO, AUDIO, AUDIO], [IMAGE, 7, 7, VIDEO, AUDIO]),
        # What is left out otherwise is told later.
        ([IMAGE, IMAGE, 2, IMAGE, AUDIO], [IMAGE, 2, IMAGE, AUDIO]),
    ],
)
def test_token_ids_that_were_expanded_already(ids, read_as):
    """As a colocated server reads them."""
    items = {token: (NAMES[token], [1]) for token in NAMES}
    assert _token_ids(processor(), ids, items) == read_as


@pytest.mark.parametrize("empty", ["", []])
def test_a_recording_without_a_prompt_has_the_models_own(empty):
    """As `/v1/audio/transcriptions` asks; other processors have no prompt for that."""
    written = processor(_build_transcription_prompt=lambda prompt: f"{prompt or ''}#a")
    assert _token_ids(written, empty, {}) == [IMAGE, 97]
    assert _token_ids(written, [7], {}) == [7]
    assert _token_ids(processor(), empty, {}) == []


def test_a_model_without_a_pattern_is_read_all_the_same():
    plain = processor(mm_tokens=SimpleNamespace(image_token=None, image_token_regex=None))
    assert _token_ids(plain, "<####>", {IMAGE: (NAMES[IMAGE], [1])}) == Tokenizer().encode("<####>")


def test_the_processor_counts_rows_as_sglangs_does(sglang):
    modality = sglang("managers.schedule_batch").Modality
    ours = robust_placeholders(
        processor(spatial_merge_size=2, VIDEO_TOKEN_ID=VIDEO, audio_token_id=AUDIO)
    )
    input_ids, offsets, modalities = ours.build_input_ids(
        [IMAGE, IMAGE, 1, VIDEO, AUDIO],
        img_grid_thw=torch.tensor([[1, 2, 4], [1, 4, 4]]),
        video_grid_thw=torch.tensor([[2, 2, 2]]),
        audio_seq_lens=torch.tensor([3]),
    )
    assert input_ids == [IMAGE] * 6 + [1] + [VIDEO] * 2 + [AUDIO] * 3
    assert offsets == [(0, 1), (2, 5), (7, 8), (9, 11)]
    assert modalities == [modality.IMAGE, modality.IMAGE, modality.VIDEO, modality.AUDIO]


@pytest.mark.parametrize("as_text", [True, False])
def test_where_the_in_tree_method_works_the_result_is_the_same(sglang, as_text):
    in_tree = sglang("multimodal.processors.base_processor").BaseMultimodalProcessor
    prompt = "a<#>b c<#>"
    options = {"img_grid_thw": torch.tensor([[1, 2, 4], [1, 4, 4]])}
    plain = processor(spatial_merge_size=2)
    given_prompt = prompt if as_text else Tokenizer().encode(prompt)
    theirs = in_tree.build_input_ids(plain, given_prompt, **options)
    ours = robust_placeholders(plain).build_input_ids(given_prompt, **options)
    assert ours == theirs


class Qwen3(SimpleNamespace):
    """As far as a prompt with times is concerned; a token a character."""

    def build_input_ids_with_timestamps(self, *_arguments):
        raise AssertionError("replaced")


START, END = 104, 105


def timed() -> Qwen3:
    class Characters:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(char) for char in text]

    return robust_placeholders(
        Qwen3(
            _processor=SimpleNamespace(tokenizer=Characters()),
            mm_tokens=SimpleNamespace(image_token=None, image_token_regex=None),
            IM_TOKEN_ID=IMAGE,
            VIDEO_TOKEN_ID=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
            spatial_merge_size=2,
        )
    )


def spelt(seconds: str, rows: int) -> list[int]:
    return [*map(ord, f"<{seconds} seconds>"), START, *[VIDEO] * rows, END]


def test_each_step_of_a_video_stands_after_its_time(sglang):
    modality = sglang("managers.schedule_batch").Modality
    input_ids, offsets, modalities = timed().build_input_ids_with_timestamps(
        [VIDEO, VIDEO, IMAGE, 7],
        None,
        torch.tensor([[1, 2, 4]]),
        torch.tensor([[2, 2, 2], [1, 4, 2]]),
        [[0.25, 1.0], [0.5]],
    )
    assert input_ids == (spelt("0.2", 1) + spelt("1.0", 1) + spelt("0.5", 2) + [IMAGE, IMAGE] + [7])
    rows = [input_ids[first : last + 1] for first, last in offsets]
    assert rows == [[VIDEO], [VIDEO], [VIDEO, VIDEO], [IMAGE, IMAGE]]
    assert modalities == [modality.VIDEO] * 3 + [modality.IMAGE]


def test_with_times_the_result_is_the_in_tree_one(sglang):
    in_tree = sglang("multimodal.processors.qwen_vl").QwenVLImageProcessor
    ours = timed()
    # What stands between brackets, the only form that the in-tree method expands right.
    arguments = (
        [START, VIDEO, END, 7, START, IMAGE, END],
        None,
        torch.tensor([[1, 2, 4]]),
        torch.tensor([[2, 2, 2]]),
        [[0.25, 1.0]],
    )
    theirs = in_tree.build_input_ids_with_timestamps(ours, *arguments)
    assert ours.build_input_ids_with_timestamps(*arguments) == theirs


@pytest.mark.parametrize("prompt", [[], [VIDEO, 7, VIDEO], [IMAGE]])
def test_with_times_too_another_number_is_the_users_error(prompt):
    with pytest.raises(MediaError, match="placeholders for"):
        timed().build_input_ids_with_timestamps(
            prompt, None, None, torch.tensor([[1, 2, 2]]), [[0.5]]
        )


def test_a_listed_models_own_processor_lays_out_and_others_have_an_adapter(monkeypatch):
    listed = SimpleNamespace()
    assert lays_out(listed, "Qwen2_5_VLForConditionalGeneration") is listed
    assert callable(listed.build_input_ids)

    asked = []
    monkeypatch.setattr(prompt, "adapt", lambda *arguments: asked.append(arguments) or "adapter")
    processor = SimpleNamespace(inner=object())
    assert lays_out(processor, "Mistral3ForConditionalGeneration") == "adapter"
    ((registered, architecture, family),) = asked
    assert (registered, architecture) == (processor, "Mistral3ForConditionalGeneration")
    assert family.processor(processor) is processor.inner


def test_a_processor_lays_prompts_out_on_its_ranks_device_without_memory_for_features(
    sglang, flags, monkeypatch
):
    """SGLang takes a GiB and more for it on an adaptive server, in each rank."""
    receiver, seen = sglang("disaggregation.encoder.receiver"), []
    adapts = {"enable_adaptive_dispatch_to_encoder": True}

    @contextmanager
    def override(**changes):
        before = dict(adapts)
        adapts.update(changes)
        yield
        adapts.update(before)

    def init(host, server_args, *_args, **_options):
        seen.append((server_args.base_gpu_id, dict(adapts)))
        assert server_args._model_config == "noted"
        host.mm_processor = it

    inner = SimpleNamespace(_temporary_fast_processor_cuda_pool=None)
    it = SimpleNamespace(_temporary_fast_processor_cuda_pool=None, inner=inner)
    monkeypatch.setattr(receiver.MMReceiverBase, "_init_mm_processor", init)
    third = SimpleNamespace(name=torch.device("cuda", 3))
    monkeypatch.setattr(adapter, "device_of", {"cuda": third, "cpu": Host()}.get)
    server_args = sglang("server_args").ServerArgs(model_path="a", base_gpu_id=1)
    server_args._model_config = "noted"
    server_args._resolution_finished = True
    for device in ("cuda", "cpu"):
        flags(disagg={"override": override}, device={"device": device})
        assert load_processor(server_args, SimpleNamespace(hf_config=None)) is it
        for one in (it, it.inner):
            with one._temporary_fast_processor_cuda_pool("cuda") as pool:
                assert pool == "cuda", "there is none"
        assert server_args.base_gpu_id == 1, "others read it, too"
    assert seen == [(number, {"enable_adaptive_dispatch_to_encoder": False}) for number in (3, 1)]
