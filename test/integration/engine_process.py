"""Runs one `sglang.Engine` and prints what it answers, as JSON.

    engine_process.py '{"flags": {...}, "calls": [["generate", {...}], ...]}'

`"precomputed"` as the pictures of a call is an embedding of no picture, the same each time, with
the prompt that it needs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

ROWS, GRID = 48, (1, 12, 16)


def precomputed(engine: Any) -> dict[str, Any]:
    import torch

    manager = engine.tokenizer_manager
    width = manager.model_config.hidden_size
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1))
    text = f"<|vision_start|>{'<|image_pad|>' * ROWS}<|vision_end|>What?"
    picture = {
        "format": "processor_output",
        "precomputed_embeddings": rows,
        "image_grid_thw": torch.tensor([GRID]),
    }
    return {"input_ids": manager.tokenizer.encode(text), "image_data": [picture]}


def main() -> None:
    from sglang import Engine

    asked = json.loads(sys.argv[1])
    engine = Engine(**asked["flags"])
    answers = []
    for method, told in asked["calls"]:
        more = precomputed(engine) if told.get("image_data") == "precomputed" else {}
        found = getattr(engine, method)(**told | more)
        answers.append(found if isinstance(found, list) else [found])
    engine.shutdown()
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
