"""The tiny checkpoints: cached, complete, and sensitive to what they are shown."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from PIL import Image
from safetensors import safe_open

import checkpoints.build
import make_checkpoint
import photographs
import sounds
from checkpoints.check import Subject, generation, image_dependence, measure, sound_dependence
from checkpoints.families import FAMILIES, SPECS, family_of
from checkpoints.family import Family
from checkpoints.unweighted import Unweighted

TINY = ["tiny-qwen2_5-vl", "tiny-qwen3-vl"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EPD_CACHE", str(cache))


@pytest.fixture(scope="module", params=TINY)
def subject(request: pytest.FixtureRequest, cache: Path) -> Subject:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EPD_CACHE", str(cache))
        return Subject(make_checkpoint.ensure(request.param))


@pytest.fixture(scope="module")
def photos() -> dict[str, Image.Image]:
    return {name: photographs.load(name) for name in ("coffee", "rocket", "astronaut", "cat")}


@pytest.mark.servers
def test_answer_depends_on_the_images(subject: Subject, photos: dict[str, Image.Image]) -> None:
    assert [str(m) for m in image_dependence(subject, photos) if not m.passed] == []


@pytest.mark.servers
def test_greedy_answer_is_varied_and_reproducible(
    subject: Subject, photos: dict[str, Image.Image]
) -> None:
    assert [str(m) for m in generation(subject, photos) if not m.passed] == []


@pytest.fixture(scope="module")
def listener(cache: Path) -> Subject:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EPD_CACHE", str(cache))
        return Subject(make_checkpoint.ensure("tiny-qwen2-audio"))


@pytest.mark.servers
def test_an_answer_to_sounds_depends_on_them(listener: Subject) -> None:
    clips = {name: sounds.load(name) for name in sounds.NAMES}
    measured = [*sound_dependence(listener, clips), *generation(listener, clips)]
    assert [str(m) for m in measured if not m.passed] == []


def test_a_chat_holds_what_the_model_takes(subject: Subject, listener: Subject) -> None:
    def spelt(asked: Subject, kind: str) -> str:
        return asked.processor.apply_chat_template([{"role": "user", "content": [{"type": kind}]}])

    assert "<|audio_bos|><|AUDIO|><|audio_eos|>" in spelt(listener, "audio")
    with pytest.raises(TemplateError, match="no place in the prompt: image"):
        spelt(listener, "image")
    with pytest.raises(TemplateError, match="no place in the prompt: audio"):
        spelt(subject, "audio")


def test_weights_have_the_names_that_are_published(listener: Subject) -> None:
    file = Path(listener.model.name_or_path) / "model.safetensors"
    with safe_open(file, "pt") as weights:
        assert "language_model.model.embed_tokens.weight" in weights.keys()  # noqa: SIM118


@pytest.mark.parametrize("name", TINY)
def test_second_call_builds_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint.ensure(name)
    monkeypatch.setattr(checkpoints.build, "build", lambda *_: pytest.fail("built again"))
    assert make_checkpoint.ensure(name) == folder
    processor = "Qwen3VLProcessor" if "qwen3" in name else "Qwen2_5_VLProcessor"
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert json.loads((folder / file).read_text())["processor_class"] == processor


def test_equal_specs_give_equal_files(tmp_path: Path) -> None:
    spec = SPECS["tiny-qwen2_5-vl"]
    first = make_checkpoint.ensure(spec.name)
    checkpoints.build.build(family_of(spec.name), spec, tmp_path)
    for file in first.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_shards_and_their_index_have_the_published_names(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPECS["tiny-qwen2-audio"], shard_mb=1)
    checkpoints.build.build(family_of(spec.name), spec, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert "language_model.model.embed_tokens.weight" in index
    for name, shard in index.items():
        with safe_open(tmp_path / shard, "pt") as weights:
            assert name in weights.keys()  # noqa: SIM118


@pytest.mark.extended
@pytest.mark.servers
# Raised in `transformers`, where GLM-4.1V's processor reads a picture.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.specs[0].name)
def test_a_familys_answers_depend_on_its_media(family: Family) -> None:
    if isinstance(family, Unweighted):
        pytest.skip("SGLang stops before it reads a weight, so there is none")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if family.carried or family.name not in CONFIG_MAPPING_NAMES:
        pytest.skip(
            "in its makers' form, which `transformers` does not read by itself: its servers "
            "are asked"
        )
    name = family.specs[0].name
    assert [str(m) for m in measure(make_checkpoint.ensure(name)) if not m.passed] == []


def test_two_builders_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EPD_CACHE", str(tmp_path))
    both_build = threading.Barrier(2, timeout=10)

    def build(_family: object, _spec: object, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        both_build.wait()

    monkeypatch.setattr(checkpoints.build, "build", build)
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(make_checkpoint.ensure(TINY[0])))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert results[0] == results[1]
    assert list((tmp_path / "checkpoints").iterdir()) == [results[0]]
