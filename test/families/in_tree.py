"""What SGLang's own encoder and language server make of requests, what this package's make of
them, and what one server makes of them: a JSON line for each case of each family that is named.

    PYTHONPATH=test:scripts python test/families/in_tree.py NAME ...

No weights and no server are needed: classes are SGLang's, but no model has a module. Each family
is a fork of one process that has imported SGLang.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import re
import sys
import tempfile
import traceback
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from PIL import ExifTags, Image
from tokenizers.processors import TemplateProcessing

import clips
import photographs
from checkpoints.families import FAMILIES
from checkpoints.tokenizer import END_OF_TEXT
from make_checkpoint import ensure

# Of the items of cases; none of the pictures is square.
MODALITIES = {
    "photo": "IMAGE",
    "strip": "IMAGE",
    "clear": "IMAGE",
    "turned": "IMAGE",
    "small": "IMAGE",
    "odd": "IMAGE",
    "film": "VIDEO",
    "pair": "VIDEO",
    "still": "VIDEO",
    "slow": "VIDEO",
    "heard": "VIDEO",
    "quick": "VIDEO",
    "shrunk": "VIDEO",
    "narrow": "VIDEO",
    "low": "AUDIO",
    "high": "AUDIO",
}
# What a prompt says, and the items that its marks stand for: images, then videos, then sounds.
CASES = {
    "images side by side": ("{i}{i}What?", ["photo", "strip"]),
    "images that are not plain": ("{i}{i}What?", ["clear", "turned"]),
    "images in text": ("First {i} then {i}\n\n12{i}?", ["strip", "photo", "strip"]),
    "videos": ("{v} and {v}What?", ["film", "slow"]),
    "sounds": ("{a} and {a}What?", ["low", "high"]),
    "image and video": ("{v}{i} then?", ["photo", "slow"]),
    "all three": ("{v}{i} then {a}What?", ["photo", "slow", "low"]),
    "sound in a video": ("{v}What?", ["heard"]),
}
# Prompts of token ids: as no tokenizer makes them, one of each letter.
SPELT_CASES = {"images in spelt text": ("{i}What{i}then?", ["photo", "strip"])}
# As SGLang's own chat template of InternVL writes images.
TEMPLATE_CASES = {"an image by its placeholder": ("{c}\nWhat?", ["photo"])}
# With a tokenizer that puts a token before each text that it is given. No checkpoint of the
# Qwen-VL models has one.
BEGUN_CASES = {
    "a chat with its token": ("{b}{i}What?", ["photo"]),
    "a text without it": ("{i}What?", ["photo"]),
    "a video after text": ("{b}What:{v}", ["film"]),
}
# Of these families; Qwen's do not read one frame.
FEW = {"muse_spark", "minimax_m3_vl"}
FEW_CASES = {
    "a video of two frames": ("{v}What?", ["pair"]),
    "a video of one frame": ("{v}What?", ["still"]),
}
# Those of families that follow options, of which SGLang's servers take all.
OPTION_CASES = {
    "options of images": ("{i}{i}What?", ["small", "photo"]),
    "options of videos": ("{v} and {v}What?", ["quick", "film"]),
    "sizes of videos": ("{v} and {v}What?", ["shrunk", "slow"]),
    "bounds of a video": ("{v}What?", ["narrow"]),
    "bounds of one of two": ("{v} and {v}What?", ["narrow", "film"]),
    "options that are none": ("{i}What?", ["odd"]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "small": {"max_long_side_pixel": 112, "preprocess_kwargs": {"max_pixels": 112 * 112}},
    "quick": {"preprocess_kwargs": {"fps": 2.0, "max_frames": 4}},
    "shrunk": {"max_long_side_pixel": 112},
    "narrow": {"preprocess_kwargs": {"max_tokens_per_frame": 16, "max_image_tokens": 64}},
    "odd": {"max_long_side_pixel": 113},
}
# Of embeddings, which nothing here computes.
_WIDTH = 4
# Where SGLang looks at the machine while it resolves its flags.
_FLAGS = {"glm5_next": ["--disable-radix-cache"]}
_CAPABILITY = (9, 0)


class Other(NamedTuple):
    """Cases of a family that is not listed, or of a listed one that is served otherwise, or has
    another `config.json`."""

    family: str
    cases: Sequence[str]
    flags: Sequence[str] = ()
    config: Callable[[dict[str, Any]], None] = lambda _config: None


def _of_internlm2(config: dict[str, Any]) -> None:
    config["llm_config"]["architectures"] = ["InternLM2ForCausalLM"]


def _of_glm_ocr(config: dict[str, Any]) -> None:
    config["architectures"] = ["GlmOcrForConditionalGeneration"]


_SIZED = {"video": {"size": {"shortest_edge": 4096, "longest_edge": 60_000}, "max_frames": 8}}
_OF_GLM4V = ["options of videos", "bounds of a video", "images that are not plain", *BEGUN_CASES]
OTHERS = {
    "glm4v": Other("glm4v", _OF_GLM4V),
    "glm4v as GLM-OCR": Other("glm4v", ["images side by side"], config=_of_glm_ocr),
    "gemma3": Other("gemma3", [*SPELT_CASES]),
    "internvl_chat": Other("internvl_chat", [*TEMPLATE_CASES]),
    "internvl_chat of InternLM2": Other(
        "internvl_chat", [*TEMPLATE_CASES, "images in text"], config=_of_internlm2
    ),
    "qwen3_vl with sizes": Other(
        "qwen3_vl", ["videos"], flags=("--mm-process-config", json.dumps(_SIZED))
    ),
}


class Item(NamedTuple):
    modality: str
    data: bytes
    options: dict[str, Any]

    @property
    def url(self) -> str:
        kind = {"IMAGE": "image/png", "VIDEO": "video/mp4", "AUDIO": "audio/wav"}[self.modality]
        return f"data:{kind};base64,{base64.b64encode(self.data).decode()}"


def media() -> dict[str, Item]:
    rocket = clips.moving_crop("rocket", frames=20, size=(320, 192))
    files = {
        "photo": _picture("rocket", 280, 392),
        "strip": _picture("cat", 203, 112),
        **_not_plain(),
        "film": clips.video(),
        "pair": clips.encode(rocket[:2], rate=12.5),
        "still": clips.encode(rocket[:1], rate=12.5),
        "slow": clips.encode(rocket, rate=12.5),
        "heard": clips.heard(clips.moving_crop("coffee")),
        "low": clips.audio("low"),
        "high": clips.audio("high", seconds=3.3),
    }
    files |= {"small": files["photo"], "odd": files["photo"]}
    files |= {"quick": files["film"], "shrunk": files["film"], "narrow": files["slow"]}
    return {
        name: Item(modality, files[name], OPTIONS.get(name, {}))
        for name, modality in MODALITIES.items()
    }


def request_of(items: Sequence[Item]) -> Any:
    """The request as chats make it."""
    from sglang.srt.utils import ImageData, VideoData

    kinds = {"IMAGE": ImageData, "VIDEO": VideoData}
    given: dict[str, Any] = {"image_data": None, "video_data": None, "audio_data": None}
    for item in items:
        told = kinds[item.modality](item.url, **item.options) if item.options else item.url
        name = f"{item.modality.lower()}_data"
        given[name] = [*(given[name] or ()), told]
    return SimpleNamespace(rid="", modalities=None, mm_content_hashes=None, input_ids=None, **given)


def _picture(name: str, width: int, height: int) -> bytes:
    with io.BytesIO() as file:
        photographs.load(name).resize((width, height)).save(file, "PNG")
        return file.getvalue()


def _not_plain() -> dict[str, bytes]:
    """A picture that is clear along one edge, and one that is to be turned."""
    image = photographs.load("cat").resize((196, 280))
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    with io.BytesIO() as clear, io.BytesIO() as turned:
        image.save(clear, "PNG")
        image.convert("RGB").save(turned, "PNG", exif=exif)
        return {"clear": clear.getvalue(), "turned": turned.getvalue()}


class Made(NamedTuple):
    """A prompt laid out, and what towers get."""

    output: Any
    features: dict[str, list[torch.Tensor]]


class Sides:
    """The three sides, of one model; `decoders` are of all models."""

    def __init__(self, server_args: Any, config: Any, decoders: Any) -> None:
        from sglang_epd.device import device_of
        from sglang_epd.encoder.model.adapted import AdaptedPreparer
        from sglang_epd.encoder.model.preparing import Preparer
        from sglang_epd.families import Family, family_of, takes_options
        from sglang_epd.families.adapter import load_processor
        from sglang_epd.language.planner import plan
        from sglang_epd.media import MediaLimits
        from sglang_epd.seams.identities import plan_without_options
        from sglang_epd.seams.prompt import lays_out

        architecture = config.hf_config.architectures[0]
        family = family_of(architecture)
        self._plan: Any = plan
        if not takes_options(architecture):
            self._plan = partial(plan_without_options, family=family or Family())
        self._reads_text = family is not None
        self._model = _model(config)
        self._one = load_processor(server_args, config)
        self._encoder = _encoder(server_args, config, _model(config))
        self._lays_out = lays_out(load_processor(server_args, config), architecture)
        self._decoders = decoders
        self._preparer: Any
        if family is None:
            encoder = _encoder(server_args, config, self._model)
            device = device_of("cpu", 0)
            self._preparer = Preparer(encoder, "float32", MediaLimits(), device)
        else:
            towers = ("IMAGE", "VIDEO")
            self._preparer = AdaptedPreparer(self._lays_out, "float32", _WIDTH, towers)

    def spelt(self, text: str) -> list[int]:
        """Token ids of a text, one or more of each letter."""
        words = re.split(r"([A-Za-z]+(?![^<>]*>))", text)
        pieces = chain.from_iterable(word if word.isalpha() else [word] for word in words)
        one = getattr(self._one, "inner", self._one)
        encode = partial(one._tokenizer.encode, add_special_tokens=False)
        return [token for piece in pieces if piece for token in encode(piece)]

    def ours(self, prompt: str | list[int], items: Sequence[Item]) -> Made:
        from sglang_epd.language.assembly import assemble
        from sglang_epd.transfer.arena import ReceivedItem
        from sglang_epd.wire.messages import Offer, decode_message, encode_message

        received: list[ReceivedItem] = []
        features: dict[Any, list[Any]] = {}
        for number, item in enumerate(self._plan(request_of(items))):
            with self._decoders.begin() as decoding:
                prepared = self._preparer.prepare(item.modality, item.data, decoding, item.options)
            offer = Offer("ticket", number, bytes([number]) * 32, prepared.layout, 1)
            offered = decode_message(encode_message(offer))
            assert isinstance(offered, Offer)
            layout = offered.layout
            rows = torch.full(layout.embedding.shape, float(number))
            received.append(ReceivedItem(offer.key, layout, rows))
            made = prepared.content[1]
            if patches := getattr(self._preparer, "patches", None):
                made = patches.finish(made)
            features.setdefault(item.modality, []).extend(_features(made))
        output = assemble(self._lays_out, self._scheduled(prompt, items), received)
        for item in output.mm_items:
            number = int(item.precomputed_embeddings[0, 0])
            assert bool((item.precomputed_embeddings == number).all())
            assert items[number].modality == item.modality.name
        return Made(output, features)

    def in_tree(self, prompt: str | list[int], items: Sequence[Item]) -> Made:
        """Each item a part of its own, as from several encoders."""
        from sglang.srt.disaggregation.encoder import preprocessor, receiver, server

        whole = None
        features: dict[Any, list[Any]] = {}
        entries = receiver.MMReceiverBase._extract_url_data(None, request_of(items))
        for number, (item, entry) in enumerate(zip(items, entries, strict=True)):
            modality = entry["modality"]
            asked = receiver._encoder_media_item(entry)
            result = _settled(self._encoder.preprocessor.process_mm_items([asked], modality))
            data = receiver.EmbeddingData(
                "request",
                len(items),
                number,
                result.grid_thw,
                modality,
                torch.zeros(sum(result.token_counts), _WIDTH),
                **server._build_mm_aux_data(result.mm_inputs, self._encoder.model_type),
            )
            if result.mm_inputs.get("video_audio_features"):
                lens = result.mm_inputs["video_audio_segment_lens_flat"]
                data.video_audio_embedding = torch.zeros(sum(lens), _WIDTH)
            whole = receiver._aggregate_embedding_part(whole, data, self._encoder.model_type)
            feature = preprocessor._convert(server._get_mm_feature(result.mm_inputs, modality))
            made = self._encoder._build_model_mm_items(
                feature, result, list(range(len(result.grid_thw))), modality
            )
            features.setdefault(item.modality, []).extend(_features(made))
        assert whole is not None
        output = self._one.get_validated_mm_data(
            self._written(prompt),
            whole.get_embedding(is_concat=True),
            **whole.get_mm_extra_meta(),
        )
        return Made(output, features)

    def one_server(self, prompt: str | list[int], items: Sequence[Item]) -> Made:
        request = request_of(items)
        processed = self._one.process_mm_data_async(
            image_data=request.image_data,
            audio_data=request.audio_data,
            input_text=prompt,
            request_obj=request,
            max_req_input_len=1 << 30,
        )
        features: dict[str, list[torch.Tensor]] = {}
        output = _settled(processed)
        for item in output.mm_items:
            features.setdefault(item.modality.name, []).extend(_features([item]))
        return Made(output, features)

    def compare(self, prompt: str | list[int], items: Sequence[Item]) -> dict[str, Any]:
        """The tokens that ours makes, or its error; and of the others their errors, or how
        ours differs."""
        ours = _tried(lambda: self.ours(prompt, items))
        told: dict[str, Any] = {
            "ours": ours if isinstance(ours, str) else len(ours.output.input_ids)
        }
        for name, side in (("in_tree", self.in_tree), ("one_server", self.one_server)):
            made = _tried(lambda side=side: side(prompt, items))  # type: ignore[misc]
            told[name] = made if isinstance(made, str) else self._differences(ours, made)
        return told

    def follows(self, prompt: str, item: Item) -> bool:
        """Whether one server's answer depends on an item's options."""
        plain = _tried(lambda: self.one_server(prompt, [item._replace(options={})]))
        optioned = _tried(lambda: self.one_server(prompt, [item]))
        if isinstance(optioned, str):
            return plain != optioned
        return bool(self._differences(plain, optioned))

    def begin_texts(self, token: str) -> None:
        """From now on tokenizers put this token before each text."""
        for side in (self._one, self._lays_out):
            processor = getattr(side, "processor", side)
            tokenizer = processor._tokenizer
            tokenizer.bos_token = token
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{token} $A", special_tokens=[(token, tokenizer.bos_token_id)]
            )
            processor._tokenizer_auto_adds_specials = True

    def _scheduled(self, prompt: str | list[int], items: Sequence[Item]) -> Any:
        """The prompt of a chat, or token ids, as a scheduler lays it out."""
        from sglang_epd.seams.prompt import as_tokenized

        if self._reads_text:
            return self._written(prompt)
        ids = prompt if isinstance(prompt, list) else self._one._tokenizer.encode(prompt)
        tokenized = as_tokenized(self._lays_out, ids, [item.modality for item in items])
        return self._written(prompt) if tokenized is None else tokenized

    def _written(self, prompt: str | list[int]) -> Any:
        from sglang.srt.disaggregation.encoder.receiver import _select_mm_processor_prompt

        given = isinstance(prompt, list)
        ids = prompt if given else self._one._tokenizer.encode(prompt)
        request = SimpleNamespace(input_ids=ids, input_text=None if given else prompt)
        return _select_mm_processor_prompt(request, self._one)

    def _differences(self, ours: Made | str, theirs: Made) -> list[str]:
        if isinstance(ours, str):
            return ["answers"]
        one, other = ours.output, theirs.output
        alike = {
            "input_ids": list(one.input_ids) == list(other.input_ids),
            "offsets": _runs(one) == _runs(other),
            "positions": _equal(one.mrope_positions, other.mrope_positions),
            "delta": _equal(one.mrope_position_delta, other.mrope_position_delta),
            "names": self._filled(one) == self._filled(other),
        }
        for modality, made in ours.features.items():
            found = theirs.features.get(modality, [])
            alike[f"features of {modality}"] = torch.equal(_flat(made), _flat(found))
        return [name for name, same in alike.items() if not same]

    def _filled(self, output: Any) -> list[int]:
        """The prompt with names of items in it, as the scheduler puts them there."""
        from sglang.srt.managers.schedule_batch import MultimodalInputs, MultimodalProcessorOutput

        for item in output.mm_items:
            # One a modality: one server may have all of a prompt's pictures in one item.
            item.set_identity(item.modality.name.encode().ljust(32))
        output.padded_input_ids = None
        if not hasattr(self._model, "pad_input_ids"):
            return MultimodalProcessorOutput.build_padded_input_ids(
                output.input_ids, output.mm_items
            )
        inputs = MultimodalInputs.from_processor_output(output)
        return list(self._model.pad_input_ids(array("q", output.input_ids), inputs))


def _tried(make: Callable[[], Made]) -> Made | str:
    try:
        return make()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def _settled(work: Any) -> Any:
    return asyncio.run(work)


def _features(items: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for item in items:
        several = isinstance(item.feature, list | tuple)
        found += [torch.as_tensor(one) for one in (item.feature if several else [item.feature])]
    return found


def _flat(features: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([feature.flatten().float() for feature in features])


def _runs(output: Any) -> list[tuple[str, int, int]]:
    return sorted(
        (item.modality.name, *run) for item in output.mm_items for run in item.offsets or ()
    )


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(torch.as_tensor(one).flatten(), torch.as_tensor(other).flatten())


def _model(config: Any) -> Any:
    """An instance of SGLang's class of the model with what its preprocessing asks for."""
    from sglang.srt.managers.tokenizer_manager import get_processor_wrapper
    from sglang.srt.models.registry import ModelRegistry

    settings = config.hf_config
    kind, _ = ModelRegistry.resolve_model_cls(settings.architectures)
    model = _bare(kind)
    model.config = settings
    match settings.model_type:
        case "mimo_v2":
            model._encoder_processor = None
        case "minimax_m3_vl":
            model.encoder_processor = get_processor_wrapper()
        case "muse_spark":
            samples = math.prod(settings.audio_config.patch_sizes)
            model.model = SimpleNamespace(
                vision_tower=SimpleNamespace(config=settings.vision_config),
                audio_tower=SimpleNamespace(patch_size=samples),
            )
        case "qwen3_omni_moe":
            from sglang.srt.models import qwen3_omni_moe

            model.thinker = _bare(qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration)
    return model


def _bare(kind: Any) -> Any:
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    return model


def _encoder(server_args: Any, config: Any, model: Any) -> Any:
    """SGLang's `MMEncoder` without a tower."""
    from sglang.srt.disaggregation.encoder.preprocessor import EncoderPreprocessor
    from sglang.srt.disaggregation.encoder.server import MMEncoder
    from sglang.srt.multimodal.encoder_preprocessing import resolve_encoder_media_processor_config

    encoder = MMEncoder.__new__(MMEncoder)
    encoder.model_config, encoder.model, encoder.device = config, model, "cpu"
    encoder.model_type = config.hf_config.model_type.lower()
    encoder._embedding_dims = encoder._infer_embedding_dims()
    encoder.preprocessor = EncoderPreprocessor(
        server_args,
        config,
        resolve_encoder_media_processor_config(model),
        getattr(model, "preprocess_mm_for_encoder", None),
    )
    return encoder


def run(name: str, folder: str, items: dict[str, Item], decoders: Any) -> None:
    """Print the cases of a listed family, or of one of `OTHERS`."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import get_parallel, publish
    from sglang.srt.server_args import prepare_server_args

    torch.cuda.get_device_capability = lambda *_: _CAPABILITY
    other = OTHERS.get(name)
    family = FAMILIES[name if other is None else other.family]
    flags = [*family.flags.split(), *_FLAGS.get(family.name, ())]
    flags += () if other is None else other.flags
    server_args = prepare_server_args(["--model-path", folder, *flags])
    server_args.resolve_once()
    publish(server_args, role="encoder")
    get_parallel().override_permanently(tp_rank=0, attn_tp_rank=0, attn_tp_size=1)
    sides = Sides(server_args, model_config_of(server_args), decoders)
    marks = {name.upper(): mark for name, mark in family.marks.items()}
    letters = {name[0].lower(): mark for name, mark in marks.items()}
    letters |= {"b": END_OF_TEXT, "c": "<IMG_CONTEXT>"}
    if other is not None:
        every = CASES | SPELT_CASES | TEMPLATE_CASES | OPTION_CASES | BEGUN_CASES | FEW_CASES
        cases = {case: every[case] for case in other.cases}
    else:
        follows = {
            option: sides.follows(f"{marks[items[option].modality]}What?", items[option])
            for option in OPTIONS
            if items[option].modality in marks
        }
        print(json.dumps({"family": name, "case": "options", **follows}), flush=True)
        few = FEW_CASES if name in FEW else {}
        options = OPTION_CASES if any(follows.values()) else {}
        cases = CASES | SPELT_CASES | few | options | BEGUN_CASES
    for case, (text, names) in cases.items():
        if case == next(iter(BEGUN_CASES)):
            sides.begin_texts(END_OF_TEXT)
        chosen = [items[name] for name in names]
        if {item.modality for item in chosen} <= marks.keys():
            prompt = text.format(**letters)
            found = sides.compare(sides.spelt(prompt) if case in SPELT_CASES else prompt, chosen)
            print(json.dumps({"family": name, "case": case, **found}), flush=True)


def _changed(folder: Path, scratch: Path, other: Other) -> Path:
    """The checkpoint with its own `config.json`."""
    for file in folder.iterdir():
        (scratch / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    other.config(config)
    (scratch / "config.json").unlink()
    (scratch / "config.json").write_text(json.dumps(config))
    return scratch


def main(names: Sequence[str]) -> None:
    # A fork has no team of threads, and would wait for it.
    torch.set_num_threads(1)
    from sglang_epd.decoding import Decoders
    from sglang_epd.media import MediaLimits

    # The processes that fork children import for seconds: side by side with SGLang, and once.
    decoders = Decoders(MediaLimits(), 2 << 30, 2, cuts=True)
    decoders.pictures.nursery.start()
    decoders.films.nursery.start()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.managers.multimodal_processor import import_processors
    from sglang.srt.models.registry import ModelRegistry

    import sglang_epd.encoder.model.engine  # noqa: F401

    import_processors("sglang.srt.multimodal.processors")
    ModelRegistry.get_supported_archs()
    items = media()
    for name in names:
        other = OTHERS.get(name, Other(name, ()))
        checkpoint = ensure(FAMILIES[other.family].specs[0].name)
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                with tempfile.TemporaryDirectory() as scratch:
                    folder = _changed(checkpoint, Path(scratch), other)
                    run(name, str(folder), items, decoders)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(child, 0)
    decoders.close()


if __name__ == "__main__":
    main(sys.argv[1:])
