"""The namespace: a digest of everything that makes two servers hold the same tower.

It is over everything that an embedding depends on besides the media: architecture, tower
configuration, the tensors that join towers and language model, the tower's weights, the media
processor's configuration and `--mm-process-config`, dtype, how SGLang quantises weights as it
loads them, and protocol version. It is made from the checkpoint's content (`checkpoint.py`), not
its path, so that servers may keep it in different places.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from typing import Any

from blake3 import blake3

from sglang_epd.checkpoint import CONFIG, PROCESSOR_CONFIGS, Checkpoint, Tensor, tensors
from sglang_epd.errors import ConfigError, ProtocolError
from sglang_epd.wire.envelope import MAJOR

logger = logging.getLogger(__name__)

# A tower's name wins: "vision_model.model.layers." holds a mark of both. MiniCPM's are vpm and
# apm, Phi-4-multimodal's within embed_tokens_extend.
_TOWERS = ("visual", "vision", "audio", "vpm.", "apm.", "embed_tokens_extend.")
_LANGUAGE = ("lm_head", "language_model", "model.layers.", "model.embed_tokens.", "model.norm.")
# Layers that draft, and parts that speak, whatever else their names hold.
_BESIDE = ("mtp.", "model.mtp.", "talker.", "code2wav.")
# Grows with each change of what this package makes of media: embeddings of the last one must not be
# found, in caches or stores.
PIXELS = 1
# Configurations' names of a tower, and of the language model, where it has one.
TOWER_CONFIGS = ("vision_config", "audio_config")
LANGUAGE_CONFIGS = ("text_config", "llm_config", "language_config")
# What a checkpoint's configuration says of other things than its model; the language model
# may be quantised on one server and not on the other.
_INCIDENTAL = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "quantization_config",
        "compression_config",
    }
)


def namespace(hf_config: Any, checkpoint: Checkpoint, dtype: str, processing: str = "") -> str:
    """A readable identity: architecture, dtype (and how weights are quantised as they are
    loaded, and whether `--mm-process-config` is typed), and 16 hex digits.

    Args:
        dtype: of embeddings, without "torch.".
        processing: `checkpoint.processing`.

    Raises:
        ConfigError: a weight file has no fingerprint, and why; or none has a tower.
    """
    digest = blake3()
    config = hf_config.to_dict()
    towers = {key: config[key] for key in ("architectures", "model_type") if key in config}
    for name in TOWER_CONFIGS:
        if name in config:
            towers[name] = _without(config[name], _INCIDENTAL)
    described = [MAJOR, PIXELS, dtype, towers]
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    joints = _joints(checkpoint.configs.get(CONFIG, {}))
    digest.update(json.dumps(joints, sort_keys=True).encode())
    for name in PROCESSOR_CONFIGS:
        if name in checkpoint.configs:
            digest.update(json.dumps(checkpoint.configs[name], sort_keys=True).encode())
    digest.update(processing.encode())
    if checkpoint.weights is None:
        digest.update(b"random weights")
    found = _fingerprints(checkpoint)
    if checkpoint.weights and not found:
        raise ConfigError(
            "the checkpoint's weight files hold no tensor of a vision or audio tower, by name"
        )
    for tensor in found:
        digest.update(repr((tensor.name, tensor.dtype, tensor.shape, tensor.digest)).encode())
    architecture = (config.get("architectures") or ["unknown"])[0]
    # In words, because a message that two servers differ shows both.
    told = (dtype, checkpoint.quantization, "mm-process-config" if processing else "")
    numbers = "+".join(filter(None, told))
    made = f"{'full-' if checkpoint.whole else ''}{digest.hexdigest()[:16]}"
    return f"{architecture}/{numbers}/{made}"


def _fingerprints(checkpoint: Checkpoint) -> list[Tensor]:
    """Of all tensors that are not the language model's, in their order by name."""
    found: list[Tensor] = []
    for number, path in enumerate(checkpoint.weights or (), 1):
        began = time.perf_counter()
        of_file = list(tensors(path, of_language_model, whole=checkpoint.whole))
        found += of_file
        if checkpoint.whole:
            nbytes, seconds = sum(one.nbytes for one in of_file), time.perf_counter() - began
            logger.info(
                "Fingerprint of all bytes, file %d of %d: %d tensors, %.2f GB in %.1f s",
                *(number, len(checkpoint.weights or ()), len(of_file), nbytes / 1e9, seconds),
            )
    return sorted(found)


def embedding_key(identity: str, digest: bytes, modality: str, options: object) -> bytes:
    """Everything that an item's embedding depends on: a namespace, the digest of the item's
    bytes, its modality and its own options.

    Args:
        identity: a namespace.
        digest: of the item's bytes.
        options: the item's own.

    Raises:
        ProtocolError: the options are not plain data.
    """
    hasher = blake3(identity.encode())
    hasher.update(digest)
    try:
        described = json.dumps([modality, options], sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise ProtocolError("the item's options are not plain data") from None
    hasher.update(described.encode())
    return hasher.digest()


def of_language_model(name: str) -> bool:
    """Whether a checkpoint's tensor of that name is the language model's, not a tower's."""
    marked = any(mark in name for mark in _LANGUAGE) and not any(mark in name for mark in _TOWERS)
    return marked or name.startswith(_BESIDE)


def of_tower(name: str) -> bool:
    """Whether a checkpoint's tensor of that name is a tower's, and not of a part of the
    language model that is called after one."""
    places = [name.find(mark) for mark in _TOWERS if mark in name]
    within = [name.find(mark) for mark in _LANGUAGE if mark in name]
    return bool(places) and min(places) < min(within, default=len(name))


def _joints(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a checkpoint's configuration beside its towers' and its language model's own:
    tiles, tokens a picture, the layer that features are of. From the file, because
    SGLang's own reading of it may differ between its processes.

    Where the language model's configuration is not apart from the rest, MiMo-V2's of its processor
    alone, and most often nothing.
    """
    # An Omni's, whose towers are configured there; its other parts speak.
    thinker = config.get("thinker_config")
    inner, known = (config, TOWER_CONFIGS) if thinker is None else (thinker, ())
    if not any(name in inner for name in LANGUAGE_CONFIGS):
        return {key: config[key] for key in ("processor_config",) if key in config}
    left_out = {*LANGUAGE_CONFIGS, *_INCIDENTAL, *known}
    return {
        key: _without(value, _INCIDENTAL) for key, value in inner.items() if key not in left_out
    }


def _without(config: Any, names: Collection[str]) -> Any:
    """A configuration without these fields; another value as it is."""
    if not isinstance(config, dict):
        return config
    return {key: value for key, value in config.items() if key not in names}
