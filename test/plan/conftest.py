"""Small machines and workloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plan.machines import KIND, PROFILE
from sglang_epd.profile import Profile
from sglang_epd.schema import convert
from sglang_epd_plan.workload import Workload


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


@pytest.fixture
def profile() -> Callable[..., Profile]:
    return lambda **changes: convert(_merged(PROFILE, changes), Profile, "profile")


@pytest.fixture
def workload() -> Callable[..., Workload]:
    def make(arrival: str | dict[str, Any] = "poisson", **kind: Any) -> Workload:
        arrival = {"kind": arrival} if isinstance(arrival, str) else arrival
        kinds = [_merged(KIND, kind)]
        return convert({"name": "test", "kinds": kinds, "arrival": arrival}, Workload, "workload")

    return make
