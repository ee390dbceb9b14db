"""Which tests use the same servers, and in which order they run.

Starting a topology takes up to a minute, so its tests run in a row, in one process.
"""

from __future__ import annotations

from pathlib import Path

# Files, and whose servers they use: what takes longest comes first, and those that are compared
# with the same server in a row. Files that are not named use "qwen2_5", or that and "qwen3".
_USES = {
    "test_engine": "qwen2_5",
    "test_reuse": "qwen2_5",
    "test_budget": "qwen2_5",
    "test_towers": "towers",
    "test_survival_links": "two_encoders",
    "test_survival": "two_encoders",
    "test_backends": "backends",
    "test_emulation": "emulated",
    "test_chaos": "chaos",
    "test_early_faults": "early",
    "test_early_video": "long_videos",
    "test_hub": "hub",
    "test_adaptive": "adaptive",
    "test_store": "store",
    # So many servers that nothing of its process runs beside them.
    "test_router": "two_of_each",
    "test_grpc": "grpc",
    "test_large": "large",
    "test_trace": "trace",
    "test_rival": "in_tree",
    # Compared with servers of their own.
    "": "qwen3",
    "test_content": "content",
    "test_quantised": "quantised",
    "test_embeddings": "embeddings",
    "test_rerank": "reranker",
    "test_sglangs_own": "sglangs_own",
    "test_adapters": "adapters",
    "test_role_switch": "role_switch",
    "test_start_scripts": "start_scripts",
    "test_audio": "audio",
    "test_families": "families",
    "test_family_video": "families",
    "test_cli": "up",
    "test_demo": "demo",
    "test_observe": "observe",
    "test_refusal": "none",
}
_FAMILIES = "families"
_ORDER = ["qwen2_5", *dict.fromkeys(_USES.values())]


def servers(nodeid: str) -> str:
    """Whose servers a test uses; ids of the tests of families begin with the family."""
    path, _, name = nodeid.partition("::")
    uses = _USES.get(Path(path).stem)
    first = name.partition("[")[2].partition("-")[0].rstrip("]")
    if uses == _FAMILIES:
        return f"{uses} {first}"
    return uses or ("qwen3" if first == "qwen3" else "qwen2_5")


def place(nodeid: str) -> tuple[int, str, bool, int]:
    """What tests are sorted by."""
    path, _, name = nodeid.partition("::")
    kind, _, family = servers(nodeid).partition(" ")
    file = Path(path).stem
    # Of a family's backends the first has the reference.
    others = bool(family) and any(f"-{one}-" in name for one in ("zmq_to_tokenizer", "mooncake"))
    within = list(_USES).index(file) if file in _USES else -1
    return _ORDER.index(kind), family, others, within
