"""Starts the towers that flags ask for, as the encoder server does, and uses each.

    python test/encoder/real_towers.py OUT FLAG...

Writes to OUT (.npz) what each tower makes of three pictures, run alone and together:
`TOWER/alone/N` and `TOWER/together/N`; with several towers also what the first makes
after it has been killed and has come back. Prints the towers' namespace.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from typing import Any

import numpy as np
from PIL import Image

SIZES = ((112, 112), (224, 168), (84, 280))


def pictures() -> list[bytes]:
    """Noise, the same in each process."""
    made = []
    for number, (width, height) in enumerate(SIZES):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        with io.BytesIO() as file:
            Image.fromarray(pixels).save(file, "PNG")
            made.append(file.getvalue())
    return made


async def use(tower: Any, name: str) -> dict[str, np.ndarray]:
    results = {}
    media = pictures()
    for number, data in enumerate(media):
        (embedding,) = await tower.forward([await tower.prepare("IMAGE", data)])
        results[f"{name}/alone/{number}"] = embedding.numpy()
    batch = await asyncio.gather(*(tower.prepare("IMAGE", data) for data in media))
    for number, embedding in enumerate(await tower.forward(batch)):
        results[f"{name}/together/{number}"] = embedding.numpy()
    return results


async def run(server_args: Any) -> dict[str, np.ndarray]:
    from sglang_epd.checkpoint import served
    from sglang_epd.encoder.towers import start_towers, starts_of
    from sglang_epd.errors import MediaError
    from sglang_epd.media import MediaLimits
    from sglang_epd.namespace import namespace

    towers, config = await start_towers(server_args, MediaLimits(), 1024, 2048)
    results: dict[str, np.ndarray] = {}
    try:
        held = served()
        (identity,) = {namespace(config, held, tower.dtype) for tower in towers}
        print("namespace", identity)
        for number, tower in enumerate(towers):
            results |= await use(tower, str(number))
            try:
                await tower.prepare("IMAGE", b"no picture")
                raise AssertionError("a MediaError was to come")
            except MediaError:
                assert tower.alive
        if len(towers) > 1:
            for number in range(len(towers)):
                (rank,) = starts_of(server_args, MediaLimits(), 1, 2048, number)
                typed = rank.options["server_args"]
                assert typed["base_gpu_id"] == rank.options["gpu_id"] == number
            first: Any = towers[0]
            os.kill(first.pids[-1], signal.SIGKILL)
            while first.alive:
                await asyncio.sleep(0.01)
            await use(towers[1], "meanwhile")
            while not first.alive:
                await asyncio.sleep(0.01)
            results |= await use(first, "again")
    finally:
        for tower in towers:
            await tower.close()
    return results


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()

    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    out, *flags = sys.argv[1:]
    server_args = prepare_server_args(flags)
    server_args.resolve_once()
    publish(server_args, role="encoder")
    np.savez(out, allow_pickle=False, **asyncio.run(run(server_args)))


if __name__ == "__main__":
    main()
