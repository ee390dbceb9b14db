"""SGLang's own tower behind this package's engine, in a released model's shape.

The checkpoint has a configuration, a tokenizer and a processor, and no weights: SGLang draws
them (`--load-format dummy`).
"""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.shapes import SHAPES
from gpu.towers import Passes
from sglang_epd.encoder.model import features
from sglang_epd.encoder.model.engine import Engine
from sglang_epd.encoder.tower import Prepared
from sglang_epd.media import MediaLimits

ROOT = Path(__file__).resolve().parents[2]
_PINNED_BYTES = features.PINNED_BYTES
_FAMILIES = {"qwen3_vl": "tiny-qwen3-vl", "qwen2_5_vl": "tiny-qwen2_5-vl"}


class TimedEngine(Engine):
    """The encoder server's engine, whose passes are timed.

    Attributes:
        passes: that it ran.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.passes = Passes(str(self._encoder.device).startswith("cuda"))
        self._side_by_side = self._threads
        self._most_depth = super().depth

    @property
    def preparers(self) -> int:
        return self._side_by_side

    @property
    def depth(self) -> int:
        return min(self._most_depth, super().depth)

    @property
    def attention(self) -> str:
        from sglang.srt.runtime_context import get_mm

        return str(get_mm().mm_attention_backend or "SGLang's choice")

    def tower(self, preparers: int, torch_threads: int, depth: int) -> TimedEngine:
        """This one, which from now on prepares so many pictures side by side, in new threads.

        Args:
            preparers: of them.
            torch_threads: that torch uses for one picture; 0 leaves it as it is.
            depth: passes handed to it at a time.
        """
        start = partial(torch.set_num_threads, torch_threads) if torch_threads else None
        self._side_by_side, self._most_depth = preparers, depth
        for pool in (self._preparing, self._encoder.preprocessor.preproc_executor):
            pool.shutdown()
        self._preparing = ThreadPoolExecutor(preparers, "epd-prepare", start)
        self._encoder.preprocessor.preproc_executor = ThreadPoolExecutor(
            preparers, "sglang-preprocess", start
        )
        self.passes.clear()
        return self

    def pin(self, pinned: bool) -> None:
        """Whether patches are pinned from now on."""
        features.PINNED_BYTES = _PINNED_BYTES if pinned else 0

    def prepared(self, data: bytes) -> Prepared:
        """A picture; blocks."""
        return asyncio.run(self.prepare("IMAGE", data))

    def run_on_device(self, batch: Sequence[Prepared]) -> None:
        """A pass of what `on_device` gave."""
        super()._run(batch)

    def on_device(self, prepared: Prepared) -> Prepared:
        """The same picture, its patches on the device."""
        modality, items, made = prepared.content
        there = [copy.copy(item) for item in items]
        for item in there:
            item.feature = item.feature.to(self._encoder.device)
        return Prepared(prepared.layout, prepared.patches, prepared.group, (modality, there, made))

    def _run(self, batch: Sequence[Prepared]) -> torch.Tensor:
        with self.passes.timed(batch):
            return super()._run(batch)


def load(shape: str, folder: Path, decode_bytes: int, *flags: str) -> TimedEngine:
    """The engine of an encoder server of a shape, as its process would load it.

    Args:
        shape: of SHAPES.
        folder: that the checkpoint is written to.
        decode_bytes: for all that is decoded at a time.
        flags: of the server.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    model = checkpoint(shape, folder)
    words = ["--model-path", str(model), "--encoder-only", "--load-format", "dummy", *flags]
    server_args = prepare_server_args(words)
    server_args.resolve_once()
    publish(server_args, role="encoder")
    return TimedEngine(server_args, MediaLimits(), decode_bytes)


def checkpoint(shape: str, folder: Path) -> Path:
    """A checkpoint of a shape without weights, below a folder."""
    sys.path.append(str(ROOT / "scripts"))
    from make_checkpoint import ensure

    made = SHAPES[shape]
    model = folder / shape
    shutil.copytree(ensure(_FAMILIES[made.family]), model, ignore=_without_weights)
    path = model / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] |= made.options
    config["text_config"] |= {"hidden_size": made.options["out_hidden_size"]}
    path.write_text(json.dumps(config))
    path = model / "preprocessor_config.json"
    config = json.loads(path.read_text())
    config["size"] = dict(zip(("shortest_edge", "longest_edge"), made.pixels, strict=True))
    path.write_text(json.dumps(config))
    return model


def _without_weights(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith((".safetensors", ".index.json"))]
