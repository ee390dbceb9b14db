"""What the servers say to each other: typed, versioned messages and raw tensor frames.

Nothing here opens a socket or knows who is speaking. It imports only `errors`,
and torch for tensor frames; every other folder may import it. No message is ever
pickled, and every bound is checked before anything is allocated.
"""

from sglang_epd.wire.envelope import MAJOR, MINOR, open_envelope, seal
from sglang_epd.wire.http import (
    EncodeItem,
    EncodeReply,
    EncodeRequest,
    ItemOutcome,
    ReplyTo,
)
from sglang_epd.wire.messages import (
    Ack,
    Cancel,
    Decline,
    Expect,
    Fail,
    Grant,
    Hello,
    Layout,
    Message,
    Offer,
    Payload,
    TensorSpec,
    Welcome,
    decode_message,
    encode_message,
)
from sglang_epd.wire.tensors import read_tensor, tensor_frame, tensor_spec

__all__ = [
    "MAJOR",
    "MINOR",
    "Ack",
    "Cancel",
    "Decline",
    "EncodeItem",
    "EncodeReply",
    "EncodeRequest",
    "Expect",
    "Fail",
    "Grant",
    "Hello",
    "ItemOutcome",
    "Layout",
    "Message",
    "Offer",
    "Payload",
    "ReplyTo",
    "TensorSpec",
    "Welcome",
    "decode_message",
    "encode_message",
    "open_envelope",
    "read_tensor",
    "seal",
    "tensor_frame",
    "tensor_spec",
]
