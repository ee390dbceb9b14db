"""Every form of request that SGLang takes, through the encoder."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, user

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = {"max_new_tokens": 8, "temperature": 0}
Photographs = list[Image.Image]


@pytest.fixture(scope="module")
def urls(photographs: Photographs) -> list[str]:
    return [data_url(photo.resize((224, 168))) for photo in photographs]


def test_text_only(language: Client, colocated: Client) -> None:
    message = user(text_part("Good morning!"))
    assert language.answer(message) == colocated.answer(message)


def test_streaming_gives_the_same_text(language: Client, urls: list[str]) -> None:
    message = user(image_part(urls[0]), text_part("Describe it."))
    response = language.chat(message, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    pieces = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == language.answer(message)


def test_a_batch_of_prompts(language: Client, colocated: Client, urls: list[str]) -> None:
    body = {
        "text": [f"{IMAGE}What?", "No picture here.", f"{IMAGE}{IMAGE}Both?"],
        "image_data": [[urls[0]], None, urls],
        "sampling_params": GREEDY,
    }
    actual = language.generate(**body)
    assert actual.status_code == 200, actual.text
    expected = colocated.generate(**body).json()
    assert [one["text"] for one in actual.json()] == [one["text"] for one in expected]


def test_samples_of_a_batch(language: Client, urls: list[str]) -> None:
    body = {"text": [f"{IMAGE}What?", f"{IMAGE}Where?"], "image_data": [[urls[0]], [urls[1]]]}
    single = language.generate(**body, sampling_params=GREEDY).json()
    double = language.generate(**body, sampling_params={**GREEDY, "n": 2}).json()
    expected = [one["text"] for one in single for _ in range(2)]
    assert [one["text"] for one in double] == expected


def test_placeholders_directly_side_by_side(language: Client, urls: list[str]) -> None:
    """As in a prompt whose template puts no marks between its images."""
    text = language.generate(text=f"{IMAGE}What?", image_data=[urls[0]], sampling_params=GREEDY)
    count = text.json()["meta_info"]["prompt_tokens"]
    adjacent = language.generate(
        text="<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>What?",
        image_data=[urls[0]] * 3,
        sampling_params=GREEDY,
    )
    assert adjacent.status_code == 200, adjacent.text
    # start, end and the question are there once, the image's rows three times.
    rows = (224 // 28) * (168 // 28)
    assert adjacent.json()["meta_info"]["prompt_tokens"] == count + 2 * rows


def test_the_image_mark_of_generate(language: Client, urls: list[str]) -> None:
    marked = language.generate(text="<image>What?", image_data=urls[0], sampling_params=GREEDY)
    native = language.generate(text=f"{IMAGE}What?", image_data=urls[0], sampling_params=GREEDY)
    assert marked.json()["text"] == native.json()["text"]


def test_log_probabilities_of_the_prompt(
    language: Client, colocated: Client, urls: list[str]
) -> None:
    body = {
        "text": f"{IMAGE}What is it?",
        "image_data": [urls[0]],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    actual, expected = (
        [entry[0] for entry in server.generate(**body).json()["meta_info"]["input_token_logprobs"]]
        for server in (language, colocated)
    )
    assert actual[1:] == pytest.approx(expected[1:], abs=1e-3)
