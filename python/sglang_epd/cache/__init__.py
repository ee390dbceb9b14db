"""What was computed once and may be wanted again, as plain data in this process.

`encoder` and `language` may import this package; it imports `wire` and `errors`. It
holds no clock, socket, thread or configuration.
"""

from sglang_epd.cache.embeddings import EmbeddingCache, Entry
from sglang_epd.cache.layouts import LayoutCache

__all__ = ["EmbeddingCache", "Entry", "LayoutCache"]
