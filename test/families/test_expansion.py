from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.errors import EncodeError, MediaError
from sglang_epd.families.expansion import Expansion, insert, read, runs_of, spread

MARK = re.compile("<img>")
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


def test_marks_become_their_pictures_texts_in_order():
    expansions = [Expansion("A", PAD, [1]), Expansion("B", PAD, [1])]
    assert insert("<img><img>, x", MARK, expansions) == "AB, x"
    # What a picture is written as is not read again.
    assert insert("<img>", MARK, [Expansion("<img>", PAD, [1])]) == "<img>"


@pytest.mark.parametrize(("prompt", "pictures"), [("<img>", 2), ("<img><img>", 1), ("", 1)])
def test_marks_are_as_many_as_pictures(prompt, pictures):
    with pytest.raises(MediaError, match=r"\d image placeholders for \d image items"):
        insert(prompt, MARK, [Expansion("A", PAD, [1])] * pictures)


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


def test_runs_are_found():
    assert runs_of([PAD, PAD, 1, PAD], PAD) == [(0, 1), (3, 3)]
    assert runs_of([], PAD) == []
