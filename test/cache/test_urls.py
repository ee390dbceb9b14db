from __future__ import annotations

from sglang_epd.cache import UrlMemory
from sglang_epd.media import Step, Trail, digest

A, B, C = b"a", b"b", b"c"


def keep(memory: UrlMemory, name: bytes, content: bytes = b"content") -> None:
    memory.keep(name, digest(content), len(content), Trail((Step("http://a", 0.0),)))


def test_the_least_recently_used_goes_first() -> None:
    memory = UrlMemory(2)
    keep(memory, A)
    keep(memory, B)
    assert memory.find(A) is not None
    keep(memory, C)
    assert memory.find(B) is None
    keep(memory, A, b"other")
    keep(memory, B)
    assert memory.find(C) is None
    found = memory.find(A)
    assert found is not None
    assert (found.digest, found.nbytes) == (digest(b"other"), 5), "new content takes its place"
    assert len(memory) == 2


def test_one_is_forgotten_or_all_at_once() -> None:
    memory = UrlMemory(3)
    for name in (A, B, C):
        keep(memory, name)
    for _ in range(2):
        memory.drop(B)
    assert memory.clear() == 2
    assert memory.clear() == 0


def test_a_memory_without_room_holds_nothing() -> None:
    memory = UrlMemory(0)
    keep(memory, A)
    assert len(memory) == 0
