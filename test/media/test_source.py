from __future__ import annotations

import base64
import contextlib
import io
import os

import blake3
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from media.samples import encoded, picture
from sglang_epd.errors import MediaError
from sglang_epd.media import MediaSource, digest, display, parse_source

PNG = encoded(picture())
JPEG = encoded(picture(), "JPEG")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Holder:
    def __init__(self, url: object) -> None:
        self.url = url


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (PNG, PNG),
        (bytearray(PNG), PNG),
        (memoryview(PNG), PNG),
        (b64(PNG), PNG),
        (b64(JPEG), JPEG),  # begins with "/9j/", as a path would
        (b64(JPEG * 10), JPEG * 10),
        (b64(b"\xff\xfb\x90\x00" * 9), b"\xff\xfb\x90\x00" * 9),  # MP3: "//uQ"
        (f"data:image/png;base64,{b64(PNG)}", PNG),
        (f"DATA:image/png;charset=x;BASE64,{b64(PNG)}", PNG),
        (f"data:,{b64(PNG)}", PNG),  # SGLang reads base64 whatever the URL says
        (base64.encodebytes(PNG).decode(), PNG),  # in lines, as MIME has it
        (b64(PNG).replace("+", "%2B").join(("data:;base64,", "")), PNG),
        ("data:image/gif,GIF89a%01%00%ff", b"GIF89a\x01\x00\xff"),
        ("data:," + "%" * 4 + "*", b"%" * 4 + b"*"),
        ({"url": f"data:;base64,{b64(PNG)}", "detail": "low"}, PNG),
        (Holder(b64(PNG)), PNG),
    ],
)
def test_inline_media(raw: object, data: bytes) -> None:
    assert parse_source(raw) == MediaSource(data=data)


@pytest.mark.parametrize(
    ("raw", "url"),
    [
        ("http://example.com/a.png", "http://example.com/a.png"),
        ("  HTTPS://example.com/a?b=c#d \n", "HTTPS://example.com/a?b=c#d"),
        ("file:///data/a%20b.png", "file:///data/a%20b.png"),
        ("file://localhost/data/a.png?x=1", "file:///data/a.png"),
        ("/data/a b.png", "file:///data/a%20b.png"),
        ("/data/100%25/a#b?.png", "file:///data/100%2525/a%23b%3F.png"),
        ("/9j/a-folder/a.png", "file:///9j/a-folder/a.png"),
        ("//data/a.png", "file:////data/a.png"),
        ("clips/a.mp4", f"file://{os.getcwd()}/clips/a.mp4"),
        (Holder("https://example.com/"), "https://example.com/"),
    ],
)
def test_media_elsewhere(raw: object, url: str) -> None:
    assert parse_source(raw) == MediaSource(url=url)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "empty"),
        ("", "empty"),
        (" \n", "empty"),
        ("data:image/png;base64,", "data URL is empty"),
        ("data:,", "data URL is empty"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,iVBORw0", "not valid base64"),  # cut short
        ("data:image/png;base64,iVBORw0K=", "not valid base64"),  # filled up too far
        ("data:image/png;base64,iVBO==Rw", "not valid base64"),
        ("data:image/png;base64,iVBORw0\u212a", "not valid base64"),
        ("iVBORw0KGgo*", "neither"),
        ("a picture of a cat", "neither"),
        ("ftp://example.com/a.png", "unknown URL scheme 'ftp'"),
        ("javascript:alert(1)", "unknown URL scheme"),
        ("x" * 5000 + "://a", "unknown URL scheme"),
        ("http://", "no host"),
        ("http:///a.png", "no host"),
        ("http://h:99999/", "malformed"),
        ("http://h:port/", "malformed"),
        ("http://[::1/", "malformed"),
        ("http://example.com/a\r\nHost: b", "control characters"),
        ("http://example.com/" + "a" * 20_000, "at most"),
        ("http://h/\ud800", "malformed"),
        ("data:," + "%41" * 500_001, "use base64"),
        ("file://server/share/a.png", "no other host"),
        ("file:a.png", "absolute path"),
        ("file://[/a", "malformed"),
        ("/data/a\x00.png", "control characters"),
        ("/" + "a-" * 5000, "at most"),
        (None, "NoneType"),
        (7, "int"),
        ([PNG], "list"),
        ({"uri": "http://example.com"}, "NoneType"),
        (Holder(Holder("http://example.com")), "Holder"),
    ],
)
def test_what_is_no_source_is_refused_with_the_reason(raw: object, reason: str) -> None:
    with pytest.raises(MediaError, match=reason) as caught:
        parse_source(raw)
    assert caught.value.status == 400
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "F"])
def test_pil_images_keep_their_pixels(mode: str) -> None:
    image = picture(mode="L").convert(mode) if mode == "F" else picture().convert(mode)
    data = parse_source(image).data
    assert data is not None
    again = Image.open(io.BytesIO(data))
    assert again.convert("RGB").tobytes() == image.convert("RGB").tobytes()
    assert parse_source(image.copy()).data == data


def test_a_colour_profile_is_no_part_of_a_pil_image() -> None:
    image = picture()
    image.info["icc_profile"] = b"profile"
    assert parse_source(image) == parse_source(picture())


def test_broken_pil_images_are_refused() -> None:
    with pytest.raises(MediaError, match="cannot be read"):
        parse_source(Image.open(io.BytesIO(encoded(picture(400, 300))[:5000])))
    with pytest.raises(MediaError, match="cannot be read"):
        parse_source(Image.new("RGB", (0, 3)))


def test_a_source_is_bytes_or_a_url() -> None:
    for fields in ({}, {"data": b"x", "url": "http://h"}):
        with pytest.raises(ValueError, match="either"):
            MediaSource(**fields)


def test_digest_is_blake3() -> None:
    assert digest(b"abc") == blake3.blake3(b"abc").digest()
    assert len(digest(b"")) == 32


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "https://bob:hunter2@example.com:8443/a/b.png?token=t#f",
            "https://example.com:8443/a/b.png",
        ),
        ("http://bob@[::1]/a", "http://[::1]/a"),
        ("http://bob:hun:ter@2@example.com/", "http://example.com/"),
        ("file:///data/a.png", "file:///data/a.png"),
        ("ftp://bob:hunter2@h/a", "ftp://h/a"),
        ("http:bob:hunter2@h", "a malformed URL"),
        ("http://bob:hunter2@h:port/", "a malformed URL"),
        ("http://[bob:hunter2@h/", "a malformed URL"),
    ],
)
def test_display_leaves_out_secrets(url: str, shown: str) -> None:
    source = MediaSource(url=url)
    assert display(source) == shown
    assert repr(source) == f"MediaSource({shown})"


def test_display_is_short() -> None:
    assert len(display(MediaSource(url="http://h/" + "a" * 999))) == 120
    assert display(MediaSource(data=b"secret")) == "inline media of 6 bytes"
    assert "secret" not in repr(MediaSource(data=b"secret"))


SCHEMES = st.sampled_from(
    [
        "",
        "data:",
        "data:;base64,",
        "data:,",
        "http://",
        "https://",
        "file://",
        "file:///",
        "/",
        "//",
    ]
)


@given(SCHEMES, st.text())
def test_parse_raises_nothing_but_media_errors(scheme: str, rest: str) -> None:
    try:
        source = parse_source(scheme + rest)
    except MediaError as error:
        assert len(rest) < 12 or rest not in error.message
    else:
        assert len(display(source)) <= 120


@given(st.text(st.characters(exclude_categories=[])))  # lone surrogates among them
def test_parse_takes_any_characters(text: str) -> None:
    for raw in (text, f"/{text}", f"{text}.png", f"http://h/{text}", f"data:,{text}"):
        with contextlib.suppress(MediaError):
            source = parse_source(raw)
            display(source)
            assert (
                msgspec.msgpack.decode(msgspec.msgpack.encode(source), type=MediaSource) == source
            )


@given(st.binary(min_size=1))
def test_every_way_to_give_bytes_gives_the_same_source(data: bytes) -> None:
    expected = MediaSource(data=data)
    assert parse_source(data) == expected
    assert parse_source(f"data:image/png;base64,{b64(data)}") == expected


@given(
    st.from_regex(r"[a-zA-Z0-9]{6,12}", fullmatch=True),
    st.from_regex(r"[a-z]{3,9}", fullmatch=True),
)
def test_credentials_are_never_shown(password: str, path: str) -> None:
    shown = display(parse_source(f"https://me:{password}@host.example/{path}?k={password}"))
    assert password not in shown.replace("host.example", "").replace(path, "")


@pytest.mark.parametrize("size", range(8, 32))
def test_slices_do_not_show(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """However the text falls into them; base64's are of a multiple of four."""
    lines = base64.encodebytes(PNG).decode()
    escaped = "data:,%41B%%4%41%4" + "%ff*" * 20
    monkeypatch.setattr("sglang_epd.media.source._SLICE", size - size % 4)
    for text in (b64(PNG), lines, f"data:;base64,{b64(PNG)}", f"data:;base64,{lines}"):
        assert parse_source(text).data == PNG
    monkeypatch.setattr("sglang_epd.media.source._SLICE", size)
    assert parse_source(escaped).data == b"AB%%4A%4" + b"\xff*" * 20
    monkeypatch.setattr("sglang_epd.media.source._SLICE", size - size % 4)
    padded = b64(bytes(10)) + b64(bytes(30))
    with pytest.raises(MediaError, match="neither"):
        parse_source(padded)
