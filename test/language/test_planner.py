from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sglang_epd.dispatch.work import Costs, describe
from sglang_epd.errors import MediaError, MediaTypeError
from sglang_epd.language import planner
from sglang_epd.language.planner import content_key, plan
from sglang_epd.media import digest
from sglang_epd.namespace import embedding_key
from sglang_epd.wire.http import EncodeItem, EncodeRequest, ReplyTo, decode_body, encode_body
from sglang_epd.wire.messages import MAX_ITEMS

URL = "http://example.com/cat.png"


@dataclass
class ImageData:
    """Shaped as SGLang's, of images and of videos."""

    url: str
    detail: str | None = "auto"
    max_dynamic_patch: int | None = None
    preprocess_kwargs: dict | None = None
    content_hash: str | None = None
    max_long_side_pixel: int | None = None


def request(images: Any = None, videos: Any = None, audios: Any = None) -> SimpleNamespace:
    return SimpleNamespace(image_data=images, video_data=videos, audio_data=audios)


def test_items_are_numbered_and_labelled_images_first_then_videos_then_audio():
    items = plan(request([b"i1", b"i2"], b"v1", [b"a1", b"a2"]))
    assert [(item.item, item.modality, item.data, item.label) for item in items] == [
        (0, "IMAGE", b"i1", "image 1 of 2"),
        (1, "IMAGE", b"i2", "image 2 of 2"),
        (2, "VIDEO", b"v1", "video 1 of 1"),
        (3, "AUDIO", b"a1", "audio 1 of 2"),
        (4, "AUDIO", b"a2", "audio 2 of 2"),
    ]


def test_lists_in_lists_are_one_list():
    items = plan(request([[b"1", (b"2", [b"3"])], [], b"4"]))
    assert [item.data for item in items] == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize(
    "images", [[b"1", b"2", b"3"], [[b"1", b"2", b"3"]], [[b"1"], [b"2", b"3"]]]
)
def test_media_are_counted_wherever_they_are(images):
    """SGLang takes a list in the list for one."""
    asked = request(images, [b"v"] * 9)
    assert len(plan(asked, limits={"image": 3, "audio": 0})) == 12
    with pytest.raises(MediaError, match="Image count 3 exceeds limit 2 per request"):
        plan(asked, limits={"image": 2})


@pytest.mark.parametrize("entry", [URL, {"url": URL}, ImageData(URL), [URL], (URL,)])
def test_an_entry_is_a_url_however_it_is_wrapped(entry):
    (item,) = plan(request(entry))
    assert (item.url, item.data, item.options) == (URL, None, {})


@pytest.mark.parametrize(
    "entry",
    [
        b"\x89PNG",
        base64.b64encode(b"\x89PNG").decode(),
        "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode(),
        {"url": "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()},
    ],
)
def test_inline_media_is_decoded_here(entry):
    (item,) = plan(request(entry))
    assert (item.url, item.data) == (None, b"\x89PNG")


def test_a_picture_object_becomes_bytes():
    (item,) = plan(request(Image.new("RGB", (2, 2))))
    assert item.data.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("entry", "options"),
    [
        (ImageData(URL, detail="high"), {"detail": "high"}),
        (ImageData(URL, max_dynamic_patch=4), {"max_dynamic_patch": 4}),
        (ImageData(URL, preprocess_kwargs={}), {}),
        (ImageData(URL, preprocess_kwargs={"a": 1}), {"preprocess_kwargs": {"a": 1}}),
        (ImageData(URL, content_hash=f"sha256:{'f' * 64}"), {}),
        ({"url": URL, "type": "image", "format": "png", "detail": "auto"}, {}),
        ({"url": URL, "detail": "low", "zoom": 2}, {"detail": "low", "zoom": 2}),
        ({"url": URL, "crop": False, "rotate": 0}, {"crop": False, "rotate": 0}),
    ],
)
def test_only_options_that_change_the_embedding_are_sent(entry, options):
    (item,) = plan(request([entry]))
    assert item.options == options


@pytest.mark.parametrize("bad", ["", "not base64!", "ftp://host/x", {"path": "/x"}, 7, object()])
def test_an_error_names_the_entry_and_not_its_content(bad):
    with pytest.raises(MediaError, match=r"^image 2 of 3: ") as raised:
        plan(request([b"1", bad, b"3"]))
    assert "not base64!" not in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "label"),
    [(request(None, ""), "video 1 of 1"), (request(b"i", None, [b"a", ""]), "audio 2 of 2")],
)
def test_an_error_names_the_modality(asked, label):
    with pytest.raises(MediaError, match=rf"^{label}: "):
        plan(asked)


def test_an_error_keeps_its_class(monkeypatch):
    def too_large(_entry, _escapes):
        raise MediaTypeError("no")

    monkeypatch.setattr(planner, "parse_source", too_large)
    with pytest.raises(MediaTypeError, match="image 1 of 1: no"):
        plan(request(b"1"))


def test_videos_have_options_too():
    limited = ImageData(URL, preprocess_kwargs={"max_frames": 8})
    plain, limited = plan(request(None, [ImageData(URL), limited]))
    assert (plain.options, limited.options) == ({}, {"preprocess_kwargs": {"max_frames": 8}})


@pytest.mark.parametrize("empty", [None, [], [[], ()], [None]])
def test_a_request_without_any_media_is_refused(empty):
    with pytest.raises(MediaError, match="empty"):
        plan(request(empty))


def test_there_is_a_limit_to_the_items_of_a_request():
    assert len(plan(request([b"x"] * MAX_ITEMS))) == MAX_ITEMS
    with pytest.raises(MediaError, match=f"at most {MAX_ITEMS}.*{MAX_ITEMS + 1}"):
        plan(request([b"x"] * (MAX_ITEMS + 1)))


def encoders_key(item: EncodeItem) -> bytes:
    """As `encoder.service` makes it of what it is sent."""
    asked = EncodeRequest("r", "id", 1.0, ReplyTo("tcp://host:1", "t"), [item])
    (sent,) = decode_body(encode_body(asked), EncodeRequest, 1 << 20).items
    assert sent.data is not None
    return embedding_key("id", digest(sent.data), sent.modality, sent.options)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    data=st.binary(min_size=1, max_size=64),
    modality=st.sampled_from(["IMAGE", "VIDEO", "AUDIO"]),
    options=st.dictionaries(st.text(max_size=8), JSON, max_size=3),
)
def test_the_key_is_the_one_that_an_encoder_makes_of_what_it_is_sent(data, modality, options):
    item = EncodeItem(0, modality, "item 1 of 1", data=data, options=options)
    assert content_key(item, "id") == encoders_key(item)
    assert content_key(item, "other") != encoders_key(item)


def test_what_has_to_be_fetched_and_what_cannot_be_described_have_no_key():
    assert content_key(EncodeItem(0, "IMAGE", "x", url="http://host/x"), "id") == b""
    odd = EncodeItem(0, "IMAGE", "x", data=b"x", options={"detail": object()})
    assert content_key(odd, "id") == b""


CAT = b"\x89PNG cat"
HASH = f"sha256:{hashlib.sha256(CAT).hexdigest()}"
OTHER = f"sha256:{'0' * 64}"


def hashed(images: Any, *hashes: Any) -> SimpleNamespace:
    return SimpleNamespace(**vars(request(images, [b"video"])), mm_content_hashes=list(hashes))


@pytest.mark.parametrize("given", [HASH, HASH[:7] + HASH[7:].upper()])
def test_what_has_its_hash_is_planned_as_without_it(given):
    (plain,) = plan(request(CAT))
    entry = {"url": base64.b64encode(CAT).decode(), "content_hash": given}
    assert plan(request([entry])) == [plain]
    assert content_key(plan(request([entry]))[0], "a/b/c") == content_key(plain, "a/b/c")
    assert plan(hashed([CAT], given))[0].data == CAT
    assert plan(hashed([entry], given))[0].data == CAT


def test_what_is_behind_a_url_takes_its_hash_to_the_encoder():
    entry = ImageData(URL, content_hash=HASH)
    told = [item.content_hash for item in plan(hashed([URL, entry, CAT], OTHER, None, HASH))]
    assert told == [OTHER, HASH, "", ""], "inline media are compared here; videos have none"


@pytest.mark.parametrize(
    ("images", "hashes", "message"),
    [
        ([CAT, CAT], [HASH, OTHER], rf"image 2 of 2: .* expected {OTHER}, got {HASH}"),
        ([ImageData("data:," + "cat", content_hash=OTHER)], [None], "image 1 of 1: the content"),
        ([CAT], ["sha256:00"], "image 1 of 1: a content hash is 'sha256:'"),
        ([CAT], [HASH + "\n"], "image 1 of 1: a content hash is"),
        ([CAT], ["md5:" + "0" * 64], "a content hash is"),
        ([CAT], [7], "a content hash is"),
        ([CAT], [HASH, HASH], "mm_content_hashes has 2 entries for 1 images"),
        ([], [HASH], "mm_content_hashes has 1 entries for 0 images"),
        ([ImageData(URL, content_hash=HASH)], [OTHER], "image 1 of 1: it has two"),
    ],
)
def test_another_hash_is_the_requests_error(images, hashes, message):
    with pytest.raises(MediaError, match=message) as raised:
        plan(hashed(images, *hashes))
    assert raised.value.status == 400


def test_hashes_that_are_no_list_are_the_requests_error():
    asked = hashed([CAT])
    asked.mm_content_hashes = HASH
    with pytest.raises(MediaError, match="mm_content_hashes has 1 entries for 1 images"):
        plan(asked)


def salted(entry=b"png", **salts):
    (item,) = plan(SimpleNamespace(image_data=entry, video_data=None, audio_data=None, **salts))
    return item


def test_requests_that_share_no_kv_share_no_key():
    apart = [
        salted(),
        salted(cache_salt="a"),
        salted(cache_salt="b"),
        salted(extra_key="a"),
        salted(cache_salt="a", extra_key="b"),
        salted(cache_salt="b", extra_key="a"),
        salted(cache_salt="ab"),
        salted(extra_key="\ud800"),
    ]
    keys = [content_key(item, "ns") for item in apart]
    assert len(set(keys)) == len(keys)
    assert len({work.key for work in describe(apart, Costs())}) == len(apart)
    assert content_key(salted(cache_salt="a"), "ns") == keys[1]
    assert content_key(salted(cache_salt="", extra_key=None), "ns") == keys[0]


def test_an_encoder_knows_a_salted_key_and_no_salt():
    item = salted(cache_salt="secret salt")
    assert encoders_key(item) == content_key(item, "id")
    asked = EncodeRequest("r", "ns", 1.0, ReplyTo("tcp://h:1", "t"), [item])
    assert b"secret salt" not in encode_body(asked)


def test_no_entry_says_whose_it_is():
    """Who may name media may not name another tenant's salt."""
    other = salted(cache_salt="other").options
    forged = {"url": f"data:,{base64.b64encode(b'png').decode()}", **other}
    assert salted(forged).options == {}
    assert salted(forged, cache_salt="mine").options == salted(cache_salt="mine").options
    assert salted(ImageData(URL), cache_salt="mine").options == salted(cache_salt="mine").options


def test_options_that_are_nested_too_deeply_have_no_key():
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    (item,) = plan(request({"url": "data:,png", "x": nested}))
    assert content_key(item, "id") == b"", "and raises nothing"
