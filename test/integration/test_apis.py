"""Requests with pictures by the other APIs that SGLang has: the answers of one server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import requests
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, until, user
from integration.test_forms import GREEDY, IMAGE
from integration.topology import checkpoint

Photographs = list[Image.Image]
Body = dict[str, Any]
TOKENS = 8


@pytest.fixture(scope="module")
def pictures(photographs: Photographs) -> list[str]:
    """The base64 of two pictures."""
    urls = (data_url(photo.resize((196, 140))) for photo in photographs)
    return [url.partition(",")[2] for url in urls]


def as_url(picture: str) -> str:
    return f"data:image/png;base64,{picture}"


def responses(pictures: list[str], **more: Any) -> Body:
    parts: list[Body] = [
        {"type": "input_image", "image_url": as_url(picture)} for picture in pictures
    ]
    said = {"role": "user", "content": [*parts, {"type": "input_text", "text": "What is there?"}]}
    # This API knows its model by name.
    asked = {"model": checkpoint("tiny-qwen2_5-vl"), "input": [said], "temperature": 0}
    return {**asked, "max_output_tokens": TOKENS, **more}


def messages(pictures: list[str], **more: Any) -> Body:
    parts: list[Body] = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": picture},
        }
        for picture in pictures
    ]
    said = {"role": "user", "content": [*parts, text_part("What is there?")]}
    return {"model": "default", "messages": [said], "temperature": 0, "max_tokens": TOKENS, **more}


def chat(pictures: list[str]) -> Body:
    parts = [image_part(as_url(picture)) for picture in pictures]
    said = user(*parts, text_part("What is there?"))
    return {"model": "default", "messages": [said], "temperature": 0, "max_tokens": TOKENS}


def instances(pictures: list[str]) -> Body:
    urls = [as_url(picture) for picture in pictures]
    one = {"text": f"{IMAGE * len(urls)}What is there?", "image_data": urls}
    return {"instances": [one], "parameters": {"sampling_params": GREEDY}}


def decisions(pictures: list[str]) -> Body:
    question = {"type": "choice", "criteria": {"cup": None, "rocket": None}}
    images = [{"url": as_url(picture)} for picture in pictures]
    return {"model": "default", "state": "Look.", "images": images, "questions": {"q": question}}


def said_in_responses(answer: Any) -> str:
    (message,) = answer["output"]
    text: str = message["content"][0]["text"]
    return text


FORMS: dict[str, tuple[Callable[[list[str]], Body], Callable[[Any], Any]]] = {
    "/v1/responses": (responses, said_in_responses),
    "/v1/messages": (messages, lambda answer: answer["content"][0]["text"]),
    "/invocations": (chat, lambda answer: answer["choices"][0]["message"]["content"]),
    "/vertex_generate": (instances, lambda answer: [one["text"] for one in answer["predictions"]]),
    "/v1/systemone": (
        decisions,
        lambda answer: answer["answers"]["q"]["probabilities"],
    ),
}


@pytest.mark.parametrize("path", FORMS)
def test_a_picture_is_answered_as_by_one_server(
    language: Client, colocated: Client, pictures: list[str], path: str
) -> None:
    body, said = FORMS[path]
    for shown in (pictures[:1], pictures):
        answers = [server.post(path, body(shown)) for server in (language, colocated)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        ours, theirs = (said(answer.json()) for answer in answers)
        assert ours == (pytest.approx(theirs, abs=1e-3) if isinstance(theirs, dict) else theirs)
    another = language.post(path, body(pictures[1:])).json()
    assert said(another) != ours, "else parity would prove nothing"


def events(answer: requests.Response) -> list[Body]:
    """The events of a stream."""
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_streams_give_the_same_text(language: Client, pictures: list[str]) -> None:
    whole = language.post("/v1/responses", responses(pictures)).json()
    found = events(language.post("/v1/responses", responses(pictures, stream=True)))
    deltas = [one["delta"] for one in found if one["type"] == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == said_in_responses(whole)
    told = language.post("/v1/messages", messages(pictures)).json()
    found = events(language.post("/v1/messages", messages(pictures, stream=True)))
    pieces = [one["delta"]["text"] for one in found if one["type"] == "content_block_delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == told["content"][0]["text"]


def test_an_answer_in_the_background(language: Client, pictures: list[str]) -> None:
    """The client that asked has left long before its picture is encoded."""
    path = "/v1/responses"
    expected = said_in_responses(language.post(path, responses(pictures)).json())
    begun = language.post(path, responses(pictures, background=True)).json()
    assert begun["status"] == "queued"

    def ended() -> Body | None:
        now: Body = requests.get(f"{language.url}{path}/{begun['id']}", timeout=20).json()
        if now["status"] in ("queued", "in_progress"):
            return None
        # It has as many tokens as it may have.
        assert now["status"] == "incomplete", now
        return now

    assert said_in_responses(until(ended)) == expected


def test_a_conversation_goes_on_from_its_picture(
    language: Client, colocated: Client, pictures: list[str]
) -> None:
    """SGLang asks again for what the first response was about."""
    answers = []
    for server in (language, colocated):
        first = server.post("/v1/responses", responses(pictures[:1])).json()
        body = {**responses([]), "previous_response_id": first["id"]}
        second = server.post("/v1/responses", body)
        assert second.status_code == 200, second.text
        answers.append(said_in_responses(second.json()))
    assert answers[0] == answers[1]


def test_what_cannot_be_read_is_a_4xx(language: Client) -> None:
    broken = ["bm8gcGljdHVyZQ=="]
    for path in FORMS:
        answer = language.post(path, FORMS[path][0](broken))
        assert 400 <= answer.status_code < 500, f"{path}: {answer.text}"


def test_ollamas_pictures_are_dropped_as_by_one_server(
    language: Client, colocated: Client, pictures: list[str]
) -> None:
    said = {"role": "user", "content": "What is there?", "images": pictures}
    options = {"temperature": 0, "num_predict": TOKENS}
    body = {"model": "default", "messages": [said], "options": options, "stream": False}
    answers = [server.post("/api/chat", body) for server in (language, colocated)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    ours, theirs = (answer.json() for answer in answers)
    assert ours["message"] == theirs["message"]
    assert ours["prompt_eval_count"] == theirs["prompt_eval_count"] < TOKENS * 4


def test_scores_of_text(language: Client, colocated: Client) -> None:
    """The only kind that `/v1/score` has a field for."""
    body = {"model": "default", "query": "A cup of", "items": [" coffee", " wheat"]}
    body["label_token_ids"] = [65, 66]
    answers = [server.post("/v1/score", body) for server in (language, colocated)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    ours, theirs = (answer.json()["scores"] for answer in answers)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(its, rel=1e-2)
