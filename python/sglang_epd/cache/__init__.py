"""Results of one process that a later request may use again, as plain data.

It holds no clock, socket, thread or configuration.
"""

from sglang_epd.cache.embeddings import EmbeddingCache, Entry, LayoutCache
from sglang_epd.cache.urls import Remembered, UrlMemory

__all__ = ["EmbeddingCache", "Entry", "LayoutCache", "Remembered", "UrlMemory"]
