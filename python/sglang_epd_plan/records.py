"""A request and its items on their way through a deployment. Times are simulated seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from sglang_epd_plan.prefixes import Chain, Part


class Outcome(Enum):
    """How a request ends; each request ends once."""

    DONE = "done"
    LATE = "late"  # an embedding had not arrived at the deadline: 504
    TOO_LARGE = "too large"  # the KV cache or the receive budget can never hold it: 4xx


@dataclass(slots=True, eq=False)
class Item:
    """One image, video or audio clip.

    Attributes:
        steps: of a video, equal parts in time.
        encoder: number of the encoder that has the item in work; -1 if none has.
        tries: how often the item was sent again.
        source: how its embedding came about on an encoder (`sglang_epd.wire.http.ItemOutcome`).
        prepared, granted, begun, encoded, received: the ends of preprocessing, of the wait for
            memory at the receiver, of the wait for the tower, of the forward pass and of the
            transfer; 0 until then.
    """

    request: Request
    key: bytes
    patches: float
    tokens: int
    steps: int = 1
    encoder: int = -1
    tries: int = 0
    source: str = ""
    prepared: float = 0.0
    granted: float = 0.0
    begun: float = 0.0
    encoded: float = 0.0
    received: float = 0.0


@dataclass(slots=True, eq=False)
class Conversation:
    """The state that the turns of one conversation share.

    Attributes:
        turns_left: turns that are still to come.
        history: texts and answers of earlier turns.
    """

    turns_left: int
    history: list[Part] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One request, or one turn of a conversation.

    Attributes:
        kind: index of its kind in the workload.
        prompt: prompt tokens, those of items included.
        output: tokens of the answer.
        text: prompt tokens that no earlier prompt had.
        conversation: None for a single request.
        chain: the parts of the prompt before that text.
        pinned: parts of the chain that were in the prefix cache at arrival, and stay there.
        items_left: items whose embedding is still to come.
        begun: the prefill has begun.
        cached: prompt tokens that the prefix cache had when the prefill began.
        encoded: first items that a server with a tower has encoded or found in its prefix cache.
        prefilled: prompt tokens in the KV cache, the cached ones included.
        whole, roomy: nothing of the prompt is missing; a decode server has made room for it.
        passed_on: when its prefill server has seen that the KV has arrived, before which no router
            passes the answer on.
        complete, prefill_begun, prefill_ended, first, ended: when nothing of the prompt was
            missing, the prefill began and ended, and the first and the last token left.
    """

    number: int
    kind: int
    arrived: float
    deadline: float
    prompt: int
    output: int
    items: list[Item] = field(default_factory=list)
    text: int = 0
    conversation: Conversation | None = None
    chain: Chain = ()
    pinned: int = 0
    items_left: int = 0
    begun: bool = False
    cached: int = 0
    encoded: int = 0
    prefilled: int = 0
    whole: bool = False
    roomy: bool = True
    passed_on: float = 0.0
    complete: float = 0.0
    prefill_begun: float = 0.0
    prefill_ended: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    outcome: Outcome | None = None

    def items_before(self, tokens: int, *, kept: bool) -> list[Item]:
        """The items to encode for a prefill up to so many prompt tokens: those that begin among
        its tokens, and without embeddings that are kept the one that an earlier chunk cut, too."""
        first, begin = self.encoded, sum(item.tokens for item in self.items[: self.encoded])
        if not kept and first and begin > self.prefilled:
            first -= 1
        while self.encoded < len(self.items) and begin < tokens:
            begin += self.items[self.encoded].tokens
            self.encoded += 1
        return self.items[first : self.encoded]

    def turn(self) -> tuple[Part, Part]:
        """The tokens that this turn adds to the next prompt: its text, and its answer."""
        name = self.number.to_bytes(8)
        return (b"text" + name, self.text), (b"answer" + name, self.output)

    def finish(self, outcome: Outcome, now: float) -> None:
        """End the request.

        Raises:
            AssertionError: it has ended before.
        """
        if self.outcome is not None:
            raise AssertionError(f"request {self.number} ends twice")
        self.outcome, self.ended = outcome, now
