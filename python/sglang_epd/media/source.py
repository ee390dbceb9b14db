"""Where an item's bytes come from, the digest that names them, and the SHA-256 that a caller
may give of them, which is compared and forgotten.

A source is named here, never read: no file is touched and nothing is fetched.
"""

from __future__ import annotations

import binascii
import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote_to_bytes, urlsplit

import blake3
import msgspec
import pybase64
from PIL import Image
from yarl import URL

from sglang_epd.errors import MediaError

# Bounded, because base64 may be letters for as long as it likes.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,8191}):")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FILE_NAME = re.compile(r"[^/]\.[A-Za-z0-9]{1,5}\Z")
_BLANKS = b" \t\r\n\f"
# Of all of a request's data URLs: base64 needs none, and undoing one takes 0.15 us and fifty
# bytes of memory.
_MAX_ESCAPES = 4096
# Characters of a text that are decoded at a time, while no other thread runs. A multiple of four.
_SLICE = 1 << 20
_MAX_URL_CHARS = 16 * 1024
_MAX_PATH_CHARS = 4096
_MAX_SHOWN_CHARS = 120
# Modes that PNG stores unchanged. Every other mode is converted first, as decoding
# would convert it later.
_PNG_MODES = ("1", "L", "LA", "RGB", "RGBA")
_FORM = re.compile(r"sha256:[0-9a-f]{64}")


class MediaSource(msgspec.Struct, frozen=True, kw_only=True):
    """One item's source: exactly one of the two fields is set.

    Attributes:
        data: the encoded media (a PNG file's bytes, say), as it came inline.
        url: an absolute http, https or file URL that an encoder may fetch. It may
            hold credentials: show it through `display` only.
    """

    data: bytes | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        if (self.data is None) == (self.url is None):
            raise ValueError("a media source is either inline bytes or a URL")

    def __repr__(self) -> str:
        return f"MediaSource({display(self)})"


class EscapeBudget:
    """The percent escapes that a request's data URLs may have, together."""

    def __init__(self) -> None:
        self._left = _MAX_ESCAPES

    def take(self, text: str, begin: int) -> int:
        """Count a text's escapes, from `begin` on; stops counting when there are too many.

        Raises:
            MediaError: the request has too many.
        """
        found = 0
        # Base64 has none, and looking for one is much faster than counting.
        begin = text.find("%", begin)
        for at in range(begin, len(text), _SLICE) if begin >= 0 else ():
            found += text.count("%", at, at + _SLICE)
            if found > self._left:
                raise MediaError(
                    f"a request's data URLs have at most {_MAX_ESCAPES} percent escapes: use base64"
                )
        self._left -= found
        return found


def digest(data: bytes) -> bytes:
    """The blake3 digest of encoded media, 32 bytes: equal bytes, equal item."""
    return blake3.blake3(data).digest()


def parse_source(raw: object, escapes: EscapeBudget | None = None) -> MediaSource:
    """Read one entry of a request's image, video or audio data.

    Args:
        escapes: of the request; its own without.
        raw: encoded media as `bytes`, `bytearray` or `memoryview`; a PIL image; or a
            string: a data URL, bare base64, an http, https or file URL, or a path. A
            dict with a "url" entry, or an object with a `url` attribute (SGLang's
            ImageData and VideoData), stands for that url.

    A string that begins with a slash is a path, unless it is the base64 of a JPEG or
    MP3 file. Other relative paths are told from base64 by their file extension. Base64
    takes some tenths of a millisecond a megabyte.

    Raises:
        MediaError: it is none of these, or empty, or not decodable.
    """
    if isinstance(raw, dict):
        raw = raw.get("url")
    elif not isinstance(raw, str | bytes | bytearray | memoryview | Image.Image):
        raw = getattr(raw, "url", raw)

    if isinstance(raw, str):
        return _parse_text(raw.strip(), escapes or EscapeBudget())
    if isinstance(raw, bytes | bytearray | memoryview):
        return _inline(bytes(raw), "the media")
    if isinstance(raw, Image.Image):
        return MediaSource(data=_encode_png(raw))
    raise MediaError(f"media cannot be given as {type(raw).__name__}")


def display(source: MediaSource) -> str:
    """The source as it may stand in a message or a log line.

    A URL goes without its credentials, query and fragment, and is cut to 120
    characters; inline media is only counted.
    """
    if source.url is None:
        return f"inline media of {len(source.data or b'')} bytes"
    try:
        url = URL(source.url)
        shown = str(url.with_user(None).with_query(None).with_fragment(None))
    except ValueError:
        # A file URL has no host to take the user from; anything else is malformed.
        if not source.url.startswith("file:///"):
            return "a malformed URL"
        shown = source.url.partition("?")[0].partition("#")[0]
    shown = _CONTROL.sub("?", shown)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else shown[: _MAX_SHOWN_CHARS - 3] + "..."


def _parse_text(text: str, escapes: EscapeBudget) -> MediaSource:
    if not text:
        raise MediaError("the media is empty")
    scheme = _SCHEME.match(text)
    if scheme:
        return _parse_url(text, scheme.group(1).lower(), escapes)
    if text.startswith("/"):
        # The base64 of a JPEG file begins with "/9j/", that of an MP3 file with "//".
        may_be_base64 = text.startswith(("/9j/", "//")) or len(text) > _MAX_PATH_CHARS
        data = _decode_base64(text) if may_be_base64 else None
        return _from_path(text) if data is None else _inline(data, "the base64 media")
    data = _decode_base64(text)
    if data is not None:
        return _inline(data, "the base64 media")
    if len(text) <= _MAX_PATH_CHARS and _FILE_NAME.search(text):
        return _from_path(os.path.join(os.getcwd(), text))
    raise MediaError("the media is neither a URL, a data URL, a path nor valid base64")


def _parse_url(text: str, scheme: str, escapes: EscapeBudget) -> MediaSource:
    if scheme == "data":
        return _parse_data_url(text, escapes)
    if scheme not in ("http", "https", "file"):
        raise MediaError(
            f"unknown URL scheme {scheme[:20]!r}: media comes from http, https, file or data URLs"
        )
    if len(text) > _MAX_URL_CHARS:
        raise MediaError(f"a media URL has at most {_MAX_URL_CHARS} characters")
    if _CONTROL.search(text):
        raise MediaError("the media URL holds control characters")
    if scheme == "file":
        return _parse_file_url(text)
    try:
        text.encode()  # a lone surrogate would only fail later, on a wire
        host = URL(text).raw_host
    except ValueError:
        raise MediaError("the media URL is malformed") from None
    if not host:
        raise MediaError("the media URL names no host")
    return MediaSource(url=text)


def _parse_data_url(text: str, escapes: EscapeBudget) -> MediaSource:
    comma = text.find(",")
    if comma < 0:
        raise MediaError("the data URL has no comma before its data")
    begin = comma + 1
    if begin == len(text):
        raise MediaError("the data URL is empty")
    body = _unescaped(text, begin) if escapes.take(text, begin) else None
    data = _decode_base64(text, begin) if body is None else _decode_base64(body)
    if data is None:
        if text[max(0, comma - 7) : comma].lower() == ";base64":
            raise MediaError("the data URL is not valid base64")
        data = _unescaped(text, begin) if body is None else body
    # Without ";base64", RFC 2397 wants the bytes themselves and SGLang reads base64
    # all the same. Media that happens to be well-formed base64 text does not exist,
    # so what decodes is taken as SGLang takes it.
    return _inline(data, "the data URL")


def _parse_file_url(text: str) -> MediaSource:
    try:
        parts = urlsplit(text)
    except ValueError:
        raise MediaError("the file URL is malformed") from None
    if parts.netloc not in ("", "localhost"):
        raise MediaError("a file URL names no other host: file:///path")
    if not parts.path.startswith("/"):
        raise MediaError("a file URL holds an absolute path: file:///path")
    return _from_path(os.fsdecode(unquote_to_bytes(parts.path)))


def _from_path(path: str) -> MediaSource:
    if len(path) > _MAX_PATH_CHARS:
        raise MediaError(f"a path has at most {_MAX_PATH_CHARS} characters")
    if _CONTROL.search(path):
        raise MediaError("the path holds control characters")
    try:
        return MediaSource(url="file://" + quote(os.fsencode(path)))
    except UnicodeEncodeError:
        raise MediaError("the path holds characters that no file name has") from None


def _inline(data: bytes, what: str) -> MediaSource:
    if not data:
        raise MediaError(f"{what} is empty")
    return MediaSource(data=data)


def _decode_base64(body: str | bytes, begin: int = 0) -> bytes | None:
    """Strict base64 (RFC 4648, section 4), but for line breaks and blanks (MIME).

    Slice by slice, and by SGLang's decoder, which lets other threads run: `binascii` takes
    8 ms a megabyte in which none does.
    """
    # ValueError: a text that is not ASCII.
    with contextlib.suppress(binascii.Error, ValueError):
        return _decode_slices(body, begin)
    dense = b"".join(_bytes(part).translate(None, _BLANKS) for part in _slices(body, begin))
    with contextlib.suppress(binascii.Error):
        return _decode_slices(dense, 0)
    return None


def _decode_slices(body: str | bytes, begin: int) -> bytes:
    decoded: list[bytes] = []
    whole = True
    for part in _slices(body, begin):
        if not whole:
            raise binascii.Error("padding before the end")
        decoded.append(pybase64.b64decode(part, validate=True))
        whole = 4 * len(decoded[-1]) == 3 * len(part)
    return b"".join(decoded)


def _slices(body: str | bytes, begin: int) -> Iterator[str | bytes]:
    return (body[at : at + _SLICE] for at in range(begin, len(body), _SLICE))


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "replace")


def _unescaped(text: str, begin: int) -> bytes:
    """A text's bytes from `begin` on, its percent escapes undone slice by slice."""
    parts = []
    while begin < len(text):
        end = begin + _SLICE
        # Not within an escape.
        while end < len(text) and (cut := text.rfind("%", end - 2, end)) >= 0:
            end = cut + 3
        parts.append(unquote_to_bytes(text[begin:end].encode("utf-8", "replace")))
        begin = end
    return b"".join(parts)


def _encode_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    try:
        if image.mode not in _PNG_MODES:
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        # Light compression: these bytes live as long as the request does. Colour
        # profiles are not part of the pixels, so they stay out of the digest.
        image.save(file, "PNG", compress_level=1, icc_profile=None)
    except Exception as error:  # a lazily opened image fails here, with errors of its format
        raise MediaError(f"the PIL image cannot be read ({type(error).__name__})") from error
    return file.getvalue()


def parse_content_hash(given: object) -> str:
    """A caller's `content_hash` in small letters; empty where there is none.

    Raises:
        MediaError: it is not `sha256:` and 64 hexadecimal digits.
    """
    if given is None:
        return ""
    # The prefix has no capitals in SGLang either.
    text = given[:7] + given[7:].lower() if isinstance(given, str) else ""
    if not _FORM.fullmatch(text):
        raise MediaError("a content hash is 'sha256:' and 64 hexadecimal digits")
    return text


def check_content_hash(data: bytes, expected: str, sha256: str = "") -> None:
    """Compare encoded media with a caller's digest of them.

    Args:
        expected: as of `parse_content_hash`; nothing is compared where it is empty.
        sha256: of the data in hexadecimal digits, where it is known.

    Raises:
        MediaError: they are something else.
    """
    if not expected:
        return
    found = f"sha256:{sha256 or hashlib.sha256(data).hexdigest()}"
    if found != expected:
        raise MediaError(
            f"the content hash does not match: expected {expected}, got {found}",
            reason="content_hash",
        )
