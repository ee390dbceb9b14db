"""The prefix cache of a language server: which beginnings of prompts have their KV there.
Plain data, no clock.

A prompt begins with parts that another may begin with, too: its media, then what was said in
the turns before. The cache holds chains of such parts; the last text of a prompt is never
among them, so there is always something to prefill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# What a part is, equal for equal KV after equal parts; and its tokens.
Part = tuple[bytes, int]
Chain = tuple[Part, ...]


@dataclass(slots=True)
class _Held:
    tokens: int
    pins: int = 0


class Prefixes:
    """Chains of parts, the least recently used given up first, ends before beginnings.

    Attributes:
        tokens: of all parts that are held.
    """

    def __init__(self) -> None:
        self.tokens = 0
        # By all parts up to and with this one. Of one chain the first part is the last here.
        self._held: OrderedDict[tuple[bytes, ...], _Held] = OrderedDict()

    def match(self, chain: Chain) -> int:
        """How many of its first parts are here; they are used now."""
        names = []
        for name in _names(chain):
            if name not in self._held:
                break
            names.append(name)
        for name in reversed(names):
            self._held.move_to_end(name)
        return len(names)

    def keep(self, chain: Chain) -> None:
        """Its KV is here from now on."""
        names = list(_names(chain))
        for name, (_, tokens) in zip(names, chain, strict=True):
            if name not in self._held:
                self._held[name] = _Held(tokens)
                self.tokens += tokens
        for name in reversed(names):
            self._held.move_to_end(name)

    def pin(self, chain: Chain, depth: int) -> None:
        """Its first parts stay until `unpin`."""
        for name in _names(chain[:depth]):
            self._held[name].pins += 1

    def unpin(self, chain: Chain, depth: int) -> None:
        for name in _names(chain[:depth]):
            self._held[name].pins -= 1

    def shrink(self, room: int) -> None:
        """Give up what is over so many tokens, and not pinned."""
        given_up = []
        for name, held in self._held.items():
            if self.tokens <= room:
                break
            if not held.pins:
                given_up.append(name)
                self.tokens -= held.tokens
        for name in given_up:
            del self._held[name]


def length(chain: Iterable[Part]) -> int:
    """Tokens of its parts."""
    return sum(tokens for _, tokens in chain)


def _names(chain: Chain) -> Iterator[tuple[bytes, ...]]:
    name: tuple[bytes, ...] = ()
    for part, _ in chain:
        name = (*name, part)
        yield name
