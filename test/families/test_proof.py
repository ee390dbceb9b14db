from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import pytest
from PIL import Image

from families.conftest import BOS, BREAK, FILM, MARK, OPEN, PAD, Processor
from sglang_epd.errors import ConfigError, MediaError, MediaTypeError
from sglang_epd.families import IN_TREE, Family, family_of, proof
from sglang_epd.families.expansion import Expansion, Part
from sglang_epd.families.films import drawn
from sglang_epd.families.proof import adapt
from sglang_epd.modality import IMAGE, VIDEO

ARCHITECTURE = "SomeForConditionalGeneration"
SIZES = ((140, 84), (56, 112))


@pytest.fixture
def pictures():
    return [Image.new("RGB", size) for size in SIZES]


def prompts(mark: str) -> list[str]:
    return [
        f"a{mark}b{mark}c",
        f"{mark}{mark}",
        f"\n{mark}\n{mark}\n\n",
        f"{BOS}{mark} {mark}",
    ]


def test_processors_are_proven_on_this_processs_device(processor, monkeypatch):
    """They keep tensors of their first run."""
    bound: list[int] = []

    class Here:
        def bind(self) -> None:
            bound.append(threading.get_ident())

    ran: set[int] = set()
    process = processor.process_mm_data_async

    def noting(*arguments, **options):
        ran.add(threading.get_ident())
        return process(*arguments, **options)

    monkeypatch.setattr(proof, "available", lambda: True)
    monkeypatch.setattr(proof, "device_of", {"cuda": Here()}.get)
    monkeypatch.setattr(processor, "process_mm_data_async", noting)
    adapt(processor, ARCHITECTURE, Family())
    assert ran
    assert ran == set(bound)


@pytest.mark.parametrize("prompt", prompts(MARK), ids=repr)
def test_prompts_are_laid_out_as_with_pictures(processor, pictures, prompt):
    adapter = adapt(processor, ARCHITECTURE, Family())
    parts = [adapter.see(picture).part for picture in pictures]
    laid = adapter.lay_out(prompt, parts)
    theirs = adapter.process(prompt, {IMAGE: pictures})
    assert laid.input_ids == theirs.input_ids
    assert laid.offsets == [item.offsets for item in theirs.mm_items]
    assert adapter.constants == {"im_token_id": processor._tokenizer.id(PAD)}


def test_positions_that_follow_grids_are_those_of_all_pictures(processor, pictures):
    processor.follows_grids = True
    adapter = adapt(processor, ARCHITECTURE, Family())
    seen = [adapter.see(picture) for picture in pictures]
    theirs = adapter.process(prompts(MARK)[0], {IMAGE: pictures})
    ours = adapter.positions(theirs.input_ids, [one.part for one in seen])
    assert ours["mrope_positions"].tolist() == theirs.mrope_positions.tolist()
    assert ours["mrope_position_delta"] == 2


@pytest.mark.parametrize("trait", ["fills_up", "closes_last"])
def test_what_depends_on_the_rest_of_a_prompt_is_refused(processor, trait):
    setattr(processor, trait, True)
    with pytest.raises(ConfigError, match=f"{ARCHITECTURE} cannot have its encoder apart"):
        adapt(processor, ARCHITECTURE, Family())


def test_constants_that_are_none_are_refused(processor, monkeypatch):
    original = processor.process_mm_data_async

    async def with_types(**arguments):
        output = await original(**arguments)
        output.token_type_ids = [0] * len(output.input_ids)
        return output

    monkeypatch.setattr(processor, "process_mm_data_async", with_types)
    with pytest.raises(ConfigError, match="makes token_type_ids of the media"):
        adapt(processor, ARCHITECTURE, Family())


def test_rows_that_nobody_places_are_refused(processor, monkeypatch):
    original = processor.process_mm_data_async

    async def without_offsets(**arguments):
        output = await original(**arguments)
        for item in output.mm_items:
            item.offsets = None
        return output

    monkeypatch.setattr(processor, "process_mm_data_async", without_offsets)
    with pytest.raises(ConfigError, match="where the image's rows belong"):
        adapt(processor, ARCHITECTURE, Family())


def test_a_processor_that_fails_is_refused_with_its_words(processor, monkeypatch):
    async def fail(**_arguments):
        raise KeyError("image_sizes")

    monkeypatch.setattr(processor, "process_mm_data_async", fail)
    with pytest.raises(ConfigError, match="KeyError: 'image_sizes'"):
        adapt(processor, ARCHITECTURE, Family())


def test_token_ids_are_taken_where_one_server_takes_them(processor, pictures):
    adapter = adapt(processor, ARCHITECTURE, Family())
    parts = [adapter.see(picture).part for picture in pictures]
    ids = processor._tokenizer(prompts(MARK)[0])["input_ids"]
    assert adapter.lay_out(ids, parts) == adapter.lay_out(BOS + prompts(MARK)[0], parts)

    processor.refuses_token_ids = True
    adapter = adapt(processor, ARCHITECTURE, Family())
    with pytest.raises(MediaError, match="as text only"):
        adapter.lay_out(ids, parts)


class Bare(Processor):
    """Its mark is its placeholder, and stands alone among token ids, if it keeps these."""

    keeps = True

    def __init__(self) -> None:
        super().__init__()
        self.mm_tokens.image_token, self.mm_tokens.image_token_regex = PAD, re.compile(PAD)

    async def process_mm_data_async(self, *, input_text, **more):
        ids = input_text
        text = self._tokenizer.decode(ids) if isinstance(ids, list) else ids
        output = await super().process_mm_data_async(input_text=text.replace(PAD, MARK), **more)
        if not (self.keeps and isinstance(ids, list)) or more["request_obj"].video_data:
            return output
        rows, output.input_ids = iter(output.mm_items), []
        for token in ids:
            if token != self._tokenizer.id(PAD):
                output.input_ids.append(token)
                continue
            item, first = next(rows), len(output.input_ids)
            count = sum(last - first + 1 for first, last in item.offsets)
            output.input_ids += [token] * count
            item.offsets = [(first, first + count - 1)]
        return output


@pytest.mark.parametrize("keeps", [True, False])
def test_token_ids_are_kept_where_one_server_keeps_them(pictures, monkeypatch, keeps):
    monkeypatch.setattr(Bare, "keeps", keeps)
    processor = Bare()
    adapter = adapt(processor, ARCHITECTURE, Family())
    parts = [adapter.see(picture).part for picture in pictures]
    spelt = [processor._tokenizer.id(token) for token in ("t", "h", PAD, "t", "h", PAD)]
    laid = adapter.lay_out(spelt, parts)
    theirs = adapter.process(spelt, {IMAGE: pictures})
    assert laid.input_ids == theirs.input_ids
    assert (processor._tokenizer.id("th") in laid.input_ids) is not keeps
    assert laid.offsets == [item.offsets for item in theirs.mm_items]
    assert adapter.takes_token_ids == {}


def test_brackets_that_a_user_wrote_are_refused(processor, pictures):
    adapter = adapt(processor, ARCHITECTURE, Family())
    parts = [adapter.see(picture).part for picture in pictures]
    # As where a processor ends each row of a picture with a bracket.
    adapter.constants["im_end_id"] = processor._tokenizer.id(BREAK)
    for prompt, refused in ((f"{MARK} {MARK}", False), (f"{MARK}{BREAK}{MARK}", True)):
        ids = adapter.lay_out(prompt, parts).input_ids
        if refused:
            with pytest.raises(MediaError, match="media marks of its own"):
                adapter._bracketed(ids, parts)
        else:
            adapter._bracketed(ids, parts)


FILMS = ((5, 84, 56, 1.0), (9, 140, 84, 4.0))


@pytest.mark.parametrize(
    "prompt", [f"a{FILM}b{FILM}", f"{FILM}{FILM}{MARK}", f"\n{MARK}{FILM}\n\n{MARK}{FILM}."]
)
def test_videos_are_laid_out_as_with_their_frames(processor, pictures, prompt):
    adapter = adapt(processor, ARCHITECTURE, Family())
    assert not adapter.refused
    shown = pictures[: prompt.count(MARK)]
    films = [drawn(*film) for film in FILMS]
    parts = [adapter.see(picture).part for picture in shown]
    parts += [adapter.see(film, VIDEO).part for film in films]
    laid = adapter.lay_out(prompt, parts)
    theirs = adapter.process(prompt, {IMAGE: shown, VIDEO: films})
    assert laid.input_ids == theirs.input_ids
    frames = [place for offsets in laid.offsets[len(shown) :] for place in offsets]
    assert frames == theirs.mm_items[-1].offsets


def test_a_model_whose_videos_depend_on_each_other_is_served_without_them(processor, pictures):
    processor.shares_frames = True
    adapter = adapt(processor, ARCHITECTURE, Family())
    assert "depends on what is around it" in adapter.refused[VIDEO]
    assert adapter.see(pictures[0]).part.modality == IMAGE
    with pytest.raises(MediaTypeError, match=r"takes no video .* depends on what is around"):
        adapter._check_modality(VIDEO)
    with pytest.raises(MediaTypeError, match="takes no audio"):
        adapter._check_modality("AUDIO")


def test_a_model_without_a_mark_for_videos_is_served_without_them(processor):
    processor.mm_tokens.video_token = processor.mm_tokens.video_token_regex = None
    adapter = adapt(processor, ARCHITECTURE, Family())
    assert adapter.refused == {VIDEO: "the model's processor knows no videos"}


def test_frames_in_brackets_are_items_of_their_own(processor):
    processor.brackets = True
    adapter = adapt(processor, ARCHITECTURE, Family())
    parts = [adapter.see(drawn(*film), VIDEO).part for film in FILMS]
    ids = adapter.lay_out(FILM + FILM, parts).input_ids
    assert adapter._bracketed(ids, parts) == [True, True]
    with pytest.raises(MediaError, match="media marks of its own"):
        adapter._bracketed([*ids, processor._tokenizer.id(OPEN)], parts)


def test_a_family_names_its_differences_in_one_file():
    listed = {architecture for architecture in IN_TREE if family_of(architecture) is not None}
    assert listed == {"Dots3NoteForCausalLM", "Glm5NextForConditionalGeneration"}
    assert type(family_of("NobodyKnowsForConditionalGeneration")) is Family
    for architecture in ("Glm4vForConditionalGeneration", "InternVLChatModel"):
        family = family_of(architecture)
        assert type(family) is not Family
        assert architecture in family.architectures


@pytest.mark.parametrize(("rows", "refused"), [([10], False), ([5, 5], False), ([6, 1], True)])
def test_videos_that_one_server_would_make_smaller_are_refused(rows, refused):
    """GLM-5-Next: ten rows for all videos of a prompt."""
    video_processor = SimpleNamespace(max_image_tokens=10)
    processor = SimpleNamespace(_processor=SimpleNamespace(video_processor=video_processor))
    parts = [Part(VIDEO, Expansion("", 0, [count])) for count in rows]
    family = family_of("Glm5NextForConditionalGeneration")
    if refused:
        with pytest.raises(MediaError, match="make the prompt's 2 videos smaller"):
            family.complete(processor, "text", parts)
    else:
        assert family.complete(processor, "text", parts) == "text"
