"""Sequences that decode together, many steps at a time. Plain data, no clock.

Until a sequence joins or ends, steps differ only in their context, which grows by one token a
sequence and step. So the time of many steps is a sum in closed form.
"""

from __future__ import annotations

import heapq
import math

from sglang_epd.profile import LanguageCosts
from sglang_epd_plan.records import Request


class DecodeBatch:
    """The sequences that decode on one server.

    Attributes:
        context: tokens of all sequences together.
    """

    def __init__(self, costs: LanguageCosts) -> None:
        self._costs = costs
        self._steps = 0
        self._ends: list[tuple[int, int, Request]] = []
        self.context = 0.0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, request: Request) -> None:
        """A request that has its first token and wants at least one more."""
        self.context += request.prompt + 1
        heapq.heappush(self._ends, (self._steps + request.output - 1, request.number, request))

    def until_next(self) -> int:
        """Steps until the first sequence ends."""
        return self._ends[0][0] - self._steps

    def seconds(self, steps: int) -> float:
        """Time of the next steps."""
        count = len(self._ends)
        growth = self._costs.decode_context_s * count * steps * (steps - 1) / 2
        return steps * self._costs.step_s(count, self.context) + growth

    def steps_begun(self, seconds: float) -> int:
        """Steps that have begun after so many seconds; at least one."""
        square = self._costs.decode_context_s * len(self._ends) / 2
        line = self._costs.step_s(len(self._ends), self.context) - square
        if square > 0:
            steps = (math.sqrt(line * line + 4 * square * seconds) - line) / (2 * square)
        elif line > 0:
            steps = seconds / line
        else:
            return self.until_next()
        return max(1, min(self.until_next(), math.ceil(steps - 1e-9)))

    def advance(self, steps: int) -> list[Request]:
        """Do steps, and return the requests that end with the last of them."""
        self._steps += steps
        self.context += steps * len(self._ends)
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            request = heapq.heappop(self._ends)[2]
            self.context -= request.prompt + request.output
            ended.append(request)
        return ended
