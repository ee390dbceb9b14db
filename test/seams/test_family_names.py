from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

from families.conftest import Processor
from sglang_epd.errors import ConfigError
from sglang_epd.families import Family
from sglang_epd.families.proof import adapt, prove_names
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
