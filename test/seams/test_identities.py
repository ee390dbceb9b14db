"""Media named by their content, on a server that encodes them itself."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_epd.errors import ConfigError, MediaError
from sglang_epd.families import Family, family_of
from sglang_epd.language.planner import content_key
from sglang_epd.seams import identities
from sglang_epd.seams.identities import REQUEST_OPTIONS, ByContent, name_items, plan_without_options
from sglang_epd.wire.http import EncodeItem

NAMESPACE = "Model/float32/0123456789abcdef"
SETTING = "SGLANG_EPD_CONTENT_IDENTITY"


class Item(SimpleNamespace):
    def __init__(self, modality: str = "IMAGE") -> None:
        super().__init__(modality=SimpleNamespace(name=modality), identity=None)

    def set_identity(self, identity: bytes) -> None:
        self.identity = identity


def output(*modalities: str) -> SimpleNamespace:
    items = [Item(modality) for modality in modalities]
    return SimpleNamespace(mm_items=items, padded_input_ids=[1, 7, 7, 2])


def given(found: SimpleNamespace) -> list[bytes | None]:
    return [item.identity for item in found.mm_items]


def test_items_are_named_in_order_within_their_modality() -> None:
    found = output("VIDEO", "IMAGE", "IMAGE")
    name_items(found, {"IMAGE": [b"a", b"b"], "VIDEO": [b"c"]})
    assert given(found) == [b"c", b"a", b"b"]
    assert found.padded_input_ids is None, "it holds the old names"


@pytest.mark.parametrize("images", [0, 1, 3])
def test_what_was_made_into_fewer_items_or_more_keeps_its_names(images) -> None:
    found = output(*["IMAGE"] * images, "VIDEO")
    name_items(found, {"IMAGE": [b"a", b"b"]})
    assert not any(given(found))
    assert found.padded_input_ids == [1, 7, 7, 2]


def test_what_has_no_key_keeps_its_name() -> None:
    found = output("IMAGE", "IMAGE")
    name_items(found, {"IMAGE": [b"", b"b"]})
    assert given(found) == [None, b"b"]


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def request(images: list[Any], **changes: Any) -> SimpleNamespace:
    media = {"image_data": images, "video_data": None, "audio_data": None}
    return SimpleNamespace(**{**media, "mm_processor_kwargs": None, **changes})


async def process(asked: SimpleNamespace) -> list[bytes | None]:
    async def original(*args: Any, request_obj: Any, **options: Any) -> Any:
        assert (args, request_obj, options) == (("a",), asked, {"input_text": "text"})
        return output(*["IMAGE"] * len(asked.image_data))

    return given(
        await ByContent(original, NAMESPACE).process("a", request_obj=asked, input_text="text")
    )


def key(data: bytes, **options: Any) -> bytes:
    return content_key(EncodeItem(0, "IMAGE", "", data=data, options=options), NAMESPACE)


async def test_the_name_is_an_encoders_key() -> None:
    bare = base64.b64encode(b"one").decode()
    found = await process(request([data_url(b"one"), bare, "https://host/a.png", b"two"]))
    # What SGLang fetches it names.
    assert found == [key(b"one"), key(b"one"), None, key(b"two")]


async def test_an_items_options_are_in_its_name() -> None:
    content_hash = f"sha256:{hashlib.sha256(b'one').hexdigest()}"
    found = await process(
        request(
            [
                {"url": data_url(b"one"), "detail": "high"},
                {"url": data_url(b"one"), "detail": "auto", "content_hash": content_hash},
            ]
        )
    )
    assert found == [key(b"one", detail="high"), key(b"one")]
    assert found[0] != found[1]


async def test_requests_that_are_apart_in_the_prefix_cache_have_names_of_their_own() -> None:
    names = [
        (await process(request([data_url(b"one")], **salts)))[0]
        for salts in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"})
    ]
    assert names[0] == key(b"one")
    assert len(set(names)) == 4


@pytest.mark.parametrize("option", identities.REQUEST_OPTIONS)
async def test_options_of_the_request_leave_the_names_to_sglang(option: str) -> None:
    assert await process(request([b"one"], **{option: {"a": 1}})) == [None]


@pytest.mark.parametrize(
    "images",
    [[{"format": "precomputed_embedding", "feature": object()}], [object()], ["data:,"], [b""]],
)
async def test_what_is_no_media_is_left_to_sglang(images: list[Any]) -> None:
    assert await process(request(images)) == [None]


async def test_no_output_and_errors_pass() -> None:
    async def nothing(**_options: Any) -> None:
        return None

    async def fails(**_options: Any) -> None:
        raise ValueError("bad")

    asked = request([b"one"])
    assert await ByContent(nothing, NAMESPACE).process(request_obj=asked) is None
    with pytest.raises(ValueError, match="bad"):
        await ByContent(fails, NAMESPACE).process(request_obj=asked)


# Where it is done


@pytest.fixture
def server(flags, tmp_path):
    """Sets up a server of these flags; whether its processor is another then."""

    def set_up(architecture: str = "Qwen2VLForConditionalGeneration", **disagg: bool) -> bool:
        named = dict.fromkeys(("revision", "download_dir", "quantization"))
        model = {"model_path": str(tmp_path), "load_format": "dummy", **named}
        flags(disagg=disagg, model=model, mm={"mm_process_config": {}})
        config = SimpleNamespace(architectures=[architecture], to_dict=dict)
        processor = SimpleNamespace(process_mm_data_async="SGLang's own")
        manager = SimpleNamespace(
            mm_processor=processor,
            model_config=SimpleNamespace(hf_config=config, dtype="torch.float32"),
        )
        identities.set_up(manager)
        return processor.process_mm_data_async != "SGLang's own"

    return set_up


def test_it_is_off_unless_it_is_asked_for(server, monkeypatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    # Nor is anything else read on a server that this package does not serve.
    monkeypatch.setenv("SGLANG_EPD_TYPO", "1")
    assert not server()
    monkeypatch.delenv("SGLANG_EPD_TYPO")
    monkeypatch.setenv(SETTING, "off")
    assert not server()
    monkeypatch.setenv(SETTING, "on")
    assert server()


@pytest.mark.parametrize("flag", ["language_only", "encoder_only"])
def test_servers_that_do_not_encode_all_themselves_are_left_alone(server, monkeypatch, flag):
    monkeypatch.setenv(SETTING, "on")
    assert not server(**{flag: True})


def test_a_server_of_text_is_left_alone(flags, monkeypatch) -> None:
    monkeypatch.setenv(SETTING, "on")
    flags(disagg={})
    identities.set_up(SimpleNamespace(mm_processor=None))


def test_another_family_is_refused(server, monkeypatch) -> None:
    monkeypatch.setenv(SETTING, "on")
    with pytest.raises(ConfigError, match=f"{SETTING}.*InternVLChatModel"):
        server("InternVLChatModel")


URL = "data:video/mp4;base64," + base64.b64encode(b"film").decode()


@dataclass
class Video:
    """Shaped as SGLang's `VideoData`."""

    url: str
    preprocess_kwargs: dict[str, float] | None = None
    max_long_side_pixel: int | None = None


def asking(video: object = URL, image: object = None, **options: object) -> SimpleNamespace:
    return SimpleNamespace(image_data=image, video_data=[video], audio_data=None, **options)


def test_media_without_options_are_planned():
    image = {"url": URL, "detail": "high"}
    # What SGLang makes of every chat with a video.
    config = {"_question": "What happens?"}
    items = plan_without_options(
        asking(Video(URL), image, video_config=config, max_dynamic_patch=0), Family()
    )
    assert [(item.modality, item.data) for item in items] == [
        ("IMAGE", b"film"),
        ("VIDEO", b"film"),
    ]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (asking(Video(URL, {"fps": 1.0, "max_frames": 4})), "fps, max_frames$"),
        (asking(Video(URL, max_long_side_pixel=64)), "max_long_side_pixel$"),
        (asking({"url": URL, "fps": 1}), "fps$"),
        (asking(video_config={"_question": "What?", "max_pixels": 64}), "max_pixels$"),
        *((asking(**{option: 3}), f"{option}$") for option in REQUEST_OPTIONS),
    ],
)
def test_options_are_refused_by_name(asked, told):
    with pytest.raises(MediaError, match=f"takes no such options for its media: {told}"):
        plan_without_options(asked, Family())


def test_options_that_encoders_follow_are_the_items():
    family = family_of("Glm5NextForConditionalGeneration")
    asked = {"max_frames": 4, "max_image_tokens": 64}
    (item,) = plan_without_options(asking(Video(URL, asked)), family)
    assert item.options == {"preprocess_kwargs": asked}
    two = asking(Video(URL, asked))
    two.video_data.append(URL)
    with pytest.raises(MediaError, match=r"no such options for its media: max_image_tokens$"):
        plan_without_options(two, family)


def test_what_keeps_a_request_apart_is_no_option_of_its_media():
    (item,) = plan_without_options(asking({"url": URL}, cache_salt="mine"), Family())
    assert item.options.keys() == {"cache_salt"}
