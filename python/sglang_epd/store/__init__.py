"""Embeddings beyond one process: Mooncake Store, Redis or Valkey, a folder of files.

The encoder may import this package; it imports `wire`, `config` and `errors`. It knows
bytes by name and when to leave a store alone; what an embedding is made from, and who
waits for it, is not its business.
"""

from sglang_epd.store.entry import Entry
from sglang_epd.store.shared import Observer, SharedStore, open_store
from sglang_epd.store.url import StoreUrl

__all__ = ["Entry", "Observer", "SharedStore", "StoreUrl", "open_store"]
