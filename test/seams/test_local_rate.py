from __future__ import annotations

import pytest
import torch
from torch import nn

from sglang_epd.seams import local_rate
from sglang_epd.seams.local_rate import TowerWatch


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Tower(nn.Module):
    """Takes a millisecond a patch."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, pixels, grid=None):
        self.clock.now += len(pixels) * 1e-3
        return pixels


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run" / "tower"


@pytest.fixture
def tower(clock, file):
    tower = Tower(clock)
    TowerWatch(file, clock).watch([tower])
    return tower


def test_the_rate_is_there_for_another_process(tower, file, clock):
    assert local_rate.read(file, clock) == 0.0
    tower(torch.zeros(50, 4))
    assert local_rate.read(file, clock) == 0.0, "the first also warms up"
    tower(torch.zeros(100, 4), grid=[[1, 10, 10]])
    tower(pixels=torch.zeros(300, 4))
    assert local_rate.read(file, clock) == pytest.approx(1000.0)
    assert file.parent.stat().st_mode & 0o077 == 0


def test_old_figures_are_forgotten(tower, file, clock):
    for _ in range(2):
        tower(torch.zeros(10, 4))
    clock.now += 59
    assert local_rate.read(file, clock) > 0
    clock.now += 2
    assert local_rate.read(file, clock) == 0.0
    clock.now -= 100  # of a machine that was started again meanwhile
    assert local_rate.read(file, clock) == 0.0


def test_new_figures_count_more(tower, file, clock):
    for _ in range(20):
        tower(torch.zeros(10, 4))
    slow = tower.forward
    tower.forward = lambda pixels: setattr(clock, "now", clock.now + 9e-3 * len(pixels)) or pixels
    for _ in range(60):
        tower(torch.zeros(10, 4))
    assert local_rate.read(file, clock) == pytest.approx(1000 / 9, rel=0.02)
    tower.forward = slow


@pytest.mark.parametrize("call", [torch.zeros(2, 3, 4), torch.zeros(5), torch.zeros(0, 4)])
def test_what_is_not_rows_of_patches_teaches_nothing(tower, file, clock, call):
    for _ in range(3):
        tower(call)
    assert local_rate.read(file, clock) == 0.0


def test_a_tower_that_fails_is_not_measured(tower, file, clock):
    def fail(_pixels):
        raise RuntimeError("no")

    works = tower.forward
    tower(torch.zeros(10, 4))
    tower.forward = fail
    with pytest.raises(RuntimeError):
        tower(torch.zeros(10, 4))
    clock.now += 50
    tower.forward = works
    tower(torch.zeros(10, 4))
    assert local_rate.read(file, clock) == pytest.approx(1000.0)


@pytest.mark.parametrize("content", [b"", b"short", bytes(17)])
def test_a_file_that_is_none_of_ours_says_nothing(tmp_path, clock, content):
    path = tmp_path / "tower"
    path.write_bytes(content)
    assert local_rate.read(path, clock) == 0.0
