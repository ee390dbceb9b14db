"""One request and its items on their way through a deployment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """How a request ends; each does once."""

    DONE = "done"
    LATE = "late"  # its media were not there at its deadline: 504
    TOO_LARGE = "too large"  # more than the KV cache or the receive budget holds: 4xx


@dataclass(slots=True, eq=False)
class Item:
    """One image, video or sound. Times are simulated seconds.

    Attributes:
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
class Request:
    """One request.

    Attributes:
        prompt: tokens, those of its items included.
        output: tokens.
        left: items that have not landed.
        prefilled: of its prompt, tokens.
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
    left: int = 0
    prefilled: int = 0
    landed: float = 0.0
    began: float = 0.0
    prefill_ended: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    outcome: Outcome | None = None

    def finish(self, outcome: Outcome, now: float) -> None:
        """It is over.

        Raises:
            AssertionError: it was already.
        """
        if self.outcome is not None:
            raise AssertionError(f"request {self.number} ends twice")
        self.outcome, self.ended = outcome, now
