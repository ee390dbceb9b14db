"""The SHA-256 that a caller gives of an image, and whether the image has it.

It is compared and forgotten: an item is named by the digest of `media.source`.
"""

from __future__ import annotations

import hashlib
import re

from sglang_epd.errors import MediaError

_FORM = re.compile(r"sha256:[0-9a-f]{64}")


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
