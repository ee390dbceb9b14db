"""A process with `sglang.Engine`s: does what standard input says, a line of JSON at a time, and
answers each with a line.

start NAME OPTIONS        an engine of these options
generate NAME BODY        its answer; an error as its text
stream NAME BODY          the texts of its pieces
at_once NAME BODIES       the answers of requests that are made together
encode NAME BODY          its answer
precomputed NAME BODY     its answer to embeddings, which this process makes of the pictures
shutdown NAME             the threads that are left in this process
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
import threading
from typing import Any

import sglang
from fastapi import HTTPException
from PIL import Image


def embedded(
    model_path: str, form: str, prompt: str, image_data: list[str], **options: Any
) -> dict[str, Any]:
    """A request whose pictures are embeddings, as `transformers` makes them."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    files = [base64.b64decode(url.partition(",")[2]) for url in image_data]
    pictures = [Image.open(io.BytesIO(file)) for file in files]
    processor = AutoProcessor.from_pretrained(model_path)
    inputs = processor(text=[prompt], images=pictures, return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        grid = inputs["image_grid_thw"]
        rows = model.model.get_image_features(inputs["pixel_values"], grid).pooler_output
    name = "feature" if form == "precomputed_embedding" else "precomputed_embeddings"
    item = {"format": form, name: torch.cat(tuple(rows)), "image_grid_thw": grid}
    return {"input_ids": inputs["input_ids"][0].tolist(), "image_data": [item], **options}


def answer(engines: dict[str, Any], verb: str, name: str, told: Any = None) -> Any:
    if verb == "start":
        engines[name] = sglang.Engine(**told)
        return None
    engine = engines[name]
    if verb == "at_once":

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(engine.async_generate(**one) for one in told))

        return engine.loop.run_until_complete(all_of_them())
    if verb == "stream":
        return [piece["text"] for piece in engine.generate(**told, stream=True)]
    if verb == "precomputed":
        return engine.generate(**embedded(**told))
    if verb == "shutdown":
        engines.pop(name).shutdown()
        return [thread.name for thread in threading.enumerate()]
    return getattr(engine, verb)(**told)


def main() -> None:
    engines: dict[str, Any] = {}
    # Whatever else is printed goes where errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            said = {"answer": answer(engines, *json.loads(line))}
        # By another backend SGLang raises the latter, here as on a server.
        except (ValueError, HTTPException) as error:
            said = {"error": str(error)}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
