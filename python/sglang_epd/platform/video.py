"""Videos where nothing can be pinned.

SGLang pins the frames that it has read, for the way to a GPU, unless it runs on its own
CPU engine; without a driver that is an error. And it tries a GPU's decoder first.
"""

from __future__ import annotations

from typing import Any


def install_decoder(decoder: Any) -> None:
    """Decode on the CPU, into ordinary memory (`utils.video_decoder`)."""
    decoder._is_cpu_engine = lambda: True
    decoder._cuda_backend_enabled = False


def install_preprocessing(qwen_vl: Any) -> None:
    """Leave resized frames where they are (`multimodal.processors.qwen_vl`).

    The name in this module only: elsewhere it stands for kernels that are not here.
    """
    qwen_vl.is_cpu = lambda: True
