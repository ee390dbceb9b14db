"""Checkpoints for servers on one GPU, with random weights, made where they are served.

    python benchmark/gpu/serve_checkpoints.py 8b --folder /dev/shm/checkpoints

The tiny ones have attention heads that GPU kernels take, and answers that depend on the
pictures. `8b` and `7b` have the shapes of Qwen3-VL-8B and Qwen2.5-VL-7B; they are drawn on
the GPU, in bfloat16, and keep pictures as large as the released processors do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from checkpoints.families.qwen2_5_vl import Qwen25VL  # noqa: E402
from checkpoints.families.qwen3_vl import Qwen3VL  # noqa: E402
from checkpoints.family import Family  # noqa: E402
from checkpoints.qwen import QwenVision, write_json  # noqa: E402
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_SHARD_MB = 4000
# Embeddings of the largest picture, as released processors have it.
_MOST_ROWS = 16_384


class Large(QwenVision):
    """A family at its released size.

    Attributes:
        vocabulary: rows of the embedding table, most of which no text uses.
        device: that weights are drawn on.
    """

    vocabulary = 151_936
    device = "cuda"

    def model(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForMultimodalLM

        config = self.config(spec, tokenizer)
        config.text_config.vocab_size = self.vocabulary
        with torch.device(self.device):
            return AutoModelForMultimodalLM.from_config(config, dtype=torch.bfloat16)

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        super().write_processors(spec, tokenizer, folder)
        for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
            written = json.loads((folder / name).read_text())
            written["size"]["longest_edge"] = _MOST_ROWS * (2 * self.patch_size) ** 2
            write_json(folder / name, written)


class LargeQwen3VL(Large, Qwen3VL):
    pass


class LargeQwen25VL(Large, Qwen25VL):
    vocabulary = 152_064


_TINY_TEXT = TextSpec(3, 256, 512, 2, 2, head_dim=128)
CHECKPOINTS: dict[str, tuple[Family, CheckpointSpec]] = {
    "tiny-3": (
        Qwen3VL(),
        CheckpointSpec("tiny-3", _TINY_TEXT, VisionSpec(4, 128, 256, 2, (0, 2)), seed=6),
    ),
    "tiny-2.5": (
        Qwen25VL(),
        CheckpointSpec("tiny-2.5", _TINY_TEXT, VisionSpec(4, 128, 256, 2, (1, 3)), seed=1),
    ),
    "8b": (
        LargeQwen3VL(),
        CheckpointSpec(
            "8b",
            TextSpec(36, 4096, 12_288, 32, 8, head_dim=128),
            VisionSpec(27, 1152, 4304, 16, (8, 16, 24)),
            shard_mb=_SHARD_MB,
        ),
    ),
    "7b": (
        LargeQwen25VL(),
        CheckpointSpec(
            "7b",
            TextSpec(28, 3584, 18_944, 28, 4, head_dim=128),
            VisionSpec(32, 1280, 3420, 16, (7, 15, 23, 31)),
            shard_mb=_SHARD_MB,
        ),
    ),
}


def make(name: str, folder: Path) -> Path:
    """The checkpoint `name` below `folder`, built where it is missing.

    Raises:
        KeyError: no checkpoint has that name.
    """
    from checkpoints.build import build

    family, spec = CHECKPOINTS[name]
    final = folder / name
    if not final.exists():
        unfinished = folder / f".{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        build(family, spec, unfinished)
        unfinished.rename(final)
    return final


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=CHECKPOINTS)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    for name in options.names:
        begin = time.monotonic()
        made = make(name, options.folder)
        nbytes = sum(file.stat().st_size for file in made.iterdir())
        print(f"{made}: {nbytes / 1e9:.2f} GB in {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
