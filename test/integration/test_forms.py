"""Every form of request that SGLang takes, through the encoder."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from PIL import Image
from transformers import AutoTokenizer

from integration.client import (
    GREEDY,
    IMAGE,
    Client,
    data_url,
    image_part,
    text_part,
    until,
    user,
)
from integration.counters import status
from integration.listener import Site
from integration.topology import Topology, checkpoint

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


def test_decisions_about_a_picture(language: Client, colocated: Client, urls: list[str]) -> None:
    """`/v1/decisions` scores the answers in one batch of prompts of token ids."""
    options = [{"name": name} for name in ("cup", "rocket")]
    body = {
        "model": "default",
        "input": "Look.",
        "images": [urls[0]],
        "questions": [
            {"id": name, "type": "choice", "question": name, "options": options}
            for name in ("What?", "Which?")
        ],
    }
    actual, expected = (server.post("/v1/decisions", body) for server in (language, colocated))
    assert actual.status_code == expected.status_code == 200, actual.text
    for name, answer in expected.json()["answers"].items():
        found = actual.json()["answers"][name]
        assert found["probabilities"] == pytest.approx(answer["probabilities"], abs=1e-3)
        assert found["label_mass"] == pytest.approx(answer["label_mass"], rel=1e-2)


def test_an_answer_of_a_given_form(language: Client, colocated: Client, urls: list[str]) -> None:
    body = {
        "text": f"{IMAGE}What?",
        "image_data": [urls[0]],
        "sampling_params": {**GREEDY, "regex": "(cup|rocket)"},
    }
    actual, expected = (server.generate(**body).json()["text"] for server in (language, colocated))
    assert actual == expected
    assert actual in ("cup", "rocket")


def test_a_session(language: Client, colocated: Client, urls: list[str]) -> None:
    """Each request goes on from the one before, whose pictures are in its prompt."""
    turns = (
        (f"{IMAGE}What?", [urls[0]]),
        ("And now?", None),
        # A picture that is known here, and a new one.
        (f"{IMAGE}And this?", [urls[0]]),
        (f"{IMAGE}And that?", [urls[1]]),
    )
    texts = []
    for server in (language, colocated):
        session = server.post("/open_session", {"capacity_of_str_len": 10_000}).json()
        told: dict[str, Any] = {"id": session}
        answers = []
        for text, images in turns:
            answer = server.generate(
                text=text, image_data=images, sampling_params=GREEDY, session_params=told
            )
            assert answer.status_code == 200, answer.text
            told = {"id": session, "rid": answer.json()["meta_info"]["id"]}
            answers.append(answer.json()["text"])
        server.post("/close_session", {"session_id": session})
        texts.append(answers)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause(language: Client, urls: list[str], mode: str) -> None:
    """A request that comes meanwhile is answered afterwards."""
    body = {"text": f"{IMAGE}What is {mode}?", "image_data": [urls[0]], "sampling_params": GREEDY}
    expected = language.generate(**body).json()["text"]
    assert language.post("/pause_generation", {"mode": mode}).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        try:
            answer = pool.submit(language.generate, **body)
            time.sleep(0.5)
            assert not answer.done()
        finally:
            assert language.post("/continue_generation", {}).status_code == 200
        assert answer.result().json()["text"] == expected


def test_a_request_that_is_aborted_while_its_picture_is_read(
    qwen2_5: Topology, language: Client, site: Site
) -> None:
    site.slow_s = 30.0
    body = {"text": f"{IMAGE}What?", "image_data": [f"{site.url}/slow.png"], "rid": "to be aborted"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(language.generate, **body, sampling_params=GREEDY)
        until(lambda: site.asked)
        assert language.post("/abort_request", {"rid": body["rid"]}).status_code == 200
        assert answer.result(10).status_code == 400
    until(lambda: status(qwen2_5)["items"] == 0, seconds=10.0)


def test_an_update_of_the_weights(
    qwen2_5: Topology, language: Client, colocated: Client, urls: list[str]
) -> None:
    """Of the same checkpoint, tower and all: the answers stay one server's."""
    path = checkpoint(qwen2_5.model)
    answer = requests.post(
        f"{language.url}/update_weights_from_disk", json={"model_path": path}, timeout=60
    )
    assert answer.json()["success"], answer.text
    message = user(image_part(urls[1]), text_part("After the update?"))
    assert language.answer(message) == colocated.answer(message)


def test_token_ids_that_were_expanded_already(
    qwen2_5: Topology, language: Client, urls: list[str]
) -> None:
    """As a text that was. (One server may leave them unanswered, where it knows the image.)"""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(qwen2_5.model))
    text = f"{IMAGE}What?".replace("<|image_pad|>", "<|image_pad|>" * 48)
    body = {"image_data": [urls[0]], "sampling_params": GREEDY}
    plain, *expanded = (
        language.generate(**prompt, **body).json()
        for prompt in (
            {"text": f"{IMAGE}What?"},
            {"text": text},
            {"input_ids": tokenizer.encode(text)},
        )
    )
    for answer in expanded:
        assert answer["text"] == plain["text"]
        assert answer["meta_info"]["prompt_tokens"] == plain["meta_info"]["prompt_tokens"]


def test_media_that_are_preprocessed_only(language: Client) -> None:
    """A body has no field for them."""
    pixels = {"format": "processor_output", "pixel_values": [[0.5]], "image_grid_thw": [[1, 2, 2]]}
    answer = language.generate(input_ids=[1, 2], image_data=[pixels], sampling_params=GREEDY)
    assert answer.status_code == 400
    assert "unknown field `format`" in answer.text
