from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sglang_epd.machine import LEAST_MB, MOST_MB, share_mb, usable_bytes

GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path):
    """A system whose control groups are as a test says; its root."""

    def make(groups: str, **limits: str) -> Path:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
        for place, limit in limits.items():
            path = tmp_path / "sys/fs/cgroup" / place.replace("__", "/").replace("_in", ".limit_in")
            path = path.with_name(path.name.replace("_max", ".max"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(limit)
        return tmp_path

    return make


def test_without_control_groups_the_machine_is_what_there_is(tmp_path):
    assert usable_bytes(tmp_path) == psutil.virtual_memory().total
    assert 0 < usable_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        # A container that sees its own group only.
        ("0::/\n", {"memory_max": f"{GIB}\n"}),
        # A unit of the host, whose slice is narrower than itself.
        (
            "0::/a.slice/b.service\n",
            {"a.slice__b.service__memory_max": "max\n"} | {"a.slice__memory_max": f"{GIB}\n"},
        ),
        ("0::/a/b\n", {"a__b__memory_max": f"{GIB}\n", "a__memory_max": f"{2 * GIB}\n"}),
        # Version 1; its path is the host's, which the container does not have.
        ("4:cpu,memory:/docker/0a\n0::/\n", {"memory__memory_in_bytes": f"{GIB}\n"}),
        (
            "4:memory:/a\n",
            {"memory__a__memory_in_bytes": f"{GIB}\n"}
            | {"memory__memory_in_bytes": "9223372036854771712\n"},
        ),
    ],
    ids=["container", "slice", "nested", "version 1 container", "version 1"],
)
def test_the_narrowest_control_group_counts(system, groups, limits):
    assert usable_bytes(system(groups, **limits)) == GIB


def test_the_share_is_a_sixteenth_within_its_bounds():
    assert [share_mb(gib * GIB) for gib in (1, 24, 32, 64, 128, 256, 2048)] == [
        *(LEAST_MB, LEAST_MB, 2048, 4096, 8192),
        *(MOST_MB, MOST_MB),
    ]
    assert share_mb() == share_mb(usable_bytes())
