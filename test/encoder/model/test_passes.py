"""Long videos in several passes; `test_towers` has the real towers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from sglang_epd.device import Host
from sglang_epd.encoder.breakage import Breakage
from sglang_epd.encoder.model import engine as module
from sglang_epd.encoder.model.copyout import CopyOut
from sglang_epd.encoder.model.engine import Engine
from sglang_epd.encoder.model.passes import in_passes, within_steps
from sglang_epd.encoder.tower import Prepared, TowerBrokenError
from sglang_epd.errors import RequestCancelledError
from sglang_epd.wire.messages import Layout, TensorSpec
from waiting import until

# Of a step: eight patches, two rows.
STEP = (2, 4)
WIDTH = 3


def video(steps: int, modality: str = "VIDEO") -> Prepared:
    patches = steps * 8
    item = SimpleNamespace(
        feature=torch.arange(float(patches)).unsqueeze(1),
        model_specific_data={"video_grid_thw": torch.tensor([[steps, *STEP]]), "other": 7},
    )
    layout = Layout(modality, TensorSpec("float32", (patches // 4, WIDTH)), [[steps, *STEP]])
    return Prepared(layout, patches, modality, (modality, [item], "event"))


@pytest.mark.parametrize(
    ("patches", "steps"),
    [(1, [1] * 5), (8, [1] * 5), (23, [2, 2, 1]), (39, [3, 2]), (40, [5]), (1000, [5])],
)
def test_a_video_has_as_few_passes_of_whole_steps_as_have_room(patches, steps):
    whole = video(5)
    passes = in_passes(whole, patches)
    assert [one.layout.grid for one in passes] == [[[count, *STEP]] for count in steps]
    assert [one.layout.tokens for one in passes] == [2 * count for count in steps]
    assert [one.patches for one in passes] == [8 * count for count in steps]
    features = [one.content[1][0].feature for one in passes]
    assert torch.equal(torch.cat(features), whole.content[1][0].feature)
    for one, count in zip(passes, steps, strict=True):
        item = one.content[1][0]
        assert item.model_specific_data["video_grid_thw"].tolist() == [[count, *STEP]]
        assert item.model_specific_data["other"] == 7
        assert one.content[2] == "event"
    assert whole.content[1][0].model_specific_data["video_grid_thw"].tolist() == [[5, *STEP]]


def test_a_picture_is_never_cut():
    picture = video(1, "IMAGE")
    assert in_passes(picture, 1) == [picture]


def test_towers_that_are_not_known_take_videos_in_one_pass():
    assert not within_steps(SimpleNamespace(visual=torch.nn.Linear(1, 1)))
    assert not within_steps(SimpleNamespace())


class Apart(Engine):
    """The engine without a model: each row is the first patch of it.

    Attributes:
        stuck: a pass waits until this is set.
        bad: the pass that fails.
        seconds: that a pass takes.
        runs: first patches of the passes that were begun.
    """

    def __init__(self, *, queues: bool) -> None:
        self._most = 16
        self._copies = CopyOut(Host()) if queues else None
        self._breakage = Breakage(self._probe)
        self._tower, self._lander = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.stuck = threading.Event()
        self.stuck.set()
        self.bad = -1
        self.seconds = 0.0
        self.runs: list[int] = []

    def _run(self, batch: Sequence[Prepared]) -> torch.Tensor:
        feature = batch[0].content[1][0].feature
        self.runs.append(int(feature[0]))
        self.stuck.wait()
        time.sleep(self.seconds)
        if self.runs[-1] == self.bad:
            raise ValueError("a bad pass")
        return feature[::4].expand(-1, WIDTH)

    async def _probe(self) -> None:
        pass


@pytest.fixture(params=[False, True], ids=["host", "queues"])
def tower(request) -> Iterator[Apart]:
    tower = Apart(queues=request.param)
    yield tower
    tower.stuck.set()
    for pool in (tower._tower, tower._lander):
        pool.shutdown()


async def test_rows_are_told_of_as_passes_end(tower):
    told = []

    def tell(made: torch.Tensor, rows: int) -> None:
        assert made[:rows, 0].tolist() == [4.0 * row for row in range(rows)]
        told.append((made, rows))

    (made,) = await tower.forward([video(5)], tell)
    assert [rows for _, rows in told] == [4, 8]
    assert all(one is made for one, _ in told)
    assert made.tolist() == [[4.0 * row] * WIDTH for row in range(10)]
    (again,) = await tower.forward([video(5)])
    assert torch.equal(again, made)


async def test_a_pass_that_fails_fails_the_video(tower):
    tower.bad = 16
    with pytest.raises(ValueError, match="a bad pass"):
        await tower.forward([video(9)])
    assert tower.alive
    tower.bad = -1
    (made,) = await tower.forward([video(3)])
    assert len(made) == 6


async def test_a_pass_that_is_stuck_is_not_waited_for(tower, monkeypatch):
    monkeypatch.setattr(module, "STUCK_S", 0.05)
    tower.stuck.clear()
    with pytest.raises(TowerBrokenError):
        await tower.forward([video(9)])
    assert not tower.alive


async def test_passes_may_take_longer_together_than_one_may(tower, monkeypatch):
    monkeypatch.setattr(module, "STUCK_S", 2.0)
    tower.seconds = 0.3
    (made,) = await tower.forward([video(17)])
    assert len(tower.runs) == 9
    assert len(made) == 34


async def test_no_pass_is_run_that_nobody_waits_for(tower):
    def tell(_made: torch.Tensor, _rows: int) -> None:
        raise RequestCancelledError("nobody waits for it any more")

    with pytest.raises(RequestCancelledError):
        await tower.forward([video(9)], tell)
    (made,) = await tower.forward([video(1)])
    assert len(made) == 2
    assert len(tower.runs) <= 3, "at most two of five, beside the last one's"
    assert tower.alive


@pytest.mark.parametrize("ranks", [1, 2])
async def test_all_ranks_queue_the_passes_of_two_batches_alike(ranks):
    """Their collectives would meet otherwise; a tower of one rank lets the other batch in."""
    tower = Apart(queues=True)
    tower._alone = ranks == 1
    tower.stuck.clear()
    long = asyncio.create_task(tower.forward([video(5)]))
    await until(lambda: tower.runs)
    other = video(1)
    other.content[1][0].feature += 100.0
    short = asyncio.create_task(tower.forward([other]))
    await asyncio.sleep(0.01)
    tower.stuck.set()
    await asyncio.gather(long, short)
    assert (tower.runs.index(100) == len(tower.runs) - 1) == (ranks > 1)
    for pool in (tower._tower, tower._lander):
        pool.shutdown()
