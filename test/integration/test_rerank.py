"""Pictures ranked by `/v1/rerank`, as by one server of Qwen3-VL-Reranker.

Its scores are of the words "yes" and "no", which a random model hardly says. So two words that it
does say after each of these prompts are called so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import requests
from PIL import Image

import clips
from integration.client import Client, data_url, image_part, text_part, video_part
from integration.counters import delivered
from integration.listener import Site
from integration.topology import Machine, Topology, checkpoint

pytestmark = pytest.mark.extended
MODEL = "tiny-qwen3-vl"
# SGLang tells a reranker by the first sentence, and asks for so many of the likeliest words.
TEMPLATE = """{#- The answer can only be "yes" or "no". -#}
{%- macro spell(parts) -%}
  {%- for part in parts -%}
    {%- if part.type == 'text' -%}{{ part.text }}
    {%- else -%}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{%- endif -%}
  {%- endfor -%}
{%- endmacro -%}
<|im_start|>user
{{ spell(query) }}
{{ spell(document) }}<|im_end|>
<|im_start|>assistant"""
LIKELIEST = 50
Part = dict[str, Any]
QUERY: list[Part] = [text_part("A cup of coffee")]


@pytest.fixture(scope="module")
def documents(photographs: list[Image.Image]) -> list[list[Part]]:
    cup, rocket = (image_part(data_url(photo.resize((224, 168)))) for photo in photographs)
    return [
        [cup],
        [rocket],
        [text_part("Both"), rocket, cup],
        [video_part(clips.video("coffee"))],
        [text_part("Words alone")],
    ]


def said(server: Client, document: list[Part]) -> dict[int, str]:
    """The likeliest words after a prompt, and their tokens."""
    kinds = [[{**part, "type": part["type"].removesuffix("_url")} for part in QUERY]]
    kinds.append([{**part, "type": part["type"].removesuffix("_url")} for part in document])
    prompt = jinja2.Template(TEMPLATE).render(query=kinds[0], document=kinds[1])
    media = {
        f"{kind}_data": [
            part[f"{kind}_url"]["url"] for part in document if part["type"] == f"{kind}_url"
        ]
        or None
        for kind in ("image", "video")
    }
    answer = server.generate(
        text=prompt,
        **media,
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        return_logprob=True,
        top_logprobs_num=LIKELIEST,
        return_text_in_logprobs=True,
    )
    assert answer.status_code == 200, answer.text
    (top,) = answer.json()["meta_info"]["output_top_logprobs"]
    return {token: text for _, token, text in top if text.strip().lower() not in prompt.lower()}


@pytest.fixture(scope="module")
def reranker(
    machine: Machine, documents: list[list[Part]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Topology]:
    plain = machine.colocated(MODEL)
    ever = set.intersection(*(set(said(plain, document)) for document in documents))
    assert len(ever) > 1, "no two words are likely after each prompt"
    folder = tmp_path_factory.mktemp("reranker") / MODEL
    shutil.copytree(checkpoint(MODEL), folder)
    call(folder, dict(zip(("yes", "no"), sorted(ever), strict=False)))
    usual = (folder / "chat_template.jinja").read_text()
    both = f"{{% if query is defined %}}{TEMPLATE}{{% else %}}{usual}{{% endif %}}"
    (folder / "chat_template.jinja").write_text(both)
    roles = ("encoder", "language", "colocated")
    with machine.lend(Topology(MODEL, roles, served_as=str(folder))) as topology:
        yield topology


def call(folder: Path, names: dict[str, int]) -> None:
    """Give words of a tokenizer another spelling."""
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text())
    vocabulary = told["model"]["vocab"]
    spelt = {token: text for text, token in vocabulary.items()}
    gone = {spelt[token] for token in names.values()}
    for name, token in names.items():
        assert name not in vocabulary
        del vocabulary[spelt[token]]
        vocabulary[name] = token
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        told["added_tokens"].append({"id": token, "content": name, **flags})
    told["model"]["merges"] = [
        pair for pair in told["model"]["merges"] if not gone & {*pair, "".join(pair)}
    ]
    path.write_text(json.dumps(told))


def rank(server: Client, documents: list[list[Part]]) -> dict[int, float]:
    body = {"query": QUERY, "documents": documents, "return_documents": False}
    answer = server.post("/v1/rerank", body)
    assert answer.status_code == 200, answer.text
    return {one["index"]: one["score"] for one in answer.json()}


def test_scores_are_one_servers(reranker: Topology, documents: list[list[Part]]) -> None:
    ours, theirs = (rank(reranker.client(role), documents) for role in ("language", "colocated"))
    assert list(ours) == list(theirs), "the order"
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert len({round(score, 3) for score in theirs.values()}) == len(documents)
    assert all(0 < score < 1 for score in theirs.values()), "else parity would prove nothing"
    assert delivered(reranker) > 0


def test_a_picture_that_cannot_be_had_is_the_requests_error(
    reranker: Topology, documents: list[list[Part]], site: Site
) -> None:
    bad = [image_part(f"{site.url}/none.png")]
    body = {"query": QUERY, "documents": [*documents, bad]}
    answer = reranker.client().post("/v1/rerank", body)
    assert answer.status_code == 400
    assert "image 1 of 1" in answer.text
    assert requests.get(f"{reranker.urls['language']}/health", timeout=20).status_code == 200
