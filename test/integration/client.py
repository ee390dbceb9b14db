"""Requests as users send them, and what is compared of the answers."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import requests
from PIL import Image

from waiting import reached

TIMEOUT_S = 120.0
# Of log-probabilities that are computed in another order.
TOLERANCE = 1e-3
# An image of Qwen's models in a prompt, and sampling that has one answer.
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = {"max_new_tokens": 8, "temperature": 0}
T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 60.0, why: object = "") -> T:
    """Wait for a condition that nobody signals; returns what made it true."""
    return reached(condition, seconds, why, pause_s=0.1)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(image: Image.Image | bytes, media_type: str = "image/png") -> str:
    """A data URL of an image (as PNG) or of raw bytes."""
    image = png(image) if isinstance(image, Image.Image) else image
    return f"data:{media_type};base64,{base64.b64encode(image).decode()}"


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def video_part(video: bytes, media_type: str = "video/mp4") -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(video, media_type)}}


def audio_part(audio: bytes, media_type: str = "audio/wav") -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": data_url(audio, media_type)}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def about_a_crop(photographs: list[Image.Image], number: int) -> dict[str, Any]:
    """A question about one part of a photograph, another for each number."""
    draw = random.Random(number)
    left, top = draw.randrange(0, 300), draw.randrange(0, 200)
    picture = photographs[number % 2].crop((left, top, left + 280, top + 196))
    return user(image_part(data_url(picture)), text_part(f"What is picture {number}?"))


@dataclass(frozen=True)
class Generation:
    """Generated tokens and, for each, the log-probabilities of the likeliest ones."""

    tokens: list[str]
    top: list[dict[str, float]]
    prompt_tokens: int

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Generation:
        """Of a chat with log-probabilities."""
        content = answer["choices"][0]["logprobs"]["content"]
        return cls(
            tokens=[entry["token"] for entry in content],
            top=[
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in content
            ],
            prompt_tokens=answer["usage"]["prompt_tokens"],
        )

    def distance(self, other: Generation) -> float:
        """Largest difference over the tokens that both list at a position."""
        assert len(self.top) == len(other.top)
        gaps = [
            abs(mine[token] - theirs[token])
            for mine, theirs in zip(self.top, other.top, strict=True)
            for token in mine.keys() & theirs.keys()
        ]
        assert len(gaps) >= 15 * len(self.top), "the two list different tokens"
        return max(gaps)

    def check(self, expected: Generation) -> None:
        """It is the same answer to the same prompt."""
        assert self.prompt_tokens == expected.prompt_tokens
        assert self.tokens == expected.tokens
        assert self.distance(expected) < TOLERANCE

    def change(self, other: Generation) -> float:
        """By how much the likeliest first tokens differ; the two may even share none."""
        shared = self.top[0].keys() & other.top[0].keys()
        gaps = [abs(self.top[0][token] - other.top[0][token]) for token in shared]
        return max(gaps, default=float("inf"))


class Client:
    """One server's APIs.

    Args:
        headers: sent with every request.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self.url = url
        self._headers = headers or {}

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> requests.Response:
        shown = {**self._headers, **(headers or {})}
        return requests.post(f"{self.url}{path}", json=body, headers=shown, timeout=TIMEOUT_S)

    def chat(self, *messages: dict[str, Any], **options: Any) -> requests.Response:
        body = {"model": "default", "messages": list(messages), "temperature": 0, "max_tokens": 16}
        return self.post("/v1/chat/completions", {**body, **options})

    def leaves(self, *messages: dict[str, Any], after_s: float, **options: Any) -> None:
        """Ask, and be gone before there is an answer."""
        body = {"model": "default", "messages": list(messages), **options}
        with pytest.raises(requests.Timeout):
            url = f"{self.url}/v1/chat/completions"
            requests.post(url, json=body, headers=self._headers, timeout=(5.0, after_s))

    def flush(self) -> bool:
        """Have it forget its KV; whether it has, which it does while nothing runs."""
        return self.post("/flush_cache", {}).ok

    def answer(self, *messages: dict[str, Any], **options: Any) -> str:
        """The text of a chat that is to succeed."""
        response = self.chat(*messages, **options)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["message"]["content"]
        return text

    def generation(self, *messages: dict[str, Any], tokens: int = 16, **options: Any) -> Generation:
        """Greedy generation with top-20 log-probabilities."""
        told = {"max_tokens": tokens, "logprobs": True, "top_logprobs": 20}
        response = self.chat(*messages, **told, **options)
        assert response.status_code == 200, response.text
        return Generation.of(response.json())

    def generate(self, **body: Any) -> requests.Response:
        return self.post("/generate", body)
