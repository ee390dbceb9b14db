from __future__ import annotations

import pytest

from sglang_epd.cache import UrlMemory
from sglang_epd.cache.urls import name_of
from sglang_epd.media import Step, Trail, digest

A, B, C = (f"http://user.example/{name}.png?signature=secret" for name in "abc")


def trail(until: float = 0.0) -> Trail:
    return Trail((Step(A, until),))


def keep(memory: UrlMemory, url: str, content: bytes = b"content") -> None:
    memory.keep(name_of(url), url, digest(content), len(content), trail())


def names(memory: UrlMemory) -> list[bytes]:
    return [name for name, _ in memory.entries()]


def test_the_least_recently_used_goes_first() -> None:
    memory = UrlMemory(2)
    keep(memory, A)
    keep(memory, B)
    assert memory.find(name_of(A)) is not None
    keep(memory, C)
    assert names(memory) == [name_of(A), name_of(C)]
    assert memory.find(name_of(B)) is None
    keep(memory, A, b"other")
    assert names(memory) == [name_of(C), name_of(A)]
    assert len(memory) == 2


def test_new_content_takes_the_place_of_the_old() -> None:
    memory = UrlMemory(2)
    keep(memory, A)
    assert memory.find(name_of(A)) is not None
    keep(memory, A, b"other")
    found = memory.find(name_of(A))
    assert found is not None
    assert (found.digest, found.nbytes, found.uses) == (digest(b"other"), 5, 2)


def test_nobody_sees_what_a_url_keeps_secret() -> None:
    memory = UrlMemory(2)
    keep(memory, A)
    found = memory.find(name_of(A))
    assert found is not None
    assert found.shown == "http://user.example/a.png"
    assert "secret" not in repr(found)


def test_what_was_forgotten_is_not_confirmed() -> None:
    memory = UrlMemory(2)
    keep(memory, A)
    memory.confirm(name_of(A), digest(b"content"), trail(5.0))
    found = memory.find(name_of(A))
    assert found is not None
    assert found.trail.fresh_until == 5.0
    memory.confirm(name_of(A), digest(b"another"), trail(9.0))
    assert found.trail.fresh_until == 5.0
    assert memory.drop(name_of(A))
    memory.confirm(name_of(A), digest(b"content"), trail(9.0))
    assert not memory.drop(name_of(A))
    assert len(memory) == 0


def test_all_are_forgotten_at_once() -> None:
    memory = UrlMemory(2)
    keep(memory, A)
    keep(memory, B)
    assert memory.clear() == 2
    assert memory.clear() == 0


def test_a_memory_holds_something() -> None:
    with pytest.raises(ValueError, match="positive"):
        UrlMemory(0)
