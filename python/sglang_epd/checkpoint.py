"""The files of the served model: a folder, or a name on a hub whose files SGLang fetches.

SGLang's own loader finds the weights, so that a server fingerprints the files that it
loads: same patterns, same cache, same lock between processes that download. The first
process that asks for a file downloads it; the others wait for the lock.

Leans on `model_loader.loader`: `DefaultModelLoader._prepare_weights`,
`ShardedStateLoader._prepare_weights` and `pattern`; and on `transformers.utils.cached_file`, by
which SGLang reads configurations.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from sglang_epd.errors import ConfigError

_SAMPLE_BYTES = 512
_CHUNK_BYTES = 32 << 20
_MOST_HEADER_BYTES = 100 << 20
CONFIG = "config.json"
# ModelOpt's, beside a configuration that says nothing of it.
_QUANTIZED = "hf_quant_config.json"
# How media are made into pixels and samples.
PROCESSOR_CONFIGS = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


# (offset, size) to bytes; and (read, begin, end) to a digest of the bytes between.
_Read = Callable[[int, int], bytes]
_Digest = Callable[[_Read, int, int], str]


@dataclass(frozen=True)
class Checkpoint:
    """The parts of a checkpoint's configuration that tell its towers from others.

    Args:
        configs: parsed JSON files by name, those of the processor from `--tokenizer-path`; a
            file that is not there has no entry.
        weights: the files that SGLang loads; None where weights are random
            (`--load-format dummy`).
        quantization: `--quantization` where SGLang makes the weights smaller as it loads them,
            those of most towers too; empty where they are taken as they are in the files.
        whole: whether fingerprints are of all bytes, and not of samples.
    """

    configs: dict[str, Any]
    weights: tuple[Path, ...] | None
    quantization: str = ""
    whole: bool = False


class Tensor(NamedTuple):
    """A tensor's fingerprint; of samples enough to tell fine-tunes apart, in milliseconds."""

    name: str
    dtype: str
    shape: str
    digest: str
    nbytes: int


def served(*, whole: bool = False) -> Checkpoint:
    """The checkpoint of this process's server; downloads files that the cache lacks.

    Args:
        whole: whether fingerprints of weights are of all bytes; of samples otherwise.

    Raises:
        ConfigError: `--model-path` is neither a folder nor a name on a hub, or its files are the
            shards of more ranks.
        OSError, RuntimeError: the files are not there, or the hub does not give them.
    """
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.runtime_context import get_model, get_serving
    from transformers.utils import cached_file

    model = get_model()
    path, revision = model.model_path, model.revision
    if "://" in path or Path(path).is_file():
        raise ConfigError(
            f"--model-path {path}: EPD servers compare fingerprints of a checkpoint's files; "
            "give a folder, or a model by its hub name"
        )
    # First: without a network the loader's message names the missing files best.
    config = LoadConfig(
        load_format=model.load_format,
        download_dir=model.download_dir,
        model_loader_extra_config=model.model_loader_extra_config,
    )
    weights = _weights(path, revision, config)
    configs = {}
    # A file that cannot be had, for want of a network or at all, was not read by SGLang's
    # processor either, which is made before: it keeps in the same cache what it reads.
    processor = get_serving().tokenizer_path or path
    for name in (CONFIG, _QUANTIZED, *PROCESSOR_CONFIGS):
        found = cached_file(
            processor if name in PROCESSOR_CONFIGS else path,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            configs[name] = json.loads(Path(found).read_bytes())
    online = online_quantization(model.quantization, configs)
    return Checkpoint(configs, weights, online, whole)


def processing() -> str:
    """The value of `--mm-process-config`, as text; empty without one.

    To be asked before an encoder's tower is loaded: SGLang writes its own defaults into it.
    """
    from sglang.srt.runtime_context import get_mm

    options = get_mm().mm_process_config
    return json.dumps(options, sort_keys=True, default=str) if options else ""


def online_quantization(flag: str | None, configs: dict[str, Any]) -> str:
    """The effect of `--quantization` on weights that are not quantised already.

    SGLang hands it to most towers, as to the language model; `SGLANG_FP8_IGNORED_LAYERS` names
    layers that are left out. Of a checkpoint that is quantised the flag names the form or its
    kernels (`awq_marlin`); another form SGLang refuses, or makes of experts alone
    (`nvfp4_online`), which no tower has. The exceptions are `REQUANTIZATION_METHODS`.

    Args:
        flag: its value.
        configs: the checkpoint's, by file name.
    """
    from sglang.srt.configs.model_config import REQUANTIZATION_METHODS

    config = configs.get(CONFIG, {})
    inner = config.get("text_config") or {}
    quantised = _QUANTIZED in configs or any(
        one.get(name)
        for one in (config, inner)
        for name in ("quantization_config", "compression_config")
    )
    if not flag or (quantised and flag not in REQUANTIZATION_METHODS):
        return ""
    ignored = os.environ.get("SGLANG_FP8_IGNORED_LAYERS", "")
    return f"{flag}-without-{ignored}" if ignored else flag


def _weights(path: str, revision: str | None, config: Any) -> tuple[Path, ...] | None:
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if config.load_format is LoadFormat.DUMMY:
        return None
    if config.load_format is LoadFormat.SHARDED_STATE:
        return _shards(path, revision, config)
    known = (LoadFormat.MISTRAL, LoadFormat.PT, LoadFormat.NPCACHE)
    if config.load_format not in known:
        # Safetensors first, and else *.bin: the other formats are ways to read these.
        config.load_format, config.model_loader_extra_config = LoadFormat.AUTO, {}
    loader = DefaultModelLoader(config)
    _folder, files, _safe = loader._prepare_weights(path, revision, fall_back_to_pt=True)
    return tuple(Path(file) for file in files)


def _shards(path: str, revision: str | None, config: Any) -> tuple[Path, ...]:
    """The files of `--load-format sharded_state`. Of shards that were saved for more ranks SGLang
    would read as many as it has, and leave the rest of each parameter as the memory was."""
    from sglang.srt.model_loader.loader import ShardedStateLoader
    from sglang.srt.runtime_context import get_parallel

    loader = ShardedStateLoader(config)
    folder, ranks = Path(loader._prepare_weights(path, revision)), get_parallel().tp_size
    if any(folder.glob(loader.pattern.format(rank=ranks, part="*"))):
        raise ConfigError(
            f"--load-format sharded_state: the folder has the shards of more ranks than --tp-size "
            f"{ranks}; give each server the --tp-size that they were saved with"
        )
    return tuple(folder.glob(loader.pattern.format(rank="*", part="*")))


def tensors(
    path: Path, left_out: Callable[[str], bool], *, whole: bool = False
) -> Iterator[Tensor]:
    """The fingerprints of the tensors in a file of safetensors or of `torch.save`, but for those
    whose names are left out.

    Args:
        left_out: tells by a name whether its tensor is left out.
        whole: fingerprints of all bytes; of samples otherwise.

    Raises:
        ConfigError: the file cannot be mapped into memory, or holds more than tensors.
    """
    named = _safetensors if path.suffix == ".safetensors" else _pickled
    yield from named(path, left_out, _all_bytes if whole else _samples)


def header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's entries by tensor name, and the offset of the first data byte.

    Raises:
        ValueError, struct.error: it is no such file.
    """
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        if header_bytes > min(path.stat().st_size, _MOST_HEADER_BYTES):
            raise ValueError(f"{path.name}: its header cannot be read")
        entries: dict[str, Any] = json.loads(file.read(header_bytes))
    entries.pop("__metadata__", None)
    return entries, 8 + header_bytes


def _safetensors(path: Path, left_out: Callable[[str], bool], digest: _Digest) -> Iterator[Tensor]:
    entries, base = header(path)
    with path.open("rb") as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        for name, entry in entries.items():
            if not left_out(name):
                begin, end = (base + offset for offset in entry["data_offsets"])
                found = digest(read, begin, end)
                yield Tensor(name, entry["dtype"], str(entry["shape"]), found, end - begin)


def _pickled(path: Path, left_out: Callable[[str], bool], digest: _Digest) -> Iterator[Tensor]:
    import torch

    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch has no tree of its own, and advises to trust the file
        raise ConfigError(
            f"{path.name} holds more than tensors, or has a form that cannot be mapped into "
            "memory, so it has no fingerprint: save the checkpoint as safetensors"
        ) from error
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and not left_out(name):
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)

            def read(offset: int, size: int, content: torch.Tensor = content) -> bytes:
                return content[offset : offset + size].numpy().tobytes()

            found = digest(read, 0, len(content))
            yield Tensor(name, str(tensor.dtype), str(list(tensor.shape)), found, len(content))


def _all_bytes(read: _Read, begin: int, end: int) -> str:
    """A digest of all of a tensor's bytes, by all cores."""
    hasher = blake3(max_threads=blake3.AUTO)
    for offset in range(begin, end, _CHUNK_BYTES):
        hasher.update(read(offset, min(_CHUNK_BYTES, end - offset)))
    return hasher.hexdigest()


def _samples(read: _Read, begin: int, end: int) -> str:
    """A digest of three samples of a tensor's bytes."""
    digest = hashlib.sha256()
    for offset in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
        digest.update(read(offset, min(_SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()
