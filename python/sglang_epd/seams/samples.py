"""Prompts with n > 1: each is announced in its turn, and each of its samples for itself.

SGLang sends a prompt once, to fill the prefix cache; when it has done so with all prompts of a
request, one after the other, it sends each of them once a sample. All prompts at once could take
the memory that the first one waits for. So the items of a prompt are announced when the prompt
before it is sent, and nothing is held for samples: as a rule the prefix cache has their items.

Leans on `managers.tokenizer_manager.TokenizerManager._handle_batch_request`, which makes its
requests of copies of a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_epd.errors import EpdError
from sglang_epd.wire.messages import Expect, Settled

# Beside SGLang's fields of a prompt.
_ATTRIBUTE = "_sglang_epd_sampled"
# An announcement, and what becomes of it: None, or its error.
Begun = tuple[Expect, "asyncio.Future[EpdError | None] | None"]


def count(request: Any) -> int:
    """How many samples a user's request asks for of each prompt."""
    return getattr(request, "parallel_sample_num", 1)


@dataclass(eq=False)
class Sampled:
    """A prompt with n > 1.

    Attributes:
        rid: its own.
        begin: announces its items for the request of such an id.
        following: the prompt that is sent next.
    """

    rid: str
    begin: Callable[[str], Begun]
    following: Sampled | None = None
    _begun: Begun | None = None
    _sent: bool = False

    def announce(self) -> Begun:
        """Announce its items for the request that fills the prefix cache, once."""
        self._begun = self._begun or self.begin(self.rid)
        return self._begun

    def next(self, rid: str) -> Expect | Settled:
        """What its next request is to carry: how its items were announced or, of a sample, why
        the first request for them failed. Where answers are streamed SGLang asks for samples all
        the same."""
        expect, outcome = self.announce()
        if self.following is not None:
            self.following.announce()
        if not self._sent:
            self._sent = True
            return expect
        ended = outcome is not None and outcome.done() and not outcome.cancelled()
        error = outcome.result() if outcome is not None and ended else None
        if error is not None:
            return Settled("", (), error.code, error.message)
        return self.begin(rid)[0]


def mark(prompt: Any, sampled: Sampled) -> None:
    """Note on a prompt, and so on each copy of it, that samples of it are asked for."""
    setattr(prompt, _ATTRIBUTE, sampled)


def find(prompt: Any) -> Sampled | None:
    """The note on a prompt or a copy of it."""
    found: Sampled | None = getattr(prompt, _ATTRIBUTE, None)
    return found
