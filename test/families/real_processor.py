"""What one server's processor makes of whole requests, and what an encoder and a language
server make of them, as a JSON line for each of `CASES`.

    PYTHONPATH=test:scripts python test/families/real_processor.py --model-path FOLDER

SGLang's processor is given the files themselves, which it opens. The rest is the package's own:
each item is prepared by itself, and the prompt is laid out from what is told of the items.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

import clips
import photographs

# A prompt with marks, and which pictures and videos they stand for.
CASES: tuple[tuple[str, list[int], list[int]], ...] = (
    ("{v}What is this?", [], [0]),
    ("{v}and{v}What?", [], [0, 0]),
    ("{v}{i}What?", [0], [1]),
    ("{i} then {v}\n\n{i}{v}12?", [0, 1], [0, 1]),
)
_MODALITIES = ("IMAGE", "VIDEO")
# Of embeddings, which nothing here computes.
_WIDTH = 4


def pictures() -> list[bytes]:
    made = []
    for name, size in (("rocket", (280, 392)), ("cat", (140, 112))):
        with io.BytesIO() as file:
            photographs.load(name).resize(size).save(file, "PNG")
            made.append(file.getvalue())
    return made


def videos() -> list[bytes]:
    return [clips.video(), clips.video("rocket", frames=40, size=(320, 192), rate=25.0)]


def one_server(processor: Any, prompt: str, images: list[bytes], films: list[bytes]) -> Any:
    """SGLang's output of a request."""
    request = SimpleNamespace(
        rid="",
        image_data=images or None,
        video_data=films or None,
        audio_data=None,
        modalities=None,
    )
    return asyncio.run(
        processor.process_mm_data_async(
            image_data=request.image_data,
            audio_data=None,
            input_text=prompt,
            request_obj=request,
            max_req_input_len=1 << 30,
        )
    )


def features(items: list[Any], modality: str) -> torch.Tensor | None:
    found = [item.feature for item in items if item.modality.name == modality]
    return torch.cat(found) if found else None


def equal(ours: Any, theirs: Any) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


def compare(adapter: Any, prepare: Any, case: tuple[str, list[int], list[int]]) -> dict[str, Any]:
    from sglang_epd.language.assembly import assemble
    from sglang_epd.transfer.arena import ReceivedItem

    text, shown, told = case
    images = [pictures()[number] for number in shown]
    films = [videos()[number] for number in told]
    written = [adapter.family.written(adapter.processor, name) for name in _MODALITIES]
    prompt = text.format(i=written[0], v=written[1])
    theirs = one_server(adapter.processor, prompt, images, films)
    prepared = [prepare("IMAGE", data) for data in images]
    prepared += [prepare("VIDEO", data) for data in films]
    received = [
        ReceivedItem(bytes([number]) * 32, one.layout, torch.zeros(one.layout.tokens, _WIDTH))
        for number, one in enumerate(prepared)
    ]
    ours = assemble(adapter, prompt, received)
    made = [item for one in prepared for item in one.content[1]]
    return {
        "tokens": len(ours.input_ids),
        "input_ids": list(ours.input_ids) == list(theirs.input_ids),
        "positions": equal(ours.mrope_positions, theirs.mrope_positions),
        "delta": equal(ours.mrope_position_delta, theirs.mrope_position_delta),
        **{
            name: equal(features(made, name), features(theirs.mm_items, name))
            for name in _MODALITIES
        },
    }


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()

    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    from sglang_epd.decoding import Decoders
    from sglang_epd.encoder.model.adapted import AdaptedPreparer
    from sglang_epd.families import family_of
    from sglang_epd.families.adapter import load_processor
    from sglang_epd.families.proof import adapt
    from sglang_epd.media import MediaLimits

    server_args = prepare_server_args(sys.argv[1:])
    server_args.resolve_once()
    publish(server_args, role="encoder")
    config = model_config_of(server_args)
    architecture = config.hf_config.architectures[0]
    family = family_of(architecture)
    assert family is not None
    adapter = adapt(load_processor(server_args, config), architecture, family)
    adapted = AdaptedPreparer(adapter, "float32", _WIDTH, _MODALITIES)
    decoders = Decoders(MediaLimits(), 2 << 30, 2)

    def prepare(modality: str, data: bytes) -> Any:
        with decoders.begin() as decoding:
            return adapted.prepare(modality, data, decoding)

    for case in CASES:
        print(json.dumps(compare(adapter, prepare, case)))
    decoders.close()


if __name__ == "__main__":
    main()
