"""`sglang.Engine` as a language server in the caller's process: what a colocated one answers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from integration.client import data_url
from integration.test_forms import GREEDY, IMAGE
from integration.topology import Machine, Topology, checkpoint

pytestmark = pytest.mark.extended

Photographs = list[Image.Image]
SCRIPT = Path(__file__).with_name("engine_process.py")
MODEL = "tiny-qwen2_5-vl"
BACKENDS = ["zmq_to_scheduler", "zmq_to_tokenizer"]


@pytest.fixture(scope="module")
def encoder(machine: Machine) -> Iterator[str]:
    with machine.lend(Topology(MODEL, ("encoder",))) as topology:
        yield topology.urls["encoder"]


def asked(
    calls: list[Any], encoder: str = "", backend: str = "", **flags: Any
) -> list[dict[str, Any]]:
    """What an engine answers to each prompt; a colocated one without a backend."""
    flags |= {"model_path": checkpoint(MODEL), "dtype": "float32"}
    if backend:
        flags |= {
            "language_only": True,
            "encoder_urls": [encoder],
            "encoder_transfer_backend": backend,
        }
    command = [sys.executable, str(SCRIPT), json.dumps({"flags": flags, "calls": calls})]
    env = {**os.environ, "SGLANG_VLM_CACHE_SIZE_MB": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return [answer for call in json.loads(done.stdout.splitlines()[-1]) for answer in call]


@pytest.fixture(scope="module")
def generations(photographs: Photographs) -> tuple[list[Any], list[dict[str, Any]]]:
    """Alone, in a batch, and of an embedding that no encoder has made; and one engine's answers."""
    urls = [data_url(photo.resize((224, 168))) for photo in photographs]
    options = {"sampling_params": GREEDY, "return_logprob": True}
    calls: list[Any] = [
        ["generate", {"prompt": f"{IMAGE}What?", "image_data": urls[0], **options}],
        ["generate", {"prompt": [f"{IMAGE}A?", "B?"], "image_data": [[urls[1]], None], **options}],
        ["generate", {"image_data": "precomputed", **options}],
    ]
    return calls, asked(calls)


@pytest.fixture(scope="module")
def encodings(photographs: Photographs) -> tuple[list[Any], list[dict[str, Any]]]:
    urls = [data_url(photo.resize((224, 168))) for photo in photographs]
    calls: list[Any] = [
        ["encode", {"prompt": f"{IMAGE}What?", "image_data": urls[0]}],
        ["encode", {"prompt": [f"{IMAGE}A?", "B?"], "image_data": [urls[1], None]}],
    ]
    return calls, asked(calls, is_embedding=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_generations(
    encoder: str, generations: tuple[list[Any], list[dict[str, Any]]], backend: str
) -> None:
    calls, expected = generations
    for ours, theirs in zip(asked(calls, encoder, backend), expected, strict=True):
        assert ours["text"] == theirs["text"]
        counts = [one["meta_info"]["prompt_tokens"] for one in (ours, theirs)]
        assert counts[0] == counts[1]
        said = (one["meta_info"]["output_token_logprobs"] for one in (ours, theirs))
        assert max(abs(mine[0] - other[0]) for mine, other in zip(*said, strict=True)) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_embeddings(
    encoder: str, encodings: tuple[list[Any], list[dict[str, Any]]], backend: str
) -> None:
    calls, expected = encodings
    actual = asked(calls, encoder, backend, is_embedding=True)
    for ours, theirs in zip(actual, expected, strict=True):
        assert math.dist(ours["embedding"], theirs["embedding"]) < 1e-4
