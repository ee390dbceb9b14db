"""Users' media decoded apart: in children whose memory and time are bounded.

The children (`child` and below) import nothing of SGLang and no model. A server's side
is `decoders`, with one budget of bytes (`budget`) for all that is decoded at a time, in
the children and after them, until an item has been prepared.
"""

from sglang_epd.decoding.decoders import Decoders, Decoding, Film

__all__ = ["Decoders", "Decoding", "Film"]
