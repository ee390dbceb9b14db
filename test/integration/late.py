"""A question whose last picture is late, and what early prefill makes of it."""

from __future__ import annotations

import random
from typing import Any

from PIL import Image

from integration.client import data_url, image_part, text_part, until, user
from integration.counters import total
from integration.listener import Site


def question(name: str, photographs: list[Image.Image]) -> list[dict[str, Any]]:
    """One that no other name has, about four pictures of which two are the same. The last one
    differs from all that were ever encoded."""
    draw = random.Random(name)
    crops = []
    for _ in range(3):
        left, top = draw.randrange(0, 300), draw.randrange(0, 200)
        crops.append(image_part(data_url(photographs[0].crop((left, top, left + 224, top + 168)))))
    said = text_part(f"This is {name}. Look closely at these pictures: ")
    return [user(said, *crops[:2], text_part("and"), crops[0], crops[2], text_part("What now?"))]


class Late:
    """A question whose last picture is held up.

    Args:
        url: of the server that prefills it.
        asked: as `question` makes it.
    """

    def __init__(self, url: str, site: Site, asked: list[dict[str, Any]]) -> None:
        self.url = url
        self._before = {one: self.count(one) for one in ("done", "withdrawn", "failed")}
        self._tokens = total(self.url, "early_tokens_total")
        (last,) = site.linked([user(asked[0]["content"][-2])])[0]["content"]
        site.slow_s = 60.0
        self.messages = [user(*asked[0]["content"][:-2], last, asked[0]["content"][-1])]
        self._path = last["image_url"]["url"].removeprefix(site.url)
        self._site = site

    def count(self, outcome: str) -> float:
        return total(self.url, "early_parts_total", outcome=outcome)

    def gave_back(self) -> bool:
        return total(self.url, "receiver_held_bytes") == 0

    def counted(self, outcome: str) -> float:
        return self.count(outcome) - self._before[outcome]

    @property
    def tokens(self) -> float:
        """Prefilled early since this was made."""
        return total(self.url, "early_tokens_total") - self._tokens

    def wait(self, picture: int = 48) -> None:
        """Until all before the last picture is prefilled: text, and three pictures.

        Args:
            picture: tokens of one; as many as a Qwen2.5-VL has of it.
        """
        until(lambda: self._path in self._site.asked)
        until(lambda: self.tokens > 3 * picture, 30.0, "nothing was prefilled early")
        self.done = self.tokens
