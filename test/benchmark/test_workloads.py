"""Requests are a function of workload, scale, seed and number."""

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from comparison.clients import write_load
from comparison.files import read_all
from comparison.workloads import Request, Workload, requests


def count(text: str) -> int:
    """A tokenizer of words."""
    return len(text.split())


@pytest.fixture(scope="module")
def workloads(request: pytest.FixtureRequest) -> dict[str, Workload]:
    folder = Path(__file__).parents[2] / "benchmark" / "workloads"
    found = {}
    for one in read_all(folder, Workload):
        # Pictures as small as can be: what is tested is which and how many.
        sizes = [
            msgspec.structs.replace(size, width=28 + index, height=28)
            for index, size in enumerate(one.small.sizes)
        ]
        small = msgspec.structs.replace(one.small, sizes=sizes)
        found[one.name] = msgspec.structs.replace(one, small=small)
    return found


def take(workload: Workload, number: int, seed: object = 1) -> list[Request]:
    return list(islice(requests(workload, "small", seed, count), number))


def images(request: Request) -> list[str]:
    parts = [part for turn in request.turns for part in turn]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


@pytest.mark.parametrize("name", ["images", "chat", "repeats", "turns", "interference"])
def test_the_same_for_a_seed_and_different_for_another(
    workloads: dict[str, Workload], name: str
) -> None:
    workload = workloads[name]
    first, again, other = take(workload, 12), take(workload, 12), take(workload, 12, seed=2)
    assert first == again
    assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))
    # However many are asked for.
    assert take(workload, 3) == first[:3]


def test_pictures_come_once_unless_a_workload_repeats_them(
    workloads: dict[str, Workload],
) -> None:
    seen = [url for request in take(workloads["images"], 40) for url in images(request)]
    assert len(set(seen)) == len(seen)
    again = [url for request in take(workloads["repeats"], 40) for url in images(request)]
    pool = workloads["repeats"].small.repeats
    assert pool is not None and len(set(again)) <= pool.pool < len(again)


def test_a_window_slides_over_the_pictures_of_a_conversation(
    workloads: dict[str, Workload],
) -> None:
    workload = msgspec.structs.replace(workloads["turns"], sliding=True)
    first, second = take(workload, 2)
    shown = [images(msgspec.structs.replace(first, turns=[turn])) for turn in first.turns]
    assert [len(turn) for turn in shown] == [3, 3, 3, 3]
    for turn, after in pairwise(shown):
        assert turn[1:] == after[:-1] and after[-1] not in turn
    assert not {url for turn in shown for url in turn} & set(images(second))


def test_a_load_is_a_file_whose_digest_tells_its_bytes(
    workloads: dict[str, Workload], tmp_path: Path
) -> None:
    workload = workloads["interference"]

    def written(name: str, seed: object) -> Any:
        made = requests(workload, "small", seed, count)
        return write_load(tmp_path / name, made, 10, 2.0, seed=5)

    mine, theirs, other = written("a", 1), written("b", 1), written("c", 2)
    assert mine.digest == theirs.digest != other.digest
    assert mine.path.read_bytes() == theirs.path.read_bytes()
    lines = [json.loads(line) for line in mine.path.read_text().splitlines()]
    assert len(lines) == 10 == len(mine.kinds)
    assert all(line["max_tokens"] == 48 and line["ignore_eos"] for line in lines)
