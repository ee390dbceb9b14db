from __future__ import annotations

import pytest
from PIL import ExifTags, Image

import clips
from families.conftest import FRAME, PAD, Processor
from media.samples import encoded
from packages import sglang_module
from sglang_epd.decoding import Decoders
from sglang_epd.device import DEVICE_ERRORS
from sglang_epd.encoder.model.adapted import AdaptedPreparer
from sglang_epd.errors import MediaError, MediaTooLargeError, MediaTypeError
from sglang_epd.families import Family
from sglang_epd.families.expansion import EXPANSION, read
from sglang_epd.families.proof import adapt
from sglang_epd.media import MediaLimits
from sglang_epd.wire.http import decode_body, encode_body
from sglang_epd.wire.messages import Layout, TensorSpec


def png(width: int, height: int) -> bytes:
    return encoded(Image.new("RGB", (width, height), (9, 8, 7)))


@pytest.fixture
def processor():
    return Processor()


@pytest.fixture(scope="module")
def decoders():
    decoders = Decoders(MediaLimits(), 1 << 30, 2)
    yield decoders
    decoders.close()


class Whole:
    """Decodes and prepares an item."""

    def __init__(self, preparer, decoders):
        self._preparer = preparer
        self._decoders = decoders
        self.modalities = preparer.modalities

    def prepare(self, modality, data):
        with self._decoders.begin() as decoding:
            return self._preparer.prepare(modality, data, decoding)


@pytest.fixture
def preparer(processor, decoders):
    adapter = adapt(processor, "SomeForConditionalGeneration", Family())
    return Whole(AdaptedPreparer(adapter, "bfloat16", 16), decoders)


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


@pytest.mark.parametrize(
    ("cuda", "kind", "turned"),
    [
        (False, "JPEG", True),
        (True, "JPEG", False),
        (True, "PNG", True),
    ],
)
def test_pictures_are_turned_where_a_colocated_server_turns_them(
    processor, decoders, monkeypatch, cuda, kind, turned
):
    """On CUDA nvJPEG decodes JPEGs, which turns nothing."""
    monkeypatch.setattr(sglang_module("utils.common"), "is_cuda", lambda: cuda)
    processor.smart_rgb_conversion = processor.gpu_image_decode = True
    adapter = adapt(processor, "SomeForConditionalGeneration", Family())
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    data = encoded(Image.new("RGB", (140, 84)), kind, exif=exif)
    prepared = Whole(AdaptedPreparer(adapter, "bfloat16", 16), decoders).prepare("IMAGE", data)
    assert prepared.layout.grid == ([[1, 5, 3]] if turned else [[1, 3, 5]])


def test_pictures_of_one_shape_may_share_a_forward(preparer):
    one, same, other = (
        preparer.prepare("IMAGE", png(*size)) for size in ((140, 84), (140, 84), (84, 140))
    )
    assert one.group == same.group != other.group
    hash(one.group)


@pytest.fixture(scope="module")
def film() -> bytes:
    """Three seconds of 84 x 56 pixels, eight frames a second."""
    return clips.video(size=(84, 56))


@pytest.fixture
def watching(processor, decoders):
    """Preparers of what a server's children read; limits make children of their own."""
    made = []

    def make(**limits):
        adapter = adapt(processor, "SomeForConditionalGeneration", Family())
        towers = ("IMAGE", "VIDEO")
        if limits:
            made.append(Decoders(MediaLimits(**limits), 1 << 30, 2))
        reading = made[-1] if limits else decoders
        return Whole(AdaptedPreparer(adapter, "bfloat16", 16, towers), reading)

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("modality", ["VIDEO", "AUDIO"])
def test_what_there_is_no_tower_for_is_not_taken(preparer, modality):
    assert preparer.modalities == ("IMAGE",)
    with pytest.raises(MediaTypeError, match=f"does not take {modality.lower()} input"):
        preparer.prepare(modality, b"")


def test_videos_that_cannot_be_proven_are_refused_with_the_reason(processor, watching):
    processor.shares_frames = True
    preparer = watching()
    assert preparer.modalities == ("IMAGE",)
    with pytest.raises(MediaTypeError, match=r"video input: .*depends on what is around it"):
        preparer.prepare("VIDEO", b"")


def test_a_videos_layout_has_the_time_of_each_frame(watching, processor, film):
    prepared = watching().prepare("VIDEO", film)
    assert prepared.layout.modality == "VIDEO"
    assert prepared.layout.embedding == TensorSpec("bfloat16", (9, 16))
    assert prepared.layout.grid == [[3, 1, 3]]
    expansion = read(prepared.layout.extra[EXPANSION][0])
    assert expansion.runs == [3, 3, 3]
    assert expansion.token == processor._tokenizer.id(FRAME)
    assert [line[:2] for line in expansion.text.splitlines()] == ["0s", "1s", "2s"]
    modality, items = prepared.content
    assert modality.name == "VIDEO"
    assert items[0].feature.shape == (3, 3, 28, 28)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_video_frames": 23}, "24 frames, limit 23"),
        ({"max_video_pixels": 84 * 56 - 1}, "84 x 56 px"),
        # Three frames are asked for.
        ({"max_video_total_pixels": 84 * 56 * 2}, "3 frames of 84 x 56 px"),
    ],
)
def test_videos_are_bounded_by_what_the_processor_reads_of_them(watching, film, limits, told):
    with pytest.raises(MediaTooLargeError, match=told):
        watching(**limits).prepare("VIDEO", film)


def test_damaged_videos_are_the_users_fault(watching, film):
    preparer = watching()
    damaged = film[: len(film) // 2] + bytes(len(film) - len(film) // 2)
    for data in (b"", b"#EXTM3U\nhttp://127.0.0.1/", b"garbage" * 9, film[:300], damaged):
        with pytest.raises(MediaError):
            preparer.prepare("VIDEO", data)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("Could not push packet to decoder: Invalid data"), MediaError),
        # Out of memory, say: another encoder may have room.
        *((kind("CUDA error"), kind) for kind in DEVICE_ERRORS),
    ],
)
def test_a_decoder_that_fails_halfway_is_the_files_fault_and_a_device_is_not(
    watching, processor, film, error, told
):
    async def fail(**_arguments):
        raise error

    preparer = watching()
    processor.process_mm_data_async = fail
    with pytest.raises(told, match=r"damaged or truncated|CUDA error"):
        preparer.prepare("VIDEO", film)


def test_what_cannot_be_decoded_or_preprocessed_is_the_users_fault(preparer, processor):
    with pytest.raises(MediaError):
        preparer.prepare("IMAGE", png(140, 84)[:40])
    error: Exception

    async def refuse(**_arguments):
        raise error

    processor.process_mm_data_async = refuse
    error = ValueError("absolute aspect ratio must be smaller than 200")
    with pytest.raises(MediaError, match=str(error)):
        preparer.prepare("IMAGE", png(140, 84))
    for error in (
        ZeroDivisionError("division by zero"),
        RuntimeError("Input and output sizes should be greater than 0"),
    ):
        with pytest.raises(MediaError, match="too narrow"):
            preparer.prepare("IMAGE", png(1, 84))
        with pytest.raises(type(error)):
            preparer.prepare("IMAGE", png(140, 84))
    for error in [kind("CUDA error") for kind in DEVICE_ERRORS]:
        with pytest.raises(type(error)):
            preparer.prepare("IMAGE", png(140, 84))
