"""Embeddings beyond one process: Mooncake Store, a folder of files.

It keeps embeddings by key, and decides when to leave a store alone.
"""

from sglang_epd.store.entry import StoredEntry
from sglang_epd.store.global_cache import store_url
from sglang_epd.store.shared import Observer, SharedStore, open_store
from sglang_epd.store.url import StoreUrl

__all__ = ["Observer", "SharedStore", "StoreUrl", "StoredEntry", "open_store", "store_url"]
