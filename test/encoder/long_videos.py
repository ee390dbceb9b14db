"""Has a tower run a video in one pass and in several, on the host and through a device's streams.

    python test/encoder/long_videos.py OUT FLAG...

Writes to OUT (.npz) the embeddings: `one`, `several`, `queued` (several, through streams), and
`another` (one pass over a video whose last step alone differs). Prints the steps of each pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import real_towers
import torch
from queued_engine import DEVICE

from sglang_epd.encoder.model.copyout import CopyOut
from sglang_epd.encoder.model.engine import Engine
from sglang_epd.encoder.tower import Prepared
from sglang_epd.media import MediaLimits

STEPS = 5
ONE_PASS = 1 << 20


def prepared_of(engine: Any, frames: torch.Tensor) -> Prepared:
    """Of features as the model's processor makes them of such frames, if not of a file."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    from sglang_epd.encoder.model.features import mark
    from sglang_epd.wire.messages import Layout, TensorSpec

    processor = engine._encoder.preprocessor.video_processor
    made = processor(videos=[frames], return_tensors="pt", do_sample_frames=False, do_resize=False)
    grid = made["video_grid_thw"]
    item = MultimodalDataItem(modality=Modality.VIDEO, feature=made["pixel_values_videos"])
    item.set("video_grid_thw", grid)
    patches = int(grid.prod())
    width = engine._preparer._widths["VIDEO"]
    spec = TensorSpec(engine.dtype, (patches // processor.merge_size**2, width))
    layout = Layout("VIDEO", spec, grid.tolist())
    return mark(Prepared(layout, patches, "VIDEO", (Modality.VIDEO, [item])), engine._device)


async def run(server_args: Any) -> dict[str, np.ndarray]:
    engine: Any = Engine(server_args, MediaLimits(), 1 << 30, ONE_PASS)
    noise = torch.Generator().manual_seed(7)
    frames = torch.randint(0, 256, (2 * STEPS, 3, 224, 224), generator=noise, dtype=torch.uint8)
    other = frames.clone()
    other[-2:] = 255 - other[-2:]
    runs: list[int] = []
    run_pass = engine._run

    def counted(batch: list[Prepared]) -> Any:
        runs.append(batch[0].layout.grid[0][0])
        return run_pass(batch)

    engine._run = counted
    video = prepared_of(engine, frames)
    results = {}

    async def make(name: str, prepared: Prepared) -> None:
        (made,) = await engine.forward([prepared])
        results[name] = made.float().numpy()

    try:
        await make("one", video)
        await make("another", prepared_of(engine, other))
        if engine._most is not None:
            engine._most = 2 * video.patches // STEPS + 1
        await make("several", video)
        engine._copies = CopyOut(DEVICE)
        engine._lander = engine._threads_of("epd-land", 1)
        await make("queued", video)
        print("passes", *runs)
    finally:
        await engine.close()
    return results


if __name__ == "__main__":
    real_towers.run = run
    real_towers.main()
