from __future__ import annotations

import math
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from sglang_epd import modality
from sglang_epd.errors import EncodeError, MediaError
from sglang_epd.language.assembly import assemble, lay_out, lay_out_some
from sglang_epd.transfer.arena import ReceivedItem
from sglang_epd.wire.http import ItemLayout
from sglang_epd.wire.messages import Layout, TensorSpec

Modality = Enum("Modality", "IMAGE VIDEO AUDIO")
IMAGE, VIDEO, AUDIO = -1, -2, -3
# Before each item, and each frame.
MARK = 100
WIDTH = 4


@pytest.fixture(autouse=True)
def members(monkeypatch):
    """In place of SGLang's, which take seconds to import."""
    monkeypatch.setattr(modality.Modality, "sglang", property(lambda row: Modality[row.name]))


class Processor:
    """Lays prompts out as SGLang's processors do, from grids and row counts alone.

    A placeholder stands for an item, whose rows are cut off the front of what is left
    of its modality. A video is one item a frame, as in Qwen3-VL.
    """

    def __init__(self) -> None:
        self.metadata: dict = {}
        self.merge_adjacent = False

    def get_validated_mm_data(self, prompt, embeddings, **metadata):
        self.metadata = metadata
        grids = {
            IMAGE: iter(metadata.get("img_grid_thw", ())),
            VIDEO: iter(metadata.get("video_grid_thw", ())),
            AUDIO: iter(metadata.get("audio_feature_lens", ())),
        }
        names = {IMAGE: Modality.IMAGE, VIDEO: Modality.VIDEO, AUDIO: Modality.AUDIO}
        used = dict.fromkeys(embeddings, 0)
        mm_items, ids = [], []
        for token in prompt:
            if token not in names:
                ids.append(token)
                continue
            modality = names[token]
            grid = next(grids[token], None)
            if grid is None:
                raise IndexError("list index out of range")
            pieces = [math.prod(grid.tolist()[1:])] * int(grid[0]) if token == VIDEO else None
            for rows in pieces or [math.prod(grid.flatten().tolist())]:
                start = used[modality]
                used[modality] += rows
                piece = embeddings[modality][start : start + rows]
                if len(piece) != rows:
                    raise RuntimeError("length mismatch")
                ids.append(MARK)
                mm_items.append(Item(modality, piece))
                mm_items[-1].offsets = [(len(ids), len(ids) + rows - 1)]
                ids += [token] * rows
        for modality, count in used.items():
            if count != len(embeddings[modality]):
                raise RuntimeError("rows left over")
        if self.merge_adjacent:
            rows = torch.cat([item.precomputed_embeddings for item in mm_items])
            mm_items = [Item(mm_items[0].modality, rows)]
        positions = torch.arange(len(ids)).expand(3, -1)
        return SimpleNamespace(mm_items=mm_items, input_ids=ids, mrope_positions=positions)


class Item(SimpleNamespace):
    def __init__(self, modality, rows):
        super().__init__(modality=modality, precomputed_embeddings=rows, identity=None)

    def set_identity(self, identity: bytes) -> None:
        assert len(identity) == 32
        self.identity = identity


def received(name: str, modality: str, grid: list[list[int]], **extra) -> ReceivedItem:
    tokens = sum(math.prod(row) for row in grid)
    spec = TensorSpec("float32", (tokens, WIDTH))
    embedding = torch.rand(tokens, WIDTH)
    return ReceivedItem(name.ljust(32).encode(), Layout(modality, spec, grid, extra), embedding)


def lies_within(piece: torch.Tensor, whole: torch.Tensor) -> bool:
    offset = piece.data_ptr() - whole.data_ptr()
    return 0 <= offset <= whole.nbytes - piece.nbytes and not offset % (WIDTH * 4)


@pytest.mark.parametrize("prompt", [[7, IMAGE, 8, IMAGE, 9], [IMAGE, IMAGE]])
@pytest.mark.parametrize("names", ["ab", "aa"])
def test_each_image_gets_its_own_rows_and_key(prompt, names):
    """Also one that is there twice."""
    pictures = {name: received(name, "IMAGE", [[1, 2, 3 + ord(name)]]) for name in names}
    items = [pictures[name] for name in names]
    output = assemble(Processor(), prompt, items)
    assert [mm_item.identity for mm_item in output.mm_items] == [items[0].key, items[1].key]
    for mm_item, item in zip(output.mm_items, items, strict=True):
        assert torch.equal(mm_item.precomputed_embeddings, item.embedding)


def test_nothing_is_copied():
    items = [
        received("a", "IMAGE", [[1, 2, 3]]),
        received("b", "IMAGE", [[1, 4, 5]]),
        received("v", "VIDEO", [[3, 2, 2]]),
    ]
    output = assemble(Processor(), [IMAGE, VIDEO, IMAGE], items)
    owners = [items[0], items[2], items[2], items[2], items[1]]
    assert len(output.mm_items) == len(owners)
    for mm_item, owner in zip(output.mm_items, owners, strict=True):
        assert lies_within(mm_item.precomputed_embeddings, owner.embedding)


def test_the_frames_of_a_video_are_slices_with_identities_of_their_own():
    # Of equal shape: whatever makes two of them differ, their times included, is in their keys.
    videos = [received(name, "VIDEO", [[3, 2, 2]]) for name in "vw"]
    output = assemble(Processor(), [VIDEO, VIDEO], videos)
    frames = [mm_item.precomputed_embeddings for mm_item in output.mm_items]
    assert torch.equal(torch.cat(frames[:3]), videos[0].embedding)
    assert torch.equal(torch.cat(frames[3:]), videos[1].embedding)
    identities = [mm_item.identity for mm_item in output.mm_items]
    assert len(set(identities)) == 6
    again = assemble(Processor(), [VIDEO, VIDEO], videos)
    assert [mm_item.identity for mm_item in again.mm_items] == identities
    one = received("o", "VIDEO", [[1, 2, 2]])
    assert assemble(Processor(), [VIDEO], [one]).mm_items[0].identity == one.key


def test_times_come_in_one_list_a_video():
    processor = Processor()
    videos = [
        received("v", "VIDEO", [[2, 2, 2]], video_timestamps=[[0.5, 1.5]]),
        received("w", "VIDEO", [[1, 2, 2]], video_timestamps=[[0.0]]),
    ]
    assemble(processor, [VIDEO, VIDEO], videos)
    assert processor.metadata["video_timestamps"] == [[0.5, 1.5], [0.0]]


def test_modalities_do_not_mix():
    items = [
        received("i", "IMAGE", [[1, 2, 2]]),
        received("v", "VIDEO", [[1, 3, 1]]),
        received("a", "AUDIO", [[5]]),
    ]
    output = assemble(Processor(), [AUDIO, VIDEO, 1, IMAGE], items)
    assert [m.identity for m in output.mm_items] == [items[2].key, items[1].key, items[0].key]


def test_the_processor_gets_grids_and_metadata_by_its_own_names():
    processor = Processor()
    items = [
        received("v", "VIDEO", [[1, 2, 2]], second_per_grid_ts=[0.5]),
        received("w", "VIDEO", [[2, 2, 2]], second_per_grid_ts=[1.0]),
        received("a", "AUDIO", [[5]]),
        received("b", "AUDIO", [[6]]),
    ]
    assemble(processor, [VIDEO, VIDEO, AUDIO, AUDIO], items)
    assert processor.metadata["video_grid_thw"].tolist() == [[1, 2, 2], [2, 2, 2]]
    assert processor.metadata["audio_feature_lens"].tolist() == [5, 6]
    # Qwen3-Omni's rotary positions want a tensor.
    assert torch.equal(processor.metadata["second_per_grid_ts"], torch.tensor([0.5, 1.0]))
    assert "img_grid_thw" not in processor.metadata


@pytest.mark.parametrize("assemble", [assemble, lay_out])
@pytest.mark.parametrize("prompt", [[], [1, 2], [IMAGE], [IMAGE] * 3])
def test_a_prompt_that_does_not_match_its_media_is_the_users_error(assemble, prompt):
    items = [received("a", "IMAGE", [[1, 2, 3]]), received("b", "IMAGE", [[1, 1, 1]])]
    with pytest.raises(MediaError, match="placeholders do not match the request's 2 media items"):
        assemble(Processor(), prompt, items)


@pytest.mark.parametrize("lay", [assemble, lay_out, lay_out_some])
def test_what_no_context_holds_is_not_laid_out(lay):
    """A few copies of a picture that encoders know claim millions of tokens."""
    items = [received("a", "IMAGE", [[1, 2, 3]])] * 4

    class Never(Processor):
        def get_validated_mm_data(self, *_args, **_kwargs):
            raise AssertionError("it is laid out")

    with pytest.raises(MediaError, match=r"take 24 tokens, which is no less .*24 tokens"):
        lay(Never(), [IMAGE] * 4, items, 24)
    assert lay(Processor(), [IMAGE] * 4, items, 25)


@pytest.mark.parametrize("error", [IndexError, RuntimeError, ValueError])
def test_a_processor_says_in_several_ways_that_a_prompt_does_not_match(error):
    class Refuses(Processor):
        def get_validated_mm_data(self, *_args, **_kwargs):
            raise error("expanded media tokens do not match")

    with pytest.raises(MediaError, match="placeholders do not match"):
        assemble(Refuses(), [IMAGE], [received("a", "IMAGE", [[1, 1, 1]])])


def test_of_very_many_items_each_has_its_own_rows():
    items = [received(f"{n}", "IMAGE", [[1, 1, 1 + n % 3]]) for n in range(3000)]
    output = assemble(Processor(), [IMAGE] * len(items), items)
    for mm_item, item in zip(output.mm_items, items, strict=True):
        assert mm_item.precomputed_embeddings.data_ptr() == item.embedding.data_ptr()
        assert len(mm_item.precomputed_embeddings) == len(item.embedding)


def test_a_message_of_our_own_is_kept():
    class Strict(Processor):
        def get_validated_mm_data(self, *_args, **_kwargs):
            raise MediaError("the prompt has 0 image placeholders for 1 image items")

    with pytest.raises(MediaError, match="0 image placeholders"):
        assemble(Strict(), [], [received("a", "IMAGE", [[1, 1, 1]])])


def test_a_processor_that_joins_two_items_is_not_served_wrong_rows():
    processor = Processor()
    processor.merge_adjacent = True
    items = [received("a", "IMAGE", [[1, 2, 3]]), received("b", "IMAGE", [[1, 4, 5]])]
    with pytest.raises(EncodeError, match="two media items into one"):
        assemble(processor, [IMAGE, IMAGE], items)


def test_without_embeddings_the_layout_and_the_identities_are_the_same():
    items = [
        received("a", "IMAGE", [[1, 2, 3]]),
        received("v", "VIDEO", [[3, 2, 2]]),
        received("b", "IMAGE", [[1, 4, 5]]),
    ]
    described = [ItemLayout(item.key, item.layout) for item in items]
    prompt = [IMAGE, VIDEO, 7, IMAGE]
    full = assemble(Processor(), prompt, items)
    bare = lay_out(Processor(), prompt, described)
    assert bare.input_ids == full.input_ids
    assert [item.identity for item in bare.mm_items] == [item.identity for item in full.mm_items]
    assert [item.modality for item in bare.mm_items] == [item.modality for item in full.mm_items]
    assert all(item.precomputed_embeddings is None for item in bare.mm_items)


def begun(item: ReceivedItem, rows: int) -> ReceivedItem:
    return ReceivedItem(item.key, item.layout, item.embedding[:rows])


@pytest.mark.parametrize("rows", [1, 4, 6, 8, 11])
@pytest.mark.parametrize("behind", [[], [8, IMAGE]])
def test_a_part_ends_with_the_last_row_that_is_there(rows, behind):
    """And is the beginning of the whole prompt: ids, identities, rows and positions."""
    picture, video = received("a", "IMAGE", [[1, 2, 3]]), received("v", "VIDEO", [[3, 2, 2]])
    prompt = [7, IMAGE, 7, VIDEO, *behind]
    others = [received("b", "IMAGE", [[1, 2, 2]])] if behind else []
    whole = assemble(Processor(), prompt, [picture, *others, video])
    output, its = lay_out_some(Processor(), prompt, [picture, *others, begun(video, rows)])
    end = len(output.input_ids)
    assert output.input_ids == whole.input_ids[:end]
    assert output.input_ids.count(VIDEO) == rows
    assert output.mrope_positions.shape == (3, end)
    assert len(its) == len(output.mm_items)
    there = 0
    for mm_item, same in zip(output.mm_items, whole.mm_items, strict=False):
        ((first, last),) = mm_item.offsets
        count = last - first + 1
        assert (mm_item.identity, first) == (same.identity, same.offsets[0][0])
        assert torch.equal(mm_item.precomputed_embeddings, same.precomputed_embeddings[:count])
        there += count
    assert there == 6 + rows


def test_a_part_of_items_that_are_whole_is_not_cut():
    items = [received("a", "IMAGE", [[1, 2, 3]]), received("v", "VIDEO", [[3, 2, 2]])]
    output, _ = lay_out_some(Processor(), [IMAGE, VIDEO, 7], items)
    assert output.input_ids == assemble(Processor(), [IMAGE, VIDEO, 7], items).input_ids
