"""How a request tells the scheduler which ticket its items come under.

SGLang carries `encoder_urls`, a list of strings, from the tokenizer to the scheduler
and copies it to every sample of an n > 1 request. We put one string in it.
"""

from __future__ import annotations

import base64

from sglang_epd.errors import ProtocolError
from sglang_epd.wire import Expect, decode_message, encode_message


def write(expect: Expect) -> list[str]:
    """The manifest as it travels in `encoder_urls`."""
    return [base64.b64encode(encode_message(expect)).decode()]


def read(encoder_urls: list[str] | None) -> Expect:
    """The manifest of a request that waits for items.

    Raises:
        ProtocolError: there is none.
    """
    if not encoder_urls:
        raise ProtocolError("the request carries no manifest")
    try:
        message = decode_message(base64.b64decode(encoder_urls[0], validate=True))
    except (TypeError, ValueError, ProtocolError) as error:
        # `encoder_urls` is a field of SGLang's API, so a user may have written it.
        raise ProtocolError(f"the request carries no manifest: {error}") from None
    if not isinstance(message, Expect):
        raise ProtocolError("the request carries something else than a manifest")
    return message
