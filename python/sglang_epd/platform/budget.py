"""How much memory one server takes for its KV cache unless told otherwise."""

from __future__ import annotations

MAX_KV_BYTES = 2 << 30
MAX_TOKENS = 65536
MIN_TOKENS = 4096
FREE_MEMORY_SHARE = 8
MAX_RUNNING_REQUESTS = 128


def kv_tokens(free_bytes: int, bytes_per_token: int) -> int:
    """Tokens of KV cache for one server.

    On a CPU the cache is ordinary memory that several servers share with everything
    else, and torch touches every page of it at start. An eighth of what is free and
    2 GiB at most lets a prefill, a decode and a language server start together on
    24 GiB with room for their weights. The bound on tokens is for small models: more
    than a CPU can prefill in a sitting serves nobody. SGLang lowers the figure further
    if its own profile finds less, so the minimum cannot overcommit.
    """
    affordable = min(free_bytes // FREE_MEMORY_SHARE, MAX_KV_BYTES) // bytes_per_token
    return max(MIN_TOKENS, min(affordable, MAX_TOKENS))
