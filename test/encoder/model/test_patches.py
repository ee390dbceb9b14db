"""Patches that children cut become, to the last bit, what the model's own processor makes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor, Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from checkpoints.families import FAMILIES
from checkpoints.family import IMAGE, Family
from checkpoints.tokenizer import build_tokenizer
from checkpoints.unweighted import Unweighted
from devices.late import LateDevice
from media.samples import decode_image, encoded, picture
from media.test_decode import SAMPLES
from sglang_epd.decoding import Decoders
from sglang_epd.decoding.messages import Cut
from sglang_epd.device import Host
from sglang_epd.encoder.model import patches as module
from sglang_epd.encoder.model.patches import Patches, proven
from sglang_epd.errors import MediaError
from sglang_epd.media import MediaLimits

SERVED = [
    family
    for family in FAMILIES.values()
    if IMAGE in family.marks
    and not isinstance(family, Unweighted)
    and not family.carried
    # Whose processors read no file.
    and family.name not in ("intern_s2_preview", "internvl_chat")
]
# Of the processors whose patches are not cut in children.
OTHERS = {"gemma3", "glm4v", "mistral3"}
SIZES = [(1, 1), (31, 47), (200, 2), (3, 300), (333, 517), (448, 448), (1280, 61), (900, 1100)]
FILES = [encoded(picture(*size), kind) for kind in ("PNG", "JPEG") for size in SIZES]


def processor_of(family: Family, folder: Path) -> Any:
    tokenizer = build_tokenizer(family.special_tokens, family.marks, family.named_tokens)
    family.write_processors(family.specs[0], tokenizer, folder)
    return AutoImageProcessor.from_pretrained(folder)


def whole(processor: Any, image: Image.Image, **options: Any) -> torch.Tensor:
    made: torch.Tensor = processor(images=[image], return_tensors="pt", **options)["pixel_values"]
    return made


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    decoders = Decoders(MediaLimits(), 2 << 30, 4, cuts=True)
    yield decoders
    decoders.close()


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_each_family_sees_what_its_own_processor_makes(
    family: Family, tmp_path: Path, decoders: Decoders
) -> None:
    processor = processor_of(family, tmp_path)
    made = proven(processor, {}, Host())
    assert (made is None) == (family.name in OTHERS)
    # Formats are decoded before a processor sees them: each is shown to every fourth family.
    files = [*FILES, *list(SAMPLES.values())[SERVED.index(family) % 4 :: 4]]
    for data in files if made is not None else ():
        image = decode_image(data, MediaLimits())
        with decoders.begin(time.monotonic() + 60) as item:
            cut, grid = item.patches(data, made.cut)
            features = made.features([torch.from_numpy(cut)])[0]
        expected = processor(images=[image], return_tensors="pt")
        assert torch.equal(features, expected["pixel_values"])
        assert expected["image_grid_thw"].tolist() == [[1, *grid]]


@settings(deadline=None, max_examples=60)
@given(
    size=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    patch=st.sampled_from((14, 16)),
    frames=st.integers(1, 3),
    bounds=st.sampled_from(((3136, 100_352), (65_536, 65_536), (784, 16_777_216))),
    seed=st.integers(0, 9),
)
def test_whatever_the_size_and_the_cut(size, patch, frames, bounds, seed) -> None:
    processor = Qwen2VLImageProcessor(
        patch_size=patch,
        temporal_patch_size=frames,
        size=dict(zip(("shortest_edge", "longest_edge"), bounds, strict=True)),
    )
    cut = Cut(patch, 2, *bounds)
    image = picture(*size).rotate(90 * seed)
    if max(size) > 200 * min(size):
        with pytest.raises(MediaError, match="aspect ratio"):
            cut.resized(*size)
        return
    made = Patches(processor, cut, Host()).features([module._cut(image, cut)])[0]
    assert torch.equal(made, whole(processor, image))


@given(
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.sampled_from((14, 16)),
    st.sampled_from(((3136, 1_003_520), (65_536, 16_777_216))),
)
def test_pictures_are_resized_as_the_processor_says(width, height, patch, bounds) -> None:
    cut = Cut(patch, 2, *bounds)
    try:
        expected = smart_resize(height, width, 2 * patch, *bounds)
    except ValueError as error:
        with pytest.raises(MediaError, match=str(error)):
            cut.resized(width, height)
    else:
        assert cut.resized(width, height)[::-1] == expected


def test_bounds_that_the_server_was_told_hold() -> None:
    options = {"min_pixels": 50_000, "max_pixels": 90_000}
    with pytest.warns(FutureWarning, match="min_pixels"):
        made = proven(Qwen2VLImageProcessor(), options, Host())
    assert made is not None
    assert made.cut == Cut(14, 2, 50_000, 90_000)


class Another(Qwen2VLImageProcessor):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("processor", "options"),
    [
        (Another(), {}),
        (Qwen2VLImageProcessor(resample=2), {}),
        (Qwen2VLImageProcessor(do_rescale=False), {}),
        (Qwen2VLImageProcessor(), {"do_normalize": False}),
        (None, {}),
    ],
    ids=["a subclass", "bilinear", "not rescaled", "with options", "none"],
)
def test_other_processors_run_in_the_server(processor: Any, options: dict[str, Any]) -> None:
    assert proven(processor, options, Host()) is None


def test_what_would_differ_is_not_cut_in_children(monkeypatch, caplog) -> None:
    right = Patches.features
    monkeypatch.setattr(Patches, "features", lambda *of: [one + 1e-7 for one in right(*of)])
    assert proven(Qwen2VLImageProcessor(), {}, Host()) is None
    assert "patches would differ" in caplog.text


def item_of(feature: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(feature=feature, modality="IMAGE")


def test_a_batch_is_finished_on_the_device_and_can_be_run_again() -> None:
    processor, cut = Qwen2VLImageProcessor(), Cut(14, 2, 3136, 100_352)
    images = [picture(100, 80), picture(41, 60)]
    for seed in range(10):
        device = LateDevice(seed, eagerness=(0.0, 0.3, 0.7)[seed % 3])
        patches = Patches(processor, cut, device)
        device.synchronize()
        items = []
        for image in images:
            flat = module._cut(image, cut)
            pinned = device.pinned(flat.nbytes).view(flat.shape).copy_(flat)
            items.append(item_of(pinned))
        stream = device.stream()
        for _ in range(2):
            with device.use(stream):
                finished = patches.finish(items)
                made = [item.feature.cpu() for item in finished]
            for one, image in zip(made, images, strict=True):
                assert torch.equal(one, whole(processor, image))
        assert all(item.feature.dtype == torch.uint8 for item in items)


def test_features_that_a_processor_made_are_left_alone() -> None:
    patches = Patches(Qwen2VLImageProcessor(), Cut(14, 2, 3136, 100_352), Host())
    items = [item_of(torch.zeros(4, 1176))]
    assert patches.finish(items) is items
