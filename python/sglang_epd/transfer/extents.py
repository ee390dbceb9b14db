"""Which bytes of an arena are free. Plain data: knows sizes and offsets, no memory.

Small or whole requests are placed from the low end, so that the same warm pages are
used again and again; ranges that may stay for longer go to the high end.
"""

from __future__ import annotations

import bisect

ALIGNMENT = 4096


class Extents:
    """Allocates byte ranges of [0, size), first fit from either end.

    Args:
        size: bytes; rounded down to the alignment.

    Attributes:
        taken_bytes: in use, alignment included.
    """

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        # Sorted, disjoint, never adjacent: [begin, end).
        self._free: list[tuple[int, int]] = [(0, self.size)] if self.size else []
        self._taken: dict[int, int] = {}
        self.taken_bytes = 0

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """The free ranges, as [begin, end) in order."""
        return list(self._free)

    def take(
        self, nbytes: int, *, high: bool = False, within: tuple[int, int] | None = None
    ) -> int | None:
        """Offset of a free range of `nbytes`, or None if there is none.

        Args:
            high: the highest such range, not the lowest.
            within: look nowhere but in [begin, end); both aligned.
        """
        wanted = aligned(nbytes)
        lowest, highest = within or (0, self.size)
        order = range(len(self._free) - 1, -1, -1) if high else range(len(self._free))
        for index in order:
            begin, end = self._free[index]
            bottom, top = max(begin, lowest), min(end, highest)
            if top - bottom < wanted:
                continue
            offset = top - wanted if high else bottom
            left = (begin, offset), (offset + wanted, end)
            self._free[index : index + 1] = [rest for rest in left if rest[0] < rest[1]]
            self._taken[offset] = wanted
            self.taken_bytes += wanted
            return offset
        return None

    def give(self, offset: int) -> None:
        """Give a range back.

        Raises:
            AssertionError: no range was taken there.
        """
        if offset not in self._taken:
            raise AssertionError(f"nothing was taken at {offset}")
        nbytes = self._taken.pop(offset)
        self.taken_bytes -= nbytes
        begin, end = offset, offset + nbytes
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the size of an allocation."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
