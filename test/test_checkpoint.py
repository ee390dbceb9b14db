"""What a server finds of the model that it serves: SGLang's loader, and a hub over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoints_of_servers
from hub import Hub, serving
from make_checkpoint import ensure

pytestmark = pytest.mark.servers

NAME = "acme/tiny-vl"
PROCESSOR = ["preprocessor_config.json", "video_preprocessor_config.json"]
WHOLE = "model.safetensors"
OPTIONS = "--mm-process-config"
TOKENIZER = "--tokenizer-path"
SHARDED = ["--load-format", "sharded_state", "--tp-size"]
PROCESSING = [{}, {"image": {"max_pixels": 50176}}, {"image": {"max_pixels": 100352}}]


def spoilt(folder: Path) -> None:
    """One weight of the tower is another."""
    tensors = load_file(folder / WHOLE)
    name = next(name for name in sorted(tensors) if "visual" in name)
    tensors[name].view(-1)[0] += 1
    save_file(tensors, folder / WHOLE, {"format": "pt"})


def with_what_nobody_needs(folder: Path) -> None:
    (folder / "README.md").write_text("A model.")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"\0" * 100)
    # The same weights once more, under names that SGLang does not read.
    shutil.copy(folder / WHOLE, folder / "consolidated.safetensors")


def saved_by_torch(folder: Path) -> None:
    torch.save(load_file(folder / WHOLE), folder / "pytorch_model.bin")
    (folder / WHOLE).unlink()


def in_two_files(folder: Path) -> None:
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    places = {name: file for file, held in parts.items() for name in held}
    (folder / f"{WHOLE}.index.json").write_text(json.dumps({"weight_map": places}))


def by_rank(folder: Path) -> None:
    """As SGLang saves it for two ranks, by the names of files alone."""
    whole = (folder / WHOLE).rename(folder / "model-rank-0-part-0.safetensors")
    shutil.copy(whole, folder / "model-rank-1-part-0.safetensors")


def preprocessed_otherwise(folder: Path) -> None:
    config = folder / "preprocessor_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "image_mean": [0.0, 0.0, 0.0]}))


# What revisions of the repository differ by.
REVISIONS = {
    "main": with_what_nobody_needs,
    "spoilt": spoilt,
    "torch": saved_by_torch,
    "spoilt-torch": lambda folder: (spoilt(folder), saved_by_torch(folder)),
    "two": in_two_files,
    "preprocessed": preprocessed_otherwise,
}
TOKENIZERS = ["spoilt", "preprocessed"]


class Found:
    """What servers found, by their flags; they share one cache of the hub."""

    def __init__(self, root: Path) -> None:
        source = ensure("tiny-qwen2_5-vl")
        for revision, change in REVISIONS.items():
            shutil.copytree(source, root / revision)
            change(root / revision)
        self.plain = str(source)
        self.downloads = str(root / "downloads")
        sharded = self.sharded = str(shutil.copytree(source, root / "sharded"))
        by_rank(root / "sharded")
        asked = [
            # First: SGLang takes what the cache of the hub has, whatever the flag says.
            ["--model-path", NAME, "--revision", "two", "--download-dir", self.downloads],
            ["--model-path", self.plain],
            *(["--model-path", NAME, "--revision", revision] for revision in REVISIONS),
            *(["--model-path", str(root / revision)] for revision in REVISIONS),
            ["--model-path", NAME],
            ["--model-path", self.plain, "--load-format", "dummy"],
            ["--model-path", self.plain, "--quantization", "fp8"],
            *(["--model-path", self.plain, TOKENIZER, str(root / other)] for other in TOKENIZERS),
            *(["--model-path", self.plain, OPTIONS, json.dumps(one)] for one in PROCESSING),
            *(["--model-path", sharded, *SHARDED, ranks] for ranks in ("1", "2")),
        ]
        hub = Hub({NAME: {revision: root / revision for revision in REVISIONS}})
        with serving(hub):
            env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(root / "cache")}
            command = [sys.executable, checkpoints_of_servers.__file__, json.dumps(asked)]
            told = subprocess.check_output(command, text=True, env=env, timeout=250)
        lines = [line for line in told.splitlines() if line.startswith("{")]
        self._found = dict(zip(map(tuple, asked), map(json.loads, lines), strict=True))
        self._root = root

    def __call__(self, model: str, *flags: str) -> dict[str, Any]:
        return dict(self._found[("--model-path", model, *flags)])

    def with_tokenizer_of(self, revision: str) -> dict[str, Any]:
        return self(self.plain, TOKENIZER, str(self._root / revision))

    def folder(self, revision: str) -> dict[str, Any]:
        return self(str(self._root / revision))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    yield Found(tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_name_and_a_folder_of_the_same_files_are_one(found, revision):
    named, folder = found(NAME, "--revision", revision), found.folder(revision)
    for key in ("namespace", "configs", "weights"):
        assert named[key] == folder[key]
    assert named["configs"] == ["config.json", *PROCESSOR]
    assert named["folders"] != folder["folders"]


def test_what_nobody_needs_changes_nothing(found):
    assert found(NAME)["weights"] == [WHOLE]
    assert found(NAME) == found(NAME, "--revision", "main")
    assert found(NAME)["namespace"] == found(found.plain)["namespace"]


def test_how_the_weights_are_cut_changes_nothing(found):
    assert found.folder("two")["weights"] == ["model-1.safetensors", "model-2.safetensors"]
    assert found.folder("two")["namespace"] == found(found.plain)["namespace"]


def test_towers_are_told_apart_in_every_format(found):
    assert found.folder("torch")["weights"] == ["pytorch_model.bin"]
    names = {
        found.folder(each)["namespace"] for each in ("main", "spoilt", "torch", "spoilt-torch")
    }
    assert len(names) == 4


def test_random_weights_are_no_checkpoints(found):
    random = found(found.plain, "--load-format", "dummy")
    assert random["weights"] is None
    assert random["namespace"] != found(found.plain)["namespace"]


def test_shards_of_more_ranks_are_refused(found):
    """SGLang would read a part of each parameter."""
    assert len(found(found.sharded, *SHARDED, "2")["weights"]) == 2
    assert "more ranks than --tp-size 1" in found(found.sharded, *SHARDED, "1")["error"]


def test_a_folder_for_downloads_is_used(found):
    downloaded = found(NAME, "--revision", "two", "--download-dir", found.downloads)
    assert all(folder.startswith(found.downloads) for folder in downloaded["folders"])
    assert downloaded["configs"] == ["config.json", *PROCESSOR]
    assert downloaded["namespace"] == found.folder("two")["namespace"]


def test_a_tower_that_sglang_quantises_as_it_loads_it_is_another(found):
    plain, quantised = found(found.plain), found(found.plain, "--quantization", "fp8")
    assert "/float32+fp8/" in quantised["namespace"]
    assert quantised["namespace"].replace("+fp8", "") == plain["namespace"]


def test_options_for_the_processing_of_media_make_another(found):
    plain = found(found.plain)["namespace"]
    none, small, large = (found(found.plain, OPTIONS, json.dumps(one)) for one in PROCESSING)
    assert none["namespace"] == plain
    assert "/float32+mm-process-config/" in small["namespace"]
    assert len({plain, small["namespace"], large["namespace"]}) == 3


def test_the_processor_is_that_of_the_tokenizers_path(found):
    plain = found(found.plain)["namespace"]
    assert found.with_tokenizer_of("spoilt")["namespace"] == plain
    otherwise = found.with_tokenizer_of("preprocessed")["namespace"]
    assert otherwise == found.folder("preprocessed")["namespace"] != plain
