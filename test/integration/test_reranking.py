"""`/v1/rerank` with pictures: the scores of one colocated server.

SGLang reads a score off the log-probabilities of "yes" and "no" among the 50 likeliest tokens, by
the template of Qwen3-VL-Reranker. The checkpoint here has both words as tokens, and their rows of
its head are those of two tokens that it is likely to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from integration.client import Client, data_url, image_part, text_part
from integration.counters import delivered
from integration.topology import Machine, Topology, checkpoint

pytestmark = pytest.mark.extended

Photographs = list[Image.Image]
MODEL = "tiny-qwen3-vl"
_PARTS = (
    "{% for part in NAME %}{% if part.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
)
TEMPLATE = (
    "<|im_start|>system\nDoes the Document answer the Query? Note that the answer can only be "
    '"yes" or "no".<|im_end|>\n<|im_start|>user\n'
    f"<Query>: {_PARTS.replace('NAME', 'query')}\n"
    f"<Document>: {_PARTS.replace('NAME', 'document')}<|im_end|>\n<|im_start|>assistant\n"
)
QUERY = "A cup of coffee"


@pytest.fixture(scope="module")
def documents(photographs: Photographs) -> list[list[dict[str, Any]]]:
    cup, rocket = (image_part(data_url(photo.resize((224, 160)))) for photo in photographs)
    return [[cup], [rocket, text_part("or so")], [text_part("No picture.")], [rocket, cup]]


@pytest.fixture(scope="module")
def reranker(
    machine: Machine, photographs: Photographs, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    prompt = jinja2.Template(TEMPLATE).render(
        query=[text_part(QUERY)], document=[{"type": "image"}]
    )
    answer = machine.colocated(MODEL).generate(
        text=prompt,
        image_data=[data_url(photographs[0].resize((224, 160)))],
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        return_logprob=True,
        top_logprobs_num=2,
    )
    likely = [entry[1] for entry in answer.json()["meta_info"]["output_top_logprobs"][0]]
    source, folder = Path(checkpoint(MODEL)), tmp_path_factory.mktemp("reranker-qwen3-vl")
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = load_file(source / "model.safetensors")
    for word, token in zip(("yes", "no"), likely, strict=True):
        weights["lm_head.weight"][tokenizer.token_to_id(word)] = weights["lm_head.weight"][token]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def topology(machine: Machine, reranker: Path) -> Iterator[Topology]:
    roles = ("encoder", "language", "colocated")
    with machine.lend(Topology(MODEL, roles, served_as=str(reranker))) as topology:
        yield topology


def scores(server: Client, documents: list[list[dict[str, Any]]]) -> list[float]:
    answer = server.post("/v1/rerank", {"query": QUERY, "documents": documents})
    assert answer.status_code == 200, answer.text
    found = {one["index"]: one["score"] for one in answer.json()}
    return [found[index] for index in range(len(documents))]


def test_scores_equal_one_servers(
    topology: Topology, documents: list[list[dict[str, Any]]]
) -> None:
    expected = scores(topology.client("colocated"), documents)
    assert scores(topology.client(), documents) == pytest.approx(expected, abs=1e-3)
    # Else parity would prove nothing.
    assert all(0 < one < 1 for one in expected)
    assert len({round(one, 3) for one in expected}) > 1
    assert delivered(topology) >= 2


def test_a_document_that_cannot_be_read_is_an_error(topology: Topology) -> None:
    bad = [image_part(data_url(b"no picture"))]
    answer = topology.client().post("/v1/rerank", {"query": QUERY, "documents": [bad]})
    assert answer.status_code == 400
    assert "image 1 of 1" in answer.text
