"""A request's manifest: one string about its media, from process to process.

SGLang carries `encoder_urls`, a list of strings, from the tokenizer to the scheduler,
copies it to every sample of an n > 1 request, and broadcasts it to the other ranks. We
put one string in it: from the tokenizer, which ticket the items come under; from the
rank that leads a group of schedulers, the outcome of them. A request for an embedding of a
prompt has no such field; there the string is one of its sampling parameters, `custom_params`.
Until SGLang makes a scheduler's request of a prompt, the string stands beside the prompt's own
fields, which SGLang logs (`--log-requests`) and exports.

`encoder_urls` is a field of SGLang's public API, so a user may have written it. Our
string carries a code made with a secret that only this server's processes share.
"""

from __future__ import annotations

import base64
import hmac
from typing import Any
from urllib.parse import quote

from blake3 import blake3

from sglang_epd.errors import ProtocolError
from sglang_epd.wire.messages import (
    MAX_CONTROL_BYTES,
    MAX_HEADER_BYTES,
    Beginning,
    Expect,
    Message,
    Settled,
    decode_message,
    encode_message,
)

_CODE_BYTES = 32
# Among the `custom_params` of a request for an embedding.
_PARAMETER = "sglang_epd_manifest"
_ATTRIBUTE = "_sglang_epd_manifest"


def name(request: Any) -> str:
    """What a scheduler knows a request by.

    Tokenizer workers see that no two of their own requests have one id, and know nothing of each
    other's. Users choose ids, and may write an address of a worker where there is one only: no two
    pairs of these have one name.
    """
    worker = getattr(request, "http_worker_ipc", None)
    rid = quote(str(request.rid), errors="surrogatepass")
    return f"{rid} of {worker}" if worker else rid


def waits(request: Any) -> bool:
    """Whether a message to a scheduler is a request that waits for its media."""
    if hasattr(request, "encoder_urls"):
        return bool(request.need_wait_for_mm_inputs)
    return carried(request) is not None


def attach(prompt: Any, manifest: list[str] | None) -> None:
    """Put this manifest beside SGLang's fields of a prompt; None for no longer any."""
    setattr(prompt, _ATTRIBUTE, manifest)


def hand_on(prompt: Any, request: Any) -> None:
    """Have a scheduler's request carry what stands beside its prompt."""
    manifest: list[str] | None = getattr(prompt, _ATTRIBUTE, None)
    if manifest is not None:
        carry(request, manifest)


def carried(request: Any) -> list[str] | None:
    """The manifest that a scheduler's request carries."""
    if hasattr(request, "encoder_urls"):
        urls: list[str] | None = request.encoder_urls
        return urls
    found = _own(getattr(request, "sampling_params", None)).get(_PARAMETER)
    return found if isinstance(found, list) else None


def carry(request: Any, manifest: list[str]) -> None:
    """Have a scheduler's request carry this manifest from now on."""
    if hasattr(request, "encoder_urls"):
        request.encoder_urls = manifest
    else:
        own = _own(request.sampling_params)
        request.sampling_params.custom_params = own | {_PARAMETER: manifest}


def _own(sampling_params: Any) -> dict[str, Any]:
    """A request's custom parameters, in which a user may have written anything."""
    own = getattr(sampling_params, "custom_params", None)
    return own if isinstance(own, dict) else {}


def write(message: Expect | Settled | Beginning, secret: bytes) -> list[str]:
    """A message as it travels in `encoder_urls`.

    Args:
        secret: 32 bytes.
    """
    frame = encode_message(message)
    return [base64.b64encode(_code(frame, secret) + frame).decode()]


def read_announced(encoder_urls: list[str] | None, secret: bytes) -> Expect | Settled:
    """The manifest of a tokenizer's request: how its items were announced, or the error that
    another request for them has had. `ProtocolError` as of `read`."""
    message = read(encoder_urls, secret, MAX_HEADER_BYTES)
    if isinstance(message, Expect):
        return message
    # No outcome with items, which would be read.
    if isinstance(message, Settled) and message.code and not message.items:
        return message
    raise ProtocolError("the request carries something else than a manifest")


def read_settled(encoder_urls: list[str] | None, secret: bytes) -> Settled:
    """The outcome that a leading rank has written; `ProtocolError` as of `read`."""
    message = read(encoder_urls, secret)
    if not isinstance(message, Settled):
        raise ProtocolError("the request carries something else than an outcome")
    return message


def read(
    encoder_urls: list[str] | None, secret: bytes, max_bytes: int = MAX_CONTROL_BYTES
) -> Message:
    """A request's manifest, of either kind.

    Args:
        encoder_urls: SGLang's field of a request, in which a manifest travels between processes
            of one server.
        secret: the server's, which the manifest is signed with.
        max_bytes: of a manifest, once decoded.

    Raises:
        ProtocolError: there is none of this server's.
    """
    if not encoder_urls:
        raise ProtocolError("the request carries no manifest")
    try:
        raw = base64.b64decode(encoder_urls[0], validate=True)
        code, frame = raw[:_CODE_BYTES], raw[_CODE_BYTES:]
        if not hmac.compare_digest(code, _code(frame, secret)):
            raise ProtocolError("it was not written by this server")
        return decode_message(frame, max_bytes)
    except (TypeError, ValueError, LookupError, ProtocolError) as error:
        raise ProtocolError(f"the request carries no manifest: {error}") from None


def _code(frame: bytes, secret: bytes) -> bytes:
    return blake3(frame, key=secret).digest(_CODE_BYTES)
