from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from copies import documented
from sglang_epd.cache import EmbeddingCache
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.tower import ProfileRequest, TowerLostError
from sglang_epd.encoder.workers import crew
from sglang_epd.encoder.workers.crew import Rank, Times, TowerStartError, WorkerTower
from sglang_epd.errors import EncodeError, MediaError, ProtocolError
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.wire.messages import TensorSpec
from waiting import until

HERE = Path(__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
# Generous where the machine may be slow, small where a test waits for the bound itself.
TIMES = Times(start_s=240, ping_s=0.1, silence_s=120, ranks_s=0.2, stop_s=5, restart_s=0.05)
WAIT_S = 240

Make = Callable[..., Awaitable[WorkerTower]]

# A worker takes seconds to make its first embedding, with which it imports torch: tests that
# do not harm theirs share it, and so a loop; others ask for an embedding once, or for none.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.servers]


def build(starts: list[Rank], times: Times = TIMES) -> WorkerTower:
    return WorkerTower("vision worker 0", "worker_engine:create", lambda: starts, times=times)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[1, 2])
async def either(request) -> AsyncIterator[WorkerTower]:
    """A tower of one rank, and one of two."""
    tower = build([Rank({"rank": rank}, ENV) for rank in range(request.param)])
    await tower.start()
    await embed(tower, b"rows=1")
    yield tower
    await tower.close()


@pytest_asyncio.fixture(loop_scope="module")
async def tower(either: WorkerTower) -> AsyncIterator[WorkerTower]:
    yield either
    assert either.alive
    assert either.restarts == 0


@pytest_asyncio.fixture(loop_scope="module")
async def make() -> AsyncIterator[Make]:
    towers: list[WorkerTower] = []
    before = psutil.Process().children()

    async def start(
        ranks: int = 1, times: Times = TIMES, env: dict[str, str] = ENV, **options: Any
    ) -> WorkerTower:
        starts = [Rank({**options, "rank": rank}, env) for rank in range(ranks)]
        tower = build(starts, times)
        towers.append(tower)
        await tower.start()
        return tower

    yield start
    for tower in towers:
        await tower.close()
    assert psutil.Process().children() == before


async def embed(tower: WorkerTower, data: bytes, modality: str = "IMAGE") -> torch.Tensor:
    (embedding,) = await tower.forward([await tower.prepare(modality, data)])
    return embedding


async def under_way(tower: WorkerTower) -> None:
    """Return when the workers are at what they were asked: they hear it in order."""
    for _ in range(2):  # the first may overtake what a task is about to ask
        tower.discard(await tower.prepare("IMAGE", b"rows=1"))


def gone(pid: int) -> bool:
    """Whether no process of that number runs; one that nobody has reaped runs no more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


async def test_an_item_is_prepared_and_run(tower):
    assert (tower.alive, tower.dtype, tower.preparers) == (True, "float32", 4)
    assert tower.modalities == ("IMAGE", "VIDEO")
    prepared = await tower.prepare("VIDEO", b"rows=3")
    assert prepared.layout.modality == "VIDEO"
    assert prepared.layout.grid == [[1, 2, 3]]
    assert prepared.layout.embedding == TensorSpec("float32", (3, 64))
    assert prepared.patches == 12
    assert prepared.group == (await tower.prepare("VIDEO", b"rows=1")).group
    assert prepared.group != (await tower.prepare("IMAGE", b"rows=1")).group
    (embedding,) = await tower.forward([prepared])
    assert torch.equal(embedding, torch.full((3, 64), 6.0))


async def test_an_items_options_are_the_engines(tower):
    prepared = await tower.prepare("IMAGE", b"rows=3", options={"rows": "5"})
    assert prepared.layout.tokens == 5


async def test_a_worker_that_serves_keeps_what_it_has_out_of_collections(tower):
    prepared = await tower.prepare("IMAGE", b"rows=3,kept")
    assert prepared.layout.grid == [[1, 2, 4]]


async def test_a_worker_gives_memory_back_when_it_has_made_something(make, tmp_path):
    tower = await make(tidied=str(tmp_path / "tidied"))
    await embed(tower, b"rows=1")
    await until((tmp_path / "tidied").exists)


async def test_many_at_once_come_back_to_those_who_asked(tower):
    async def ask(n: int) -> None:
        data = b"rows=%d" % (n % 7 + 1)
        embedding = await embed(tower, data.ljust(64 + n))
        assert torch.equal(embedding, torch.full((n % 7 + 1, 64), 64.0 + n))

    await asyncio.gather(*map(ask, range(200)))


async def test_a_batch_comes_back_in_its_order_and_apart(tower):
    batch = [await tower.prepare("IMAGE", b"rows=2".ljust(64 + n)) for n in range(300)]
    embeddings = await tower.forward(batch)
    assert [int(made[0, 0]) for made in embeddings] == [64 + n for n in range(300)]
    embeddings[0].zero_()
    assert int(embeddings[1][0, 0]) == 65
    assert len({made.untyped_storage().data_ptr() for made in embeddings}) == 300


async def test_what_does_not_fit_into_a_packet_crosses(tower):
    prepared = await tower.prepare("VIDEO", b"extra=100000".ljust(64 << 20))
    assert prepared.layout.extra["times"] == list(range(100000))
    (embedding,) = await tower.forward([prepared])
    assert int(embedding[0, 0]) == 64 << 20


async def test_a_large_embedding_crosses(tower):
    embedding = await embed(tower, b"rows=262144")
    assert embedding.nbytes == 64 << 20
    assert bool((embedding == 11.0).all())


async def test_an_embedding_is_copied_once_on_its_way_to_the_front(tower):
    """By the kernel, into a file in memory that the front maps."""
    worker = psutil.Process(tower.pids[0])
    before = worker.io_counters().write_chars
    embedding = await embed(tower, b"rows=16384")
    written = worker.io_counters().write_chars - before
    in_memory = Path("/proc/self/maps").read_text().splitlines()
    (place,) = (line for line in in_memory if maps(line, embedding.data_ptr()))
    copies = int("memfd:sglang-epd" not in place), written / embedding.nbytes
    assert copies == pytest.approx(documented()["from a worker's tower"], abs=0.02)


def maps(line: str, address: int) -> bool:
    begin, end = (int(one, 16) for one in line.split(maxsplit=1)[0].split("-"))
    return begin <= address < end


async def test_errors_are_the_ones_that_were_raised(tower):
    with pytest.raises(MediaError, match=r"^cannot be decoded: it is bad$") as bad:
        await tower.prepare("IMAGE", b"bad")
    assert type(bad.value) is MediaError
    with pytest.raises(EncodeError, match=r"^the encoder failed on this item \(RuntimeError\)$"):
        await tower.prepare("IMAGE", b"broken")
    refused = await tower.prepare("IMAGE", b"refused")
    with pytest.raises(EncodeError, match=r"^the layouts say another shape$"):
        await tower.forward([refused])
    assert tower.alive
    await embed(tower, b"rows=1")


async def test_every_rank_is_profiled(tower, tmp_path):
    with pytest.raises(ProtocolError, match="profiling not running"):
        await tower.profile(None)
    await tower.profile(ProfileRequest(output_dir=str(tmp_path), profile_prefix="trace"))
    await tower.profile(None)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == [f"trace{rank}" for rank in range(len(tower.pids))]


async def test_an_item_of_a_failed_batch_may_be_run_again(tower):
    if len(tower.pids) == 2:
        return  # started again, see below
    good, failing = [await tower.prepare("IMAGE", data) for data in (b"rows=1", b"fails")]
    with pytest.raises(EncodeError, match=r"\(RuntimeError\)"):
        await tower.forward([good, failing])
    tower.discard(failing)
    await tower.forward([good])


async def test_what_an_error_says_stays_in_the_worker(make, capfd):
    tower = await make()
    failing = await tower.prepare("IMAGE", b"fails")
    with pytest.raises(EncodeError, match=r"^the encoder failed on this item \(RuntimeError\)$"):
        await tower.forward([failing])
    assert "RuntimeError: a secret of the engine" in capfd.readouterr().err


async def test_the_next_batch_is_launched_while_one_lands(tower, tmp_path):
    """By the front's own scheduling: the rows of the first batch land once the second, which is
    asked for later, has begun."""
    assert tower.depth == 2
    begun = tmp_path / "begun"
    bounds, cache = BatchBounds(patches=100, items=1), EmbeddingCache(0)
    computations = Computations([tower], cache, EncoderMetrics(), batch=bounds)
    deadline = time.monotonic() + WAIT_S
    media = [b"lands=%s" % bytes(begun), b"begins=%s" % bytes(begun)]
    async with asyncio.timeout(WAIT_S):
        first = computations.hold(b"1" * 32, "IMAGE", media[0], "r", deadline)
        await until(lambda: computations.status()["queue"]["running"])
        second = computations.hold(b"2" * 32, "IMAGE", media[1], "r", deadline)
        for hold, each in zip((first, second), media, strict=True):
            assert int((await hold.embedding())[0, 0]) == len(each)
            hold.release()
    await computations.close()


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_batch_behind_one_that_a_rank_failed_in_is_lost_with_it(make, failing):
    """The other rank is in the first one, and comes to no other."""
    tower = await make(2)
    first = await tower.prepare("IMAGE", b"fails@%d" % failing)
    second = await tower.prepare("IMAGE", b"rows=1")
    calls = (tower.forward([first]), tower.forward([second]))
    async with asyncio.timeout(WAIT_S):
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [TowerLostError] * 2, errors
    await until(lambda: tower.alive)


async def test_ranks_that_may_be_out_of_step_are_started_again(make):
    tower = await make(2)
    for data in (b"fails", b"fails@0", b"fails@1"):
        before = tower.pids
        prepared = await tower.prepare("IMAGE", data)
        with pytest.raises((EncodeError, TowerLostError)):
            async with asyncio.timeout(WAIT_S):
                await tower.forward([prepared])
        assert not tower.alive
        await until(lambda: tower.alive)
        assert all(map(gone, before))
        await tower.prepare("IMAGE", b"rows=1")
    assert tower.restarts == 3


async def test_an_item_that_cannot_be_told_of_fails_alone(tower):
    with pytest.raises(EncodeError):
        await tower.prepare("IMAGE", b"strange")
    await embed(tower, b"rows=1")


async def test_ranks_that_prepare_differently_are_an_error(tower):
    if len(tower.pids) == 1:
        return
    with pytest.raises(EncodeError, match="differently"):
        await tower.prepare("IMAGE", b"odd@1")
    assert tower.alive


async def test_a_killed_worker_fails_its_calls_and_comes_back(make):
    tower = await make(2)
    for stage, rank in itertools.product(("prepare", "forward"), (0, 1)):
        fds = psutil.Process().num_fds()
        kept = await tower.prepare("IMAGE", b"rows=1")
        if stage == "prepare":
            call = asyncio.create_task(tower.prepare("IMAGE", b"stuck"))
        else:
            call = asyncio.create_task(tower.forward([await tower.prepare("IMAGE", b"hangs")]))
        await under_way(tower)
        before = tower.pids
        os.kill(before[rank], signal.SIGKILL)
        with pytest.raises(TowerLostError, match=f"rank {rank}"):
            async with asyncio.timeout(WAIT_S):
                await call
        assert not tower.alive
        with pytest.raises(TowerLostError):
            await tower.prepare("IMAGE", b"rows=1")
        await until(lambda: tower.alive)
        assert not set(tower.pids) & set(before)
        assert not any(map(psutil.pid_exists, before)), "reaped"
        with pytest.raises(TowerLostError, match="started again"):
            await tower.forward([kept])
        tower.discard(kept)
        await until(lambda fds=fds: psutil.Process().num_fds() <= fds)
    assert tower.restarts == 4
    await embed(tower, b"rows=1")


async def test_a_stopped_worker_is_lost_after_its_silence(make):
    tower = await make(times=replace(TIMES, silence_s=5))
    prepared = await tower.prepare("IMAGE", b"rows=1")
    pid = tower.pids[0]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    async with asyncio.timeout(WAIT_S):
        calls = (tower.prepare("IMAGE", b"rows=1"), tower.forward([prepared]))
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [TowerLostError] * 2
    assert all("has not answered for 5 s" in str(error) for error in errors)
    assert 3.5 < time.monotonic() - began < WAIT_S
    await until(lambda: tower.alive)
    assert not psutil.pid_exists(pid)


async def test_a_worker_whose_tower_is_broken_is_started_again(make):
    """Its engine finds that out, and which batch is stuck."""
    tower = await make(times=TIMES)
    before = tower.pids
    prepared = await tower.prepare("IMAGE", b"breaks")
    with pytest.raises(TowerLostError, match="it fails at everything"):
        async with asyncio.timeout(WAIT_S):
            await tower.forward([prepared])
    await until(lambda: tower.alive)
    assert all(map(gone, before))


async def test_large_media_that_nobody_waits_for_leave_no_file(tower):
    front = psutil.Process()
    before = front.num_fds()
    for _ in range(8):
        preparing = asyncio.create_task(tower.prepare("IMAGE", bytes(32 << 20)))
        await asyncio.sleep(0.001)  # they are being written
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
    await until(lambda: front.num_fds() <= before)


async def test_a_cancelled_prepare_ends_in_the_worker_too(tower):
    for _ in range(50):
        stuck = asyncio.create_task(tower.prepare("IMAGE", b"stuck"))
        await asyncio.sleep(0)
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
    await embed(tower, b"rows=1")
    worker = psutil.Process(tower.pids[0])
    await until(lambda: worker.num_fds() < 30)


async def test_a_start_that_keeps_failing_is_tried_again_later(make, tmp_path, caplog):
    tower = await make(later=str(tmp_path / "later"))
    os.kill(tower.pids[0], signal.SIGKILL)
    await until(lambda: not tower.alive)
    await until(lambda: tower.alive)
    assert "cannot be started again: vision worker 0" in caplog.text
    assert "not the second time" in caplog.text
    await tower.prepare("IMAGE", b"rows=1")


async def test_a_start_that_hangs_is_given_up_sooner_than_the_first(
    make, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(crew, "_LEAST_START_S", 1.0)
    tower = await make(then_sleeps=str(tmp_path / "starts"))
    assert 1 <= tower._start_s < TIMES.start_s
    tower._start_s = 15.0
    os.kill(tower.pids[0], signal.SIGKILL)
    await until(lambda: not tower.alive)
    await until(lambda: tower.alive, WAIT_S)
    assert "not ready after 15 s" in caplog.text
    assert tower._start_s not in (15.0, 30.0), "as long as it takes now"


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ({"error": "no such file"}, r"vision worker 0.*ValueError: no such file"),
        ({"error": "no such file", "ranks": 2}, r"vision worker 0.*ValueError: no such file"),
        ({"dies": True}, r"the other end is gone.*-11"),
        ({"sleeps": "/dev/null", "times": replace(TIMES, start_s=1)}, "not ready after 1 s"),
        ({"env": {**ENV, "PYTHONPATH": ""}}, "No module named 'worker_engine'"),
    ],
    ids=["fails", "fails of two", "dies", "sleeps", "is not there"],
)
async def test_a_start_that_fails_says_why(make, capfd, start, reason):
    with pytest.raises(TowerStartError, match=reason):
        await make(**start)
    said = not {"dies", "sleeps"} & start.keys()
    assert ("Traceback" in capfd.readouterr().err) == said


async def test_a_tower_that_closes_fails_its_calls(make):
    tower = await make()
    running = asyncio.create_task(tower.forward([await tower.prepare("IMAGE", b"slow=20")]))
    await under_way(tower)
    pids = tower.pids
    began = time.monotonic()
    await tower.close()
    assert time.monotonic() - began < TIMES.stop_s, "it did not have to be killed"
    with pytest.raises(TowerLostError, match="closed"):
        await running
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(TowerLostError):
        await tower.prepare("IMAGE", b"rows=1")
    await tower.close()


async def test_signals_to_the_group_leave_a_worker_at_work(tower):
    running = asyncio.create_task(tower.forward([await tower.prepare("IMAGE", b"slow=0.3")]))
    await under_way(tower)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(tower.pids[0], number)
    await running


async def test_workers_end_with_a_front_that_is_killed(tmp_path):
    """Idle, at a batch, stopped, and still loading: of each a tower of two ranks."""
    script = textwrap.dedent(f"""
        import asyncio
        from sglang_epd.encoder.workers.crew import Rank, WorkerTower

        def tower(name, *options):
            ranks = [Rank(each) for each in options]
            return WorkerTower(name, "worker_engine:create", lambda: ranks)

        async def main():
            towers = [tower(name, {{}}, {{}}) for name in ("idle", "busy", "stopped")]
            idle, busy, stopped = towers
            await asyncio.gather(*(tower.start() for tower in towers))
            prepared = await busy.prepare("IMAGE", b"hangs")
            running = asyncio.create_task(busy.forward([prepared]))
            for _ in range(2):  # heard after the batch
                await busy.prepare("IMAGE", b"rows=1")
            files = {[str(tmp_path / "0"), str(tmp_path / "1")]}
            loading = tower("loading", *({{"sleeps": file}} for file in files))
            starting = asyncio.create_task(loading.start())
            print(*stopped.pids, flush=True)
            await asyncio.sleep(3600)

        asyncio.run(main())
    """)
    with subprocess.Popen(  # noqa: ASYNC220 (takes a millisecond)
        [sys.executable, "-c", script], env=ENV, stdout=subprocess.PIPE, text=True
    ) as front:
        assert front.stdout is not None
        first, _ = map(int, (await asyncio.to_thread(front.stdout.readline)).split())
        await until(lambda: len(os.listdir(tmp_path)) == 2)
        workers = [child.pid for child in psutil.Process(front.pid).children()]
        assert len(workers) == 8
        os.kill(first, signal.SIGSTOP)
        front.kill()
    await until(lambda: all(map(gone, workers)), 10)


async def test_torch_comes_with_the_engine():
    """It takes seconds to import."""
    code = "import sys, sglang_epd.encoder.workers.worker as _; sys.exit('torch' in sys.modules)"
    worker = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], env=ENV)
    assert worker.returncode == 0


async def test_a_front_whose_towers_fail_to_start_ends_with_a_status():
    script = textwrap.dedent("""
        import asyncio
        from sglang_epd.encoder.workers.crew import Rank, WorkerTower

        async def main():
            ranks = [Rank({"rank": 0}), Rank({"error": "no such checkpoint"})]
            await WorkerTower("worker 1", "worker_engine:create", lambda: ranks).start()

        asyncio.run(main())
    """)
    front = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], env=ENV, capture_output=True, timeout=60
    )
    assert front.returncode == 1
    assert b"TowerStartError: worker 1: " in front.stderr
    assert b"rank 1: ValueError: no such checkpoint" in front.stderr


async def test_a_thousand_calls_leave_nothing_behind(tower):
    processes = [psutil.Process(), *map(psutil.Process, tower.pids)]

    async def hundred() -> None:
        for n in range(100):
            prepared = await tower.prepare("IMAGE", b"rows=%d" % (2000 if n % 10 else 20000))
            if n % 3 == 1:
                await tower.forward([prepared])
            else:
                tower.discard(prepared)
            with pytest.raises(MediaError):
                await tower.prepare("IMAGE", b"bad".ljust(1 << 20))

    for _ in range(3):
        await hundred()
    gc.collect()
    before = [(process.num_fds(), process.memory_info().rss) for process in processes]
    for _ in range(10):
        await hundred()
    gc.collect()
    await asyncio.sleep(0.2)
    after = [(process.num_fds(), process.memory_info().rss) for process in processes]
    for (fds, rss), (fds_after, rss_after) in zip(before, after, strict=True):
        assert abs(fds_after - fds) <= 1
        # A tenth of the media that were sent. A heap that other tests have used grows by some 30
        # MiB by itself.
        assert rss_after - rss < 100 << 20
    crew = tower._crew
    assert crew is not None
    assert not crew._calls
