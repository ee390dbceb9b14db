from __future__ import annotations

import io

import pytest
from PIL import Image

from families.conftest import PAD, Processor
from sglang_epd.encoder.pictures import PicturePreparer
from sglang_epd.errors import MediaError, MediaTypeError
from sglang_epd.families import Family
from sglang_epd.families.expansion import EXPANSION, read
from sglang_epd.families.proof import adapt
from sglang_epd.media import MediaLimits
from sglang_epd.wire import Layout, TensorSpec
from sglang_epd.wire.http import decode_body, encode_body


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 8, 7)).save(file, "png")
    return file.getvalue()


@pytest.fixture
def processor():
    return Processor()


@pytest.fixture
def preparer(processor):
    adapter = adapt(processor, "SomeForConditionalGeneration", Family())
    return PicturePreparer(adapter, "bfloat16", 16, MediaLimits())


def test_a_layout_tells_all_that_a_prompt_needs(preparer, processor):
    prepared = preparer.prepare("IMAGE", png(140, 84))
    assert prepared.layout.embedding == TensorSpec("bfloat16", (15, 16))
    assert prepared.layout.grid == [[1, 3, 5]]
    (plain,) = prepared.layout.extra[EXPANSION]
    expansion = read(plain)
    assert expansion.runs == [5, 5, 5]
    assert expansion.token == processor._tokenizer.id(PAD)
    assert expansion.text.strip("\n").startswith(PAD)
    assert prepared.patches == 140 * 84 // 14**2
    # As it comes over a wire.
    again = decode_body(encode_body(prepared.layout), Layout, 1 << 16)
    assert read(again.extra[EXPANSION][0]) == expansion


def test_pictures_of_one_shape_may_share_a_forward(preparer):
    one, same, other = (
        preparer.prepare("IMAGE", png(*size)) for size in ((140, 84), (140, 84), (84, 140))
    )
    assert one.group == same.group != other.group
    hash(one.group)


@pytest.mark.parametrize("modality", ["VIDEO", "AUDIO"])
def test_only_pictures_are_taken(preparer, modality):
    assert preparer.modalities == ("IMAGE",)
    with pytest.raises(MediaTypeError, match=f"does not take {modality.lower()} input"):
        preparer.prepare(modality, b"")


def test_what_cannot_be_decoded_or_preprocessed_is_the_users_fault(preparer, processor):
    with pytest.raises(MediaError):
        preparer.prepare("IMAGE", png(140, 84)[:40])

    async def refuse(**_arguments):
        raise ValueError("absolute aspect ratio must be smaller than 200")

    processor.process_mm_data_async = refuse
    with pytest.raises(MediaError, match="aspect ratio must be smaller than 200"):
        preparer.prepare("IMAGE", png(140, 84))
