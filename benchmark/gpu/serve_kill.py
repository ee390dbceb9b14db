"""An encoder that is killed while requests wait for it, and comes back."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence

from open_loop import Answer, ask, session

from gpu.serve_fleet import Fleet
from gpu.serve_pictures import data_url
from gpu.serve_ttft import Cell, chat
from sglang_epd.cli.processes import ServerProcess

_REQUESTS = 4
# Encoding has begun by then, and not ended.
_AFTER_S = 0.15
# SGLANG_EPD_REQUEST_TIMEOUT_S of the arm, and what an answer takes.
_DEADLINE_S = 60.0 + 15.0


def kill(
    fleet: Fleet, cell: Cell, start_s: float, env: Mapping[str, str]
) -> tuple[list[list[str]], list[str]]:
    """Kill the encoder in the middle of requests, and start another in its place at once.

    Args:
        start_s: that the other has to start.
        env: added to its environment.

    Returns:
        A table of what became of the requests, and what is wrong.
    """
    running = fleet.running["sglang-epd"]
    killed = running.servers[0]
    encoder = ServerProcess(
        killed.name,
        killed.command,
        log_path=killed.log_path.with_suffix(".second.log"),
        ready_url=killed.ready_url,
        env={**os.environ, **running.arm.env, **env},
    )
    bodies = [
        chat([data_url(one) for one in cell.pictures(("kill", number))])
        for number in range(2 * _REQUESTS)
    ]

    began = time.monotonic()

    async def restarted_meanwhile() -> list[Answer]:
        asking = asyncio.create_task(_all(running.url, bodies[:_REQUESTS]))
        await asyncio.sleep(_AFTER_S)
        killed.kill()
        running.servers[0] = encoder
        encoder.start()
        return await asking

    during = asyncio.run(restarted_meanwhile())
    encoder.wait_ready(start_s)
    back_s = time.monotonic() - began
    after = asyncio.run(_all(running.url, bodies[_REQUESTS:]))

    wrong = [
        f"a request took {one.seconds:.1f} s: {one.failure}"
        for one in during
        if one.seconds > _DEADLINE_S or one.failure.startswith("no answer")
    ]
    wrong += [f"after the encoder was back: {one.failure}" for one in after if one.failure]
    for server in running.servers:
        server.check_running()
    rows = [["requests", "answered", "slowest (s)", "failures"], *map(_row, (during, after))]
    rows[1][0], rows[2][0] = "in flight", f"after {back_s:.0f} s, with a new encoder"
    return rows, wrong


async def _all(url: str, bodies: Sequence[bytes]) -> list[Answer]:
    begin = time.monotonic()
    async with session() as http:
        asking = (ask(http, url, body, begin, begin, timeout_s=_DEADLINE_S) for body in bodies)
        return list(await asyncio.gather(*asking))


def _row(answers: Sequence[Answer]) -> list[str]:
    failures = sorted({one.failure for one in answers if one.failure})
    answered = f"{sum(not one.failure for one in answers)} of {len(answers)}"
    return ["", answered, f"{max(one.seconds for one in answers):.1f}", "; ".join(failures)]
