"""A checkpoint: complete, or to be had; of a model that can be split, and fits its budget."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_epd.checkpoint import header
from sglang_epd.cli.checks import Finding, fail, note, ok, warn
from sglang_epd.families import IN_TREE
from sglang_epd.machine import share_mb
from sglang_epd.namespace import LANGUAGE_CONFIGS

_HUB_TIMEOUT_S = 10.0
# SGLang's loader takes the files of the first of these that it finds.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def checkpoint(model: str, budget_mb: int | None = None) -> Iterator[Finding]:
    """The files of a checkpoint, without loading it.

    Args:
        model: a folder, or a name on the hub.
        budget_mb: the receive budget; this machine's share where None.
    """
    subject = "checkpoint"
    folder, again = Path(model), "download the checkpoint again"
    if not folder.is_dir():
        found = _cached(model)
        if isinstance(found, Finding):
            yield found
            return
        folder, again = found, f"hf download {model}"
    config = _object(folder / "config.json")
    if isinstance(config, str):
        yield fail(subject, config, again)
        return
    yield from _architecture(config)
    yield from _budget(config, folder, budget_mb or share_mb())
    files = _files(folder)
    problems = [*_weights(folder, files), *_processor(folder)]
    for problem in problems:
        yield fail(subject, problem, again)
    if not problems and not files:
        none = f"has no weights ({', '.join(_WEIGHTS)}): only --load-format dummy serves it"
        yield warn(subject, none, again)
    elif not problems:
        gib = sum(file.stat().st_size for file in files) / (1 << 30)
        yield ok(subject, f"whole; its weights ({files[0].suffix[1:]}) have {gib:.1f} GiB")


def _files(folder: Path) -> list[Path]:
    """The files with weights; empty where there are none."""
    return next(filter(None, (sorted(folder.glob(pattern)) for pattern in _WEIGHTS)), [])


def _cached(model: str) -> Path | Finding:
    """The folder of a model's newest files in the hub's cache, weights among them."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    subject = "checkpoint"
    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError as error:
        found = f"{model} is neither a folder nor a name on a hub: {error}"
        return fail(subject, found, "give a folder, or a name such as Qwen/Qwen2.5-VL-7B-Instruct")
    if isinstance(found, str) and _files(Path(found).parent):
        return Path(found).parent
    part = "only in part" if isinstance(found, str) else "not"
    missing = f"{model} is no folder, and {part} in the cache of the hub"
    if constants.HF_HUB_OFFLINE:
        return fail(subject, f"{missing}, and HF_HUB_OFFLINE is set", f"hf download {model}")
    return _on_hub(model, missing)


def _on_hub(model: str, missing: str) -> Finding:
    """Whether a server could download it; the hub is asked."""
    import httpx  # of huggingface_hub
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
    )

    subject, place = "checkpoint", constants.ENDPOINT
    try:
        # Of a file: all may list those behind a gate.
        with contextlib.suppress(EntryNotFoundError):
            get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        return fail(subject, f"{missing}; {place} gates it", "accept its terms, and set HF_TOKEN")
    except RepositoryNotFoundError:
        found = f"{missing}; {place} knows no such model, or shows it to others only"
        return fail(subject, found, "look at its name; HF_TOKEN names you to the hub")
    except (HfHubHTTPError, OSError, httpx.HTTPError) as error:
        found = f"{missing}, and {place} cannot be asked ({type(error).__name__})"
        return fail(subject, found, f"hf download {model} where it can, or --model-path a folder")
    return note(subject, f"{missing}: the first server downloads it", f"hf download {model}")


def _budget(config: dict[str, Any], folder: Path, budget_mb: int) -> Iterator[Finding]:
    """Whether the largest image fits in the receive budget, where the files say its size."""
    processor = _object(folder / "preprocessor_config.json")
    try:
        nbytes = _largest_bytes(config, processor if isinstance(processor, dict) else {})
    except (KeyError, TypeError, ValueError):
        return  # a model whose processor bounds images in another way
    setting = "SGLANG_EPD_RECEIVE_BUDGET_MB"
    largest = f"the largest image of this model takes {nbytes / (1 << 20):.1f} MiB"
    if nbytes > budget_mb << 20:
        found = f"{setting} is {budget_mb}, and {largest}: requests with it are answered with 413"
        yield fail("budget", found, f"{setting}={4 * -(-nbytes >> 20)} has room for four")
    else:
        found = f"{budget_mb} MiB hold {(budget_mb << 20) // nbytes} at a time; {largest}"
        yield ok("budget", found)


def _largest_bytes(config: dict[str, Any], processor: dict[str, Any]) -> int:
    """Of the embeddings of an image that has as many pixels as a processor of Qwen's kind keeps.

    Raises:
        KeyError, TypeError, ValueError: it is of another kind.
    """
    language = next((config[name] for name in LANGUAGE_CONFIGS if name in config), config)
    tower = config["vision_config"]
    pixels = processor.get("max_pixels") or processor["size"]["longest_edge"]
    side = processor["patch_size"] * processor["merge_size"]
    # Some name it beside what it is of alone.
    names = [one.get(name) for one in (config, language) for name in ("dtype", "torch_dtype")]
    dtype: str = next(filter(None, names), "")
    layers = 1 + len(tower.get("deepstack_visual_indexes") or ())
    item_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    return int(pixels // side**2 * language["hidden_size"] * layers * item_bytes)


def _architecture(config: dict[str, Any]) -> Iterator[Finding]:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        yield fail("model", "config.json names no architecture", "use a checkpoint that does")
    elif name in IN_TREE:
        yield ok("model", f"{name}, which SGLang's own EPD knows")
    else:
        yield note(
            "model",
            f"{name} is not on SGLang's list for EPD: images and videos, as far as it passes"
            " the proof at start-up",
            "docs/families.md has what was compared",
        )


def _weights(folder: Path, files: list[Path]) -> Iterator[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        told = _object(index)
        if isinstance(told, str):
            yield told
            return
        weights = told.get("weight_map")
        named = set(weights.values()) if isinstance(weights, dict) else set()
        if not named or not all(isinstance(name, str) for name in named):
            yield f"{index.name} names no files"
            return
        if missing := sorted(name for name in named if not (folder / name).exists()):
            yield f"{len(missing)} of {len(named)} files of weights are missing, {missing[0]} first"
        files = [folder / name for name in sorted(named - {*missing})]
    for file in files:
        if file.suffix == ".safetensors" and (problem := _truncated(file)):
            yield f"{file.name}: {problem}"


def _truncated(file: Path) -> str:
    """Whether a safetensors file is shorter than its header says; empty if it is whole."""
    try:
        entries, begin = header(file)
        expected = begin + max((one["data_offsets"][1] for one in entries.values()), default=0)
        size = file.stat().st_size
    except OSError as error:
        return error.strerror or "cannot be read"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error):
        return "its header cannot be read"
    return "" if size >= expected else f"has {size} bytes of {expected}"


def _processor(folder: Path) -> Iterator[str]:
    names = ("preprocessor_config.json", "processor_config.json")
    if not any((folder / name).exists() for name in names):
        yield f"has none of {' and '.join(names)}, by which media are read"
    if not any(folder.glob("tokenizer*")):
        yield "has no tokenizer"


def _object(path: Path) -> dict[str, Any] | str:
    """The content of a JSON file, or its fault."""
    try:
        told = json.loads(path.read_text())
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    except ValueError as error:
        return f"{path.name} is not JSON: {error}"
    return told if isinstance(told, dict) else f"{path.name} is no JSON object"
