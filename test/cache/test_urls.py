from __future__ import annotations

from sglang_epd.cache import UrlMemory
from sglang_epd.cache.urls import name_of
from sglang_epd.media import Step, Trail, digest

A, B, C = (f"http://user.example/{name}.png?signature=secret" for name in "abc")


def keep(memory: UrlMemory, url: str, content: bytes = b"content") -> None:
    memory.keep(name_of(url), url, digest(content), len(content), Trail((Step(A, 0.0),)))


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


def test_one_is_forgotten_or_all_at_once() -> None:
    memory = UrlMemory(3)
    keep(memory, A)
    keep(memory, B)
    keep(memory, C)
    assert memory.drop(name_of(B))
    assert not memory.drop(name_of(B))
    assert memory.clear() == 2
    assert memory.clear() == 0


def test_a_memory_without_room_holds_nothing() -> None:
    memory = UrlMemory(0)
    keep(memory, A)
    assert len(memory) == 0
