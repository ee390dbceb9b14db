"""Bytes of media on their way: how many, and whose turn it is."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.cache import UrlMemory
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.urls import UrlReader
from sglang_epd.media import Arrival, FetchingProcess, Intake, MediaFetcher, MediaLimits
from waiting import until

MIB = 1 << 20
BOUND = 8
FETCHED = 6  # of these, for what is fetched
PATIENCE_S = 120.0


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def admission() -> Admission:
    return Admission(1, BOUND)


@pytest.fixture
def intake(admission: Admission) -> Intake:
    return Intake(admission)


async def test_the_oldest_of_the_request_with_the_least_goes_first(intake, admission):
    with intake.arrival((9, 0)) as first, intake.arrival((0, 0)) as second:
        await first.grow(FETCHED)
        await second.grow(4)  # the one that may pass the bound
        assert admission.nbytes == FETCHED + 4
        order: list[tuple[int, int]] = []

        async def wait(age: tuple[int, int]) -> None:
            with intake.arrival(age) as arrival:
                await arrival.grow(2)
                order.append(age)
                await turns()

        waiting = [asyncio.create_task(wait(age)) for age in ((5, 1), (7, 0), (5, 0))]
        await turns()
        assert order == []
    await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
    assert order == [(5, 0), (7, 0), (5, 1)]
    assert admission.nbytes == 0


async def test_one_that_leaves_lets_the_next_go_on(intake, admission):
    with intake.arrival((0, 0)) as full, intake.arrival((1, 0)) as over:
        await full.grow(5)
        await over.grow(2)
        with intake.arrival((2, 0)) as large, intake.arrival((2, 1)) as small:
            waits = [asyncio.create_task(large.grow(4)), asyncio.create_task(small.grow(1))]
            await turns()
            over.settle(0)
            await turns()
            assert not waits[1].done(), "it passed an older one of its request"
            waits[0].cancel()
            await asyncio.wait_for(waits[1], PATIENCE_S)
            assert admission.nbytes == FETCHED


async def test_a_request_has_as_many_bytes_as_are_free(intake, admission):
    admission.max_bytes = 160  # 120 of what is fetched
    greedy = [Arrival(intake, (owner, number)) for owner in range(3) for number in range(9)]
    growing = [asyncio.create_task(one.grow(n)) for n in range(1, 21) for one in greedy]
    await turns()
    assert 90 <= admission.nbytes <= 110, "a quarter each, and one item past the shares"
    with intake.arrival((9, 0)) as newcomer:
        before = admission.nbytes
        await asyncio.wait_for(newcomer.grow(10), PATIENCE_S)
        assert admission.nbytes == before + 10
    for one in growing:
        one.cancel()
    await asyncio.gather(*growing, return_exceptions=True)


async def test_a_heir_keeps_the_place_past_the_bound(intake, admission):
    with intake.arrival((0, 0)) as full, intake.arrival((1, 0)) as asker:
        await full.grow(FETCHED)
        shared = asker.beside()
        await shared.grow(6)
        asker.share(shared)
        shared.close()
        assert admission.nbytes == FETCHED + 6
        waits = asyncio.create_task(Arrival(intake, (2, 0)).grow(1))
        await turns()
        assert not waits.done()
        waits.cancel()
    assert admission.nbytes == 0


async def test_bytes_that_several_share_are_counted_once(intake, admission):
    with intake.arrival((0, 0)) as first, intake.arrival((1, 0)) as other:
        shared = first.beside()
        await shared.grow(4)
        for asker in (first, other):
            asker.share(shared)
            asker.settle(4)
        shared.close()
        assert admission.nbytes == 4
        first.close()
        assert admission.nbytes == 4, "the other has them still"
    assert admission.nbytes == 0


@pytest.mark.parametrize(("inline", "fetched"), [(0, FETCHED), (4, 4)])
async def test_bytes_that_are_fetched_leave_a_quarter_to_others(intake, admission, inline, fetched):
    admission.take_bytes(inline)
    with intake.arrival((0, 0)) as first, intake.arrival((1, 0)) as over:
        await first.grow(fetched)
        await over.grow(1)
        waits = asyncio.create_task(Arrival(intake, (2, 0)).grow(1))
        await turns()
        assert not waits.done()
        if not inline:
            admission.take_bytes(1)
        waits.cancel()


async def test_bytes_that_came_inline_give_their_room_to_fetched_ones(service):
    service.admission.max_bytes = BOUND
    with service.intake.arrival((0, 0)) as over, service.intake.arrival((1, 0)) as fetched:
        with service.receiving() as room:
            room.take(BOUND)
            await over.grow(1)
            waits = asyncio.create_task(fetched.grow(1))
            await turns()
            assert not waits.done()
        await asyncio.wait_for(waits, 5)


ITEM = st.tuples(
    st.integers(0, 5),  # the request that it is of
    st.lists(st.integers(1, 12), min_size=1, max_size=4),  # what it grows by
    st.integers(0, 6),  # turns before each step
    st.sampled_from(["read", "read", "read", "left", "shared"]),
)


@given(st.lists(ITEM, min_size=1, max_size=30), st.integers(0, 20))
def test_no_order_of_arrivals_stops_all_or_passes_the_bound_by_two(items, inline):
    """Whatever leaves early, is shared, or came inline and stays."""

    async def run() -> None:
        admission = Admission(1, BOUND)
        admission.nbytes += inline
        intake = Intake(admission)
        most = max(BOUND, inline) + max(sum(steps) for _, steps, _, _ in items)

        async def read(number: int, item: tuple) -> None:
            request, steps, pause, end = item
            with intake.arrival((request, number)) as own:
                arrival = own.beside() if end == "shared" else own
                size = 0
                for step in steps:
                    await turns(pause)
                    size += step
                    await arrival.grow(size)
                    assert admission.nbytes <= most
                if arrival is not own:
                    own.share(arrival)
                    arrival.close()
                await turns(pause)
                own.settle(size - 1)
                assert admission.nbytes <= most

        tasks = [asyncio.create_task(read(*one)) for one in enumerate(items)]
        for task, item in zip(tasks, items, strict=True):
            if item[3] == "left":
                await turns(2)
                task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            assert task.cancelled() or task.exception() is None
        assert admission.nbytes == inline

    asyncio.run(run())


@asynccontextmanager
async def reading(service, metrics, make, **bounds: int):
    """The service, reading URLs in earnest within these bounds of its admission."""
    for name, bound in bounds.items():
        setattr(service.admission, name, bound)
    limits = MediaLimits(allowed_networks=("127.0.0.0/8",), total_timeout_s=PATIENCE_S)
    async with make(limits) as fetcher:
        service.urls = UrlReader(fetcher, UrlMemory(4), metrics)
        yield
        await service.urls.close()
    assert service.admission.nbytes == 0


@pytest.mark.parametrize(
    ("make", "length"), [(MediaFetcher, "chunked"), (FetchingProcess, "announced")]
)
async def test_one_request_of_urls_stays_inside_the_bound(
    service, fakes, metrics, site, asking, length, make
):
    """200 MiB of pictures behind URLs, with room for six, while the tower is busy."""

    async def picture(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if length == "announced":
            response.content_length = MIB
        await response.prepare(request)
        name = request.path.encode().ljust(64)
        await response.write(name)
        await response.write(bytes(MIB - len(name)))
        return response

    site.answer = picture
    admission = service.admission
    fakes.forwarded.hold()
    tracemalloc.start()
    try:
        async with reading(service, metrics, make, max_items=300, max_bytes=8 * MIB):
            urls = [f"{site.url}/{n}" for n in range(200)]
            work = asyncio.create_task(service.encode(asking(*urls, ttl_s=PATIENCE_S)))
            await until(lambda: admission.nbytes >= 3 * MIB)
            most = []
            for _ in range(20):
                await asyncio.sleep(0.02)
                most.append(admission.nbytes)
            # Half of what is fetched, and one item past it.
            assert max(most) <= 4.5 * MIB
            held, _ = tracemalloc.get_traced_memory()
            # The rest would take three times as long.
            tracemalloc.stop()
            fakes.forwarded.go_on()
            outcomes = (await asyncio.wait_for(work, PATIENCE_S)).outcomes
    finally:
        tracemalloc.stop()
    assert {(outcome.state, outcome.message) for outcome in outcomes} == {("delivered", "")}
    assert len(site.take()) == 200
    # The server's side of 32 connections is in this process, too.
    assert held < 80 * MIB


async def test_a_small_picture_passes_requests_of_large_ones(
    service, fakes, metrics, site, asking, monkeypatch
):
    """Of 80 MiB behind URLs, with room for six, while nothing that is here gets ready."""
    site.answer = lambda request: web.Response(
        body=b"small" if "small" in request.path else request.path.encode().ljust(MIB)
    )
    fakes.preprocess.hold()
    # The media that are here, in their order.
    here: list[bytes] = []
    hold = service.computations.hold

    def holding(key, modality, data, *more, **options):
        here.append(bytes(data))
        return hold(key, modality, data, *more, **options)

    monkeypatch.setattr(service.computations, "hold", holding)
    async with reading(service, metrics, FetchingProcess, max_items=300, max_bytes=8 * MIB):
        large = [asking(*(f"{site.url}/{r}/{n}" for n in range(40)), request_id=r) for r in "ab"]
        small = asking(f"{site.url}/small", request_id="small")
        work = [asyncio.create_task(service.encode(one)) for one in large]
        await until(lambda: service.admission.nbytes >= 4 * MIB)
        work.append(asyncio.create_task(service.encode(small)))
        await until(lambda: b"small" in here)
        assert len(here) < 10, "the large ones were through"
        fakes.preprocess.go_on()
        replies = await asyncio.wait_for(asyncio.gather(*work), PATIENCE_S)
    assert {one.state for reply in replies for one in reply.outcomes} == {"delivered"}


async def test_a_request_that_is_cancelled_leaves_no_bytes(service, fakes, metrics, site, asking):
    """At any moment: while headers are awaited, while bytes arrive, and while there is no room."""

    async def picture(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(16):
            await response.write(bytes(MIB // 16))
            await asyncio.sleep(0.005)
        return response

    site.answer = picture
    fakes.forwarded.hold()
    async with reading(service, metrics, FetchingProcess, max_items=200, max_bytes=2 * MIB):
        for wait_s in (0.0, 0.01, 0.03, 0.1, 0.3):
            request = asking(*(f"{site.url}/{wait_s}/{n}" for n in range(20)))
            work = asyncio.create_task(service.encode(request))
            await asyncio.sleep(wait_s)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await asyncio.sleep(0.1)
            assert service.admission.nbytes == 0
