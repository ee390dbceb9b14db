"""What encoders still answer in time where more is asked than their towers can do.

    .venv/bin/python benchmark/overload.py [--seconds 60] [--arm now]

The dispatcher, its pool and policy, and encoders' admission, stages and order are the package's
own. Towers and preprocessing take the times of a profile, and time is the event loop's: it jumps
to the next thing that happens. Requests of new pictures come at random times (Poisson) and have
one deadline each. Figures go into `results/overload.json` under the arm's name, beside those of
other arms, and the page has all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import selectors
import struct
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from pages import machine, table

from sglang_epd.cache import EmbeddingCache, UrlMemory
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.dispatch.dispatcher import Dispatcher
from sglang_epd.dispatch.policies import policy
from sglang_epd.dispatch.pool import Pool, Report
from sglang_epd.dispatch.work import Costs, describe
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.service import EncoderService
from sglang_epd.encoder.tower import Prepared
from sglang_epd.encoder.urls import UrlReader
from sglang_epd.errors import EpdError, OverloadedError, UnavailableError
from sglang_epd.media import Account, FetchedMedia, MediaSource, digest
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.profile import EncoderCosts, TowerCosts, load_profile
from sglang_epd.transfer.delivery import Granted, Offered
from sglang_epd.wire.http import EncodeItem, EncodeReply, EncodeRequest, ReplyTo
from sglang_epd.wire.messages import Grant, Inline, Layout, Offer, TensorSpec

RESULTS = Path(__file__).parent / "results"
PROFILE = "h100-qwen3-vl-8b"
LOADS = (0.5, 0.9, 1.2, 1.5, 2.0, 4.0)
NAMESPACE = "overload"
PROBE_S = 1.0
# The time of a payload, from the grant to the receiver's word.
DELIVER_S = 0.015
# Of a pass or a preparation, by chance.
NOISE = 0.2
SMALL, LARGE = (448, 448), (1920, 1080)


class _Jumping(selectors.SelectSelector):
    """Nothing is waited for: the clock goes on instead."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing will ever happen"
            self.now += max(0.0, timeout)
        return ready


@contextmanager
def jumping() -> Iterator[asyncio.Runner]:
    """An event loop whose time is that of all modules."""
    selector = _Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    real = time.monotonic
    loop.time = time.monotonic = lambda: selector.now  # type: ignore[method-assign]
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            yield runner
    finally:
        time.monotonic = real


class Tower:
    """Takes the times of a profile, each up to `NOISE` more or less; pictures are headers."""

    alive, weights_bytes, dtype, modalities = True, 0, "bfloat16", ("IMAGE",)

    def __init__(self, costs: EncoderCosts, patch_px: int, rng: random.Random, depth: int) -> None:
        self.depth = depth
        self.preparers = costs.host.workers
        self.busy_s = 0.0
        self._costs, self._patch_px, self._rng = costs, patch_px, rng
        self._running = asyncio.Lock()

    def _noisy(self, seconds: float) -> float:
        return seconds * self._rng.uniform(1 - NOISE, 1 + NOISE)

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Mapping[str, Any] | None = None,
    ) -> Prepared:
        patches = patches_of(struct.unpack_from("<ii", data, 18), self._patch_px)
        await asyncio.sleep(self._noisy(self._costs.host.seconds(patches)))
        layout = Layout("IMAGE", TensorSpec("bfloat16", (1, 1)), [[1, 1, 1]])
        return Prepared(layout, patches, None, None)

    async def forward(self, batch: Sequence[Prepared], tell: Any = None) -> list[torch.Tensor]:
        async with self._running:
            seconds = self._noisy(self._costs.tower.seconds((one.patches, 1) for one in batch))
            await asyncio.sleep(seconds)
            self.busy_s += seconds
        return list(torch.zeros(len(batch), 1, dtype=torch.bfloat16).split(1))

    def discard(self, prepared: Prepared) -> None: ...

    async def profile(self, asked: Any) -> None: ...

    async def close(self) -> None: ...


class Receiver:
    """Grants at once, and takes what comes."""

    @asynccontextmanager
    async def offer(self, endpoint: str, offer: Offer) -> AsyncIterator[Offered]:
        offered = Offered(offer.nbytes)
        offered.answer(Grant(offer.ticket, offer.item, 1, 600.0, Inline()))
        yield offered

    async def deliver(
        self, endpoint: str, granted: Granted, embedding: torch.Tensor, timeout_s: float
    ) -> str:
        granted.used = True
        await asyncio.sleep(DELIVER_S)
        return "inline"

    async def fetch(self, source: MediaSource, deadline: float, account: Account) -> FetchedMedia:
        assert source.data is not None
        return FetchedMedia(source.data, digest(source.data))


class Encoders(EncoderClient):
    """Encoder servers without HTTP."""

    def __init__(self, services: Mapping[str, EncoderService]) -> None:
        self._services = services

    async def encode(
        self, url: str, request: EncodeRequest, headers: Mapping[str, str] | None = None
    ) -> EncodeReply:
        service = self._services[url]
        try:
            with service.receiving() as room:
                room.take(sum(len(item.data or b"") for item in request.items))
                return await service.encode(request, room)
        except EpdError as error:
            if isinstance(error, OverloadedError | UnavailableError):
                error.retry_after_s = round(service.retry_after_s)
            raise


def patches_of(size: tuple[int, int], patch_px: int) -> int:
    return math.ceil(size[0] / patch_px) * math.ceil(size[1] / patch_px)


def picture(size: tuple[int, int], number: int) -> bytes:
    """The header of a BMP, which says its size."""
    return b"BM" + bytes(16) + struct.pack("<ii", *size) + number.to_bytes(8, "big")


class Case(msgspec.Struct, frozen=True):
    """A load.

    Attributes:
        name: for the page.
        sizes: of pictures, one as likely as another.
        pictures: of a request, one number as likely as another.
        deadline_s: of a request.
    """

    name: str
    sizes: tuple[tuple[int, int], ...]
    pictures: tuple[int, ...]
    deadline_s: float
    encoders: int = 1
    depth: int = 2
    max_items: int = 1024


class Figures(msgspec.Struct):
    """What was answered in time, of what was asked for in the measured seconds.

    Attributes:
        load: asked for, by what the towers can do.
        items, requests: shares that were delivered, and that were delivered whole.
        goodput: patches of whole requests, by what the towers can do.
        busy: of the towers.
        p50_s, p99_s: of the requests that were delivered.
    """

    case: str
    load: float
    items: float
    requests: float
    goodput: float
    busy: float
    p50_s: float
    p99_s: float


def capacity(costs: EncoderCosts, case: Case, patch_px: int) -> float:
    """Patches a second that towers can do, in batches of the mean picture."""
    mean = sum(patches_of(size, patch_px) for size in case.sizes) / len(case.sizes)
    tower = costs.tower
    count = max(1, min(tower.batch_items, int(tower.batch_patches // mean)))
    # The square term takes each picture by itself.
    every = [patches_of(size, patch_px) for size in case.sizes]
    seconds = tower.seconds((patches, 1) for patches in every * count)
    return case.encoders * sum(every) * count / seconds if seconds else math.inf


def _service(name: str, tower: Tower, costs: TowerCosts, max_items: int) -> EncoderService:
    metrics, receiver = EncoderMetrics(), cast(Any, Receiver())
    return EncoderService(
        computations=Computations(
            [tower],
            EmbeddingCache(0),
            metrics,
            batch=BatchBounds(costs.batch_patches, costs.batch_items),
        ),
        urls=UrlReader(receiver, UrlMemory(0), metrics),
        sender=receiver,
        admission=Admission(max_items, 1 << 40),
        metrics=metrics,
        namespace=NAMESPACE,
        name=name,
    )


async def run(case: Case, load: float, measured_s: float, seed: int) -> Figures:
    """Requests until two deadlines and `measured_s` are over; those of its end count."""
    rng = random.Random(f"{seed} {load}")
    profile = load_profile(PROFILE)
    costs, patch_px = profile.encoder, profile.pixels.patch_px
    towers = [Tower(costs, patch_px, rng, case.depth) for _ in range(case.encoders)]
    services = {
        (url := f"http://encoder-{number}"): _service(url, tower, costs.tower, case.max_items)
        for number, tower in enumerate(towers)
    }
    pool, item_costs = Pool(NAMESPACE), Costs()
    for url in services:
        pool.add(url)
        pool.heard(url, Report(NAMESPACE))
    dispatcher = Dispatcher(
        Encoders(services),
        pool,
        policy("affinity"),
        describe=lambda items: describe(items, item_costs),
        rng=rng,
    )

    async def probe() -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            for url, service in services.items():
                now = service.computations.status()
                report = Report(NAMESPACE, False, now["patches_queued"], now["patches_per_s"])
                pool.heard(url, report)

    most = capacity(costs, case, patch_px)
    mean = sum(patches_of(size, patch_px) for size in case.sizes) / len(case.sizes)
    mean *= sum(case.pictures) / len(case.pictures)
    counted: list[tuple[float, bool, int, int, float]] = []
    numbers = iter(range(1 << 40))
    settling_s = 10.0 + 2 * case.deadline_s
    began = time.monotonic()

    async def ask(count: int) -> None:
        at = time.monotonic()
        items, patches = [], 0.0
        for place in range(count):
            size = rng.choice(case.sizes)
            patches += patches_of(size, patch_px)
            data = picture(size, next(numbers))
            items.append(EncodeItem(place, "IMAGE", f"image {place + 1}", data=data))
        done: set[int] = set()
        whole = True
        try:
            await dispatcher.run(
                ReplyTo("tcp://", str(next(numbers))),
                items,
                at + case.deadline_s,
                lambda item, _source: done.add(item),
            )
        except EpdError:
            whole = False
        took = time.monotonic() - at
        whole = whole and took <= case.deadline_s
        if settling_s <= at - began < settling_s + measured_s:
            counted.append((took, whole, len(done), count, patches))

    probing = asyncio.create_task(probe())
    async with asyncio.TaskGroup() as asking:
        while time.monotonic() < began + settling_s + measured_s:
            await asyncio.sleep(rng.expovariate(load * most / mean))
            asking.create_task(ask(rng.choice(case.pictures)))
    over = time.monotonic() - began
    probing.cancel()
    for service in services.values():
        await service.computations.close()
    took = sorted(one[0] for one in counted if one[1]) or [math.nan]
    return Figures(
        case.name,
        load,
        sum(one[2] for one in counted) / sum(one[3] for one in counted),
        sum(one[1] for one in counted) / len(counted),
        sum(one[4] for one in counted if one[1]) / measured_s / most,
        sum(tower.busy_s for tower in towers) / over / case.encoders,
        took[len(took) // 2],
        took[int(len(took) * 0.99)],
    )


CASES = (
    Case("1080p, one a request, 2 s", (LARGE,), (1,), 2.0),
    Case("1080p, one a request, 10 s", (LARGE,), (1,), 10.0),
    Case("1080p, four a request, 10 s", (LARGE,), (4,), 10.0),
    Case("1080p and 448, one to eight, 10 s", (SMALL, LARGE), tuple(range(1, 9)), 10.0),
    Case("1080p, four a request, 3 encoders, 10 s", (LARGE,), (4,), 10.0, encoders=3),
)


def _page(arms: dict[str, list[Figures]], seconds: float) -> str:
    head = ["of what the towers can do", "asked for"]
    for arm in arms:
        head += [f"{arm}: requests in time", f"{arm}: pictures", f"{arm}: p50 (s)"]
    found = {name: {(one.case, one.load): one for one in figures} for name, figures in arms.items()}
    rows = [head]
    for one in next(iter(arms.values())):
        row = [one.case, f"{one.load:g}"]
        for figures in found.values():
            if (its := figures.get((one.case, one.load))) is None:
                row += ["", "", ""]
                continue
            row += [f"{its.goodput:.2f}", f"{its.load * its.items:.2f}", f"{its.p50_s:.2f}"]
        rows.append(row)
    return f"""# Encoders that are asked too much

`.venv/bin/python benchmark/overload.py`: {machine()}, {seconds:g} s a load, no server and no
model. The dispatcher and encoders are the package's own, the times of towers and preprocessing
those of the profile `{PROFILE}`, each up to {NOISE:.0%} more or less by chance. Requests of new
pictures, at random times, each with a deadline. All figures are parts of what the towers can do
in full batches: what was asked for, the patches of requests that were delivered whole before
their deadline, and the pictures that were. The median is that of the requests delivered whole.
Requests of
the measured time are those that came in it, and chance has some percent more or fewer of them
than the mean; pictures may be more than 1 where small ones are served first. `before` is the
order of items that judged a deadline by the item alone.

{table(rows)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--case", default="", help="those with this in their names")
    parser.add_argument("--loads", type=float, nargs="*", default=LOADS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arm", default="now")
    options = parser.parse_args()
    path = RESULTS / "overload.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    arms = {arm: msgspec.convert(figures, list[Figures]) for arm, figures in kept.items()}
    for case in CASES:
        if options.case not in case.name:
            continue
        for load in options.loads:
            with jumping() as runner:
                one = runner.run(run(case, load, options.seconds, options.seed))
            print(one, flush=True)
            arm = arms.setdefault(options.arm, [])
            arm[:] = [other for other in arm if (other.case, other.load) != (case.name, load)]
            arm.append(one)
    for arm in arms.values():
        arm.sort(key=lambda one: ([case.name for case in CASES].index(one.case), one.load))
    path.write_text(json.dumps(msgspec.to_builtins(arms), indent=1) + "\n")
    path.with_suffix(".md").write_text(_page(arms, options.seconds))


if __name__ == "__main__":
    main()
