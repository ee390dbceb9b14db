"""The profiler's routes, and what they ask of the towers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from sglang_epd.encoder.profiling import routes
from sglang_epd.encoder.tower import ProfileRequest, TowerLostError
from sglang_epd.errors import ProtocolError


class ProfiledTower:
    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[ProfileRequest | None] = []
        self.error = error

    async def profile(self, asked: ProfileRequest | None) -> None:
        self.asked.append(asked)
        if self.error is not None:
            raise self.error


async def ask(
    towers: Sequence[ProfiledTower], path: str, method: str = "POST", **body: Any
) -> tuple[int, str]:
    app = FastAPI()
    app.include_router(routes(towers))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://encoder") as client:
        answer = await client.request(method, path, **body)
    return answer.status_code, answer.text


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_profile_is_begun_and_ended_as_sglangs_is(monkeypatch, method):
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", "/traces")
    tower = ProfiledTower()
    started = await ask([tower], "/start_profile", method)
    assert started == (200, "Start profiling. output_dir=/traces\n")
    assert await ask([tower], "/stop_profile", method) == (200, "Stop profiling.\n")
    begun = ProfileRequest(output_dir="/traces", profile_prefix="encoder")
    assert tower.asked == [begun, None]


async def test_each_tower_has_traces_of_its_own():
    towers = [ProfiledTower(), ProfiledTower()]
    body = {
        "output_dir": "/elsewhere",
        "profile_prefix": "mine",
        "num_steps": 3,
        "activities": ["CPU"],
        "with_stack": False,
        # Of schedulers.
        "profile_by_stage": True,
    }
    assert (await ask(towers, "/start_profile", json=body))[0] == 200
    asked = [tower.asked[0] for tower in towers]
    assert [one.profile_prefix for one in asked] == ["mine-dp0", "mine-dp1"]
    assert {(one.output_dir, one.num_steps, one.with_stack) for one in asked} == {
        ("/elsewhere", 3, False)
    }


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ProtocolError("profiling already running"), 400), (TowerLostError("tower 1 is lost"), 503)],
    ids=["refused", "lost"],
)
async def test_a_tower_that_cannot_is_named(error, expected):
    towers = [ProfiledTower(), ProfiledTower(error)]
    assert await ask(towers, "/start_profile") == (expected, f"tower 1: {error}\n")


@pytest.mark.parametrize("body", ["{", "7", '{"num_steps": "many"}', " " * (1 << 17)])
async def test_what_asks_for_nothing_sensible_is_refused(body):
    tower = ProfiledTower()
    assert (await ask([tower], "/start_profile", content=body))[0] == 400
    assert not tower.asked
