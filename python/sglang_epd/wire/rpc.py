"""The encode API over gRPC: names, and the place of the parts of an HTTP answer.

`Encode` takes the pieces of a body of `wire.http`, a message a piece, and the headers as metadata.
Its answer's body is a message; the status and `Retry-After` are trailing metadata. `Status`
answers as `GET /v1/status`.
"""

from __future__ import annotations

SCHEME = "grpc://"
SERVICE = "sglang_epd.Encoder"
ENCODE = f"/{SERVICE}/Encode"
STATUS = f"/{SERVICE}/Status"
# Of the body; `content-length` would be of gRPC's frames.
LENGTH = "epd-length"
CODE = "epd-status"
AGAIN = "retry-after"
