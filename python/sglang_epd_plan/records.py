"""One request and its items on their way through a deployment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from sglang_epd_plan.prefixes import Chain, Part


class Outcome(Enum):
    """How a request ends; each does once."""

    DONE = "done"
    LATE = "late"  # its media were not there at its deadline: 504
    TOO_LARGE = "too large"  # more than the KV cache or the receive budget holds: 4xx


@dataclass(slots=True, eq=False)
class Item:
    """One image, video or sound. Times are simulated seconds.

    Attributes:
        encoder: the number of the one that has it, or had it until it landed; -1 for none.
        tries: encoders that have refused or lost it.
        prepared, granted, begun, encoded, landed: the ends of preparing, of waiting for memory
            where it goes, of waiting for the tower, of the forward pass and of the transfer; 0
            until then.
    """

    request: Request
    key: bytes
    patches: float
    tokens: int
    encoder: int = -1
    tries: int = 0
    prepared: float = 0.0
    granted: float = 0.0
    begun: float = 0.0
    encoded: float = 0.0
    landed: float = 0.0


@dataclass(slots=True, eq=False)
class Talk:
    """A conversation.

    Attributes:
        left: turns that are to come.
        said: the texts and answers of the turns that were.
    """

    number: int
    left: int
    said: list[Part] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One request, or turn of a conversation.

    Attributes:
        prompt: tokens, those of its items included.
        output: tokens.
        text: tokens of its prompt that no prompt before it had.
        talk: whose turn it is, if there are several.
        chain: the parts of its prompt before that text.
        found: of the chain, parts that were in the prefix cache when it came, and pinned.
        left: items that have not landed.
        begun: its prefill.
        covered, prefilled: of its prompt, tokens that were in the prefix cache when its prefill
            began; and those with what was prefilled since.
        landed, began, first, ended: when its media were there, its prefill began, its first
            token left, its last one did.
    """

    number: int
    kind: int
    arrived: float
    deadline: float
    prompt: int
    output: int
    items: list[Item] = field(default_factory=list)
    text: int = 0
    talk: Talk | None = None
    chain: Chain = ()
    found: int = 0
    left: int = 0
    begun: bool = False
    covered: int = 0
    prefilled: int = 0
    landed: float = 0.0
    began: float = 0.0
    prefill_ended: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    outcome: Outcome | None = None

    def says(self) -> tuple[Part, Part]:
        """What it adds to the prompt of the next turn: its text, and its answer."""
        name = self.number.to_bytes(8)
        return (b"text" + name, self.text), (b"answer" + name, self.output)

    def finish(self, outcome: Outcome, now: float) -> None:
        """It is over.

        Raises:
            AssertionError: it was already.
        """
        if self.outcome is not None:
            raise AssertionError(f"request {self.number} ends twice")
        self.outcome, self.ended = outcome, now
