from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.errors import EncodeError, MediaError
from sglang_epd.families.expansion import Expansion, Part, insert, read, spread
from sglang_epd.modality import IMAGE, VIDEO

MARKS = {IMAGE: re.compile("<img>"), VIDEO: re.compile("<film>")}
PAD = 9
PLAIN = {"text": "[P]", "token": PAD, "runs": [2, 3]}


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), max_size=4), st.data())
def test_each_run_has_its_length_and_its_place(runs, data):
    expansions = [Expansion("", PAD, counts) for counts in runs]
    ids, expected = [], []
    for counts in runs:
        ids += data.draw(st.lists(st.integers(0, 5), max_size=3))
        ids += [PAD] * len(counts)
        expected.append(counts)
    laid = spread(ids, expansions)
    lengths = [[last - first + 1 for first, last in offsets] for offsets in laid.offsets]
    assert lengths == expected
    assert laid.input_ids.count(PAD) == sum(map(sum, runs))
    assert [token for token in laid.input_ids if token != PAD] == [t for t in ids if t != PAD]
    for offsets in laid.offsets:
        for first, last in offsets:
            assert set(laid.input_ids[first : last + 1]) == {PAD}


def part(text: str, modality: str = IMAGE) -> Part:
    return Part(modality, Expansion(text, PAD, [1]))


def test_marks_become_their_items_texts_in_order():
    assert insert("<img><img>, x", MARKS, [part("A"), part("B")]) == ("AB, x", [0, 1])
    # What an item is written as is not read again.
    assert insert("<img>", MARKS, [part("<img>")]) == ("<img>", [0])


def test_each_modality_has_its_own_order():
    parts = [part("A"), part("B"), part("C", VIDEO), part("D", VIDEO)]
    text, order = insert("<film>1<img>2<film><img>", MARKS, parts)
    assert (text, order) == ("C1A2DB", [2, 0, 3, 1])


@pytest.mark.parametrize(
    ("prompt", "parts", "told"),
    [
        ("<img>", [part("A"), part("A")], "1 image placeholders for 2 image items"),
        ("<img><img>", [part("A")], "2 image placeholders for 1 image items"),
        ("", [part("A")], "0 image placeholders"),
        ("<img>", [part("A"), part("A", VIDEO)], "0 video placeholders for 1 video items"),
        ("<img><film>", [part("A")], "1 video placeholders for 0 video items"),
    ],
)
def test_marks_are_as_many_as_items(prompt, parts, told):
    with pytest.raises(MediaError, match=told):
        insert(prompt, MARKS, parts)


@pytest.mark.parametrize("ids", [[PAD, PAD], [PAD, 1, PAD, 2]])
def test_placeholders_that_a_user_wrote_are_refused(ids):
    with pytest.raises(MediaError, match="of its own"):
        spread(ids, [Expansion("", PAD, [3])])


def test_a_placeholder_that_went_missing_is_refused():
    with pytest.raises(MediaError, match="does not keep"):
        spread([1, 2], [Expansion("", PAD, [3])])


def test_what_an_encoder_tells_is_read_strictly():
    assert read(PLAIN) == Expansion("[P]", PAD, [2, 3])
    assert read(PLAIN).rows == 5
    for wrong in (
        None,
        {},
        PLAIN | {"more": 1},
        PLAIN | {"token": "x"},
        PLAIN | {"runs": []},
        PLAIN | {"runs": [3, 0]},
        PLAIN | {"runs": [-1]},
        PLAIN | {"text": 1},
    ):
        with pytest.raises(EncodeError):
            read(wrong)
