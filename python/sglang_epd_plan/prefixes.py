"""The prefix cache of a language server: the beginnings of prompts whose KV it has. Plain data,
no clock.

A prompt begins with parts that another prompt may begin with: its media, then the earlier turns.
The cache holds chains of such parts. The last text of a prompt is never one of them, so each
prompt has something to prefill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# A name that is equal for equal content, and tokens.
Part = tuple[bytes, int]
Chain = tuple[Part, ...]


@dataclass(slots=True)
class _Entry:
    tokens: int
    pins: int = 0


class PrefixCache:
    """Chains of parts. The least recently used part is evicted first, ends before beginnings.

    Attributes:
        tokens: of all cached parts.
    """

    def __init__(self) -> None:
        self.tokens = 0
        # By the names of all parts up to this one. A chain's first part stands last.
        self._entries: OrderedDict[tuple[bytes, ...], _Entry] = OrderedDict()

    def match(self, chain: Chain) -> int:
        """The number of first parts that are cached; marks them as used."""
        names = []
        for name in _names(chain):
            if name not in self._entries:
                break
            names.append(name)
        self._use(names)
        return len(names)

    def insert(self, chain: Chain) -> None:
        """Cache all parts of a chain."""
        names = list(_names(chain))
        for name, (_, tokens) in zip(names, chain, strict=True):
            if name not in self._entries:
                self._entries[name] = _Entry(tokens)
                self.tokens += tokens
        self._use(names)

    def pin(self, chain: Chain) -> None:
        """Keep a cached chain until `unpin`."""
        for name in _names(chain):
            self._entries[name].pins += 1

    def unpin(self, chain: Chain) -> None:
        for name in _names(chain):
            self._entries[name].pins -= 1

    def shrink(self, room: int) -> None:
        """Evict parts without pins until at most `room` tokens are cached."""
        evicted = []
        for name, entry in self._entries.items():
            if self.tokens <= room:
                break
            if not entry.pins:
                evicted.append(name)
                self.tokens -= entry.tokens
        for name in evicted:
            del self._entries[name]

    def _use(self, names: list[tuple[bytes, ...]]) -> None:
        for name in reversed(names):
            self._entries.move_to_end(name)


def length(chain: Iterable[Part]) -> int:
    """Tokens of a chain."""
    return sum(tokens for _, tokens in chain)


def _names(chain: Chain) -> Iterator[tuple[bytes, ...]]:
    name: tuple[bytes, ...] = ()
    for part, _ in chain:
        name = (*name, part)
        yield name
