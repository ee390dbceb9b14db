"""What a dispatch policy makes of the encoders' caches: few images, asked for unequally.

    .venv/bin/python benchmark/zipf.py [--seeds 4] [--requests 20000]
    .venv/bin/python benchmark/zipf.py --servers [--requests 3000]

Requests of one image each (of four in some cases), drawn from 200 by Zipf's law with s = 1.1, go to
three encoders whose caches together hold the embeddings of 40% of them. The first form is a
replay: the package's policies, pools and caches are the real ones, while towers and time
are reckoned (a tower encodes one image after the other, a hit takes 5 ms). The second
runs three real encoder servers on the tiny checkpoint, and reads their metrics; its
figures go into the same page.

The yardstick is one cache of the summed size before one tower as fast as three, which is
the best that spreading the same requests can come to.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import io
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import requests as http
import torch
from encoder_arms import Ours
from pages import machine, table
from pictures import ROOT, jpeg
from PIL import Image

from make_checkpoint import ensure
from sglang_epd.cache import EmbeddingCache
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.dispatch.policies import Affinity, Choose, ItemCost, Policy, policy, rendezvous
from sglang_epd.dispatch.pool import Attempt, Pool, Report, Snapshot
from sglang_epd.wire.messages import Layout, TensorSpec

IMAGES = 200
EXPONENT = 1.1
ENCODERS = 3
CACHED_SHARE = 0.4
CLIENTS = (4, 8, 32)
# The replay's tower and answers, in patches a second and seconds.
RATE = 10_000.0
HIT_S = 0.005
PROBE_S = 1.0
NAMESPACE = "zipf"
# Side lengths of the pictures; patches are a 14th of each.
EQUAL = ((448, 448),)
MIXED = ((224, 224), (448, 448), (896, 896))
RESULTS = ROOT / "benchmark" / "results"

# In the servers' run: 77 tokens of 128 float32 are 39,424 bytes, so that a cache of 1 MiB
# holds 26 embeddings, and three 78 of 200.
SIZE = (308, 196)
EMBEDDING_BYTES = 77 * 128 * 4
CACHE_MB = 1


@dataclass
class Outcome:
    """What one run of one policy came to. Loads are each encoder's, by the mean."""

    policy: str
    clients: int
    seed: int
    hit_rate: float
    requests_by_mean: list[float]
    computed_by_mean: list[float]
    seconds: float
    # A request, until its last image: the mean.
    request_ms: float = 0.0
    # Points of the hit rate that one cache has more.
    lost: float = 0.0
    servers: int = 1
    case: str = ""


# Policies that `affinity` was chosen over.


def in_order(key: bytes, urls: Iterable[str]) -> list[str]:
    """The encoders as the key ranks them, the first one first."""
    ranks = rendezvous(key, urls)
    return sorted(ranks, key=ranks.__getitem__, reverse=True)


def only_rendezvous(
    items: Sequence[ItemCost], snapshot: Snapshot, _rng: random.Random
) -> list[str]:
    """Each key to the first in its order, whatever there is to do."""
    urls = [view.url for view in snapshot.encoders]
    return [in_order(item.key, urls)[0] for item in items]


def bounded(bound: float, slack: float) -> Choose:
    """The first in each key's order with at most `bound` times the mean load, or the mean and
    `slack` times the item's own cost; nothing is remembered."""

    def choose(items: Sequence[ItemCost], snapshot: Snapshot, _rng: random.Random) -> list[str]:
        loads = {view.url: view.load for view in snapshot.encoders}
        chosen = []
        for item in items:
            mean = (sum(loads.values()) + item.patches) / len(loads)
            most = max(bound * mean, mean + slack * item.patches)
            order = in_order(item.key, loads)
            url = next(url for url in order if loads[url] + item.patches <= most)
            loads[url] += item.patches
            chosen.append(url)
        return chosen

    return choose


_OTHERS: dict[str, Choose] = {
    "rendezvous alone": only_rendezvous,
    "bound at each request": bounded(1.25, 1.0),
    "loose bound at each request": bounded(2.0, 8.0),
}
POLICIES = ("shuffle", "round_robin", "least_loaded", "affinity")


class Deaf(Affinity):
    """As if other language servers were always asked for the same."""

    def heard(self, key: bytes, source: str) -> None:
        pass


ONE_CACHE = "one cache"
DEAF = "affinity, new keys by their order"


def make(name: str) -> Policy:
    if name == ONE_CACHE:
        return Policy(only_rendezvous)
    if name == DEAF:
        return Deaf()
    return Policy(_OTHERS[name]) if name in _OTHERS else policy(name)


def draw(count: int, seed: int) -> list[int]:
    """Numbers of images, the lowest the most popular."""
    weights = [(rank + 1) ** -EXPONENT for rank in range(IMAGES)]
    return random.Random(seed).choices(range(IMAGES), weights, k=count)


def by_mean(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [round(value / mean, 4) if mean else 0.0 for value in values]


# The replay


@dataclass
class Encoder:
    """A cache and a tower; times are those of the replay."""

    url: str
    cache: EmbeddingCache
    rate: float
    free_at: float = 0.0
    link_free_at: float = 0.0
    making: dict[bytes, float] = field(default_factory=dict)
    asked: int = 0
    hits: int = 0
    computed: float = 0.0

    def ask(self, key: bytes, patches: float, now: float) -> tuple[float, str]:
        """When the embedding will be there, and how it comes about."""
        self.asked += 1
        if key in self.making:
            self.hits += 1
            return self.making[key], "coalesced"
        entry = self.cache.find(key)
        if entry is not None:
            self.cache.release(entry)
            self.hits += 1
            return now + HIT_S, "cached"
        self.computed += patches
        self.free_at = max(now, self.free_at) + patches / self.rate
        self.making[key] = self.free_at
        return self.free_at, "computed"

    def send(self, end: float, link_s: float) -> float:
        """When an embedding that is there at `end` has gone over the encoder's link, which
        takes one after the other."""
        self.link_free_at = max(end, self.link_free_at) + link_s
        return self.link_free_at

    def done(self, key: bytes, embedding: torch.Tensor) -> None:
        if self.making.pop(key, None) is not None:
            layout = Layout("IMAGE", TensorSpec("float32", tuple(embedding.shape)), [[1, 1, 1]])
            self.cache.release(self.cache.add(key, layout, embedding))


@dataclass
class Asked:
    """A request, and how many of its images are not there yet."""

    began: float
    left: int


class Sent(NamedTuple):
    """An image that an encoder was asked for."""

    number: int
    encoder: Encoder
    attempt: AbstractContextManager[Attempt]
    choose: Policy
    source: str
    request: Asked


class Replay:
    """One run: language servers with a pool and a policy each, and their encoders.

    Args:
        name: of the policy.
        cached: share of all embeddings that the caches hold together.
        link_s: that an embedding takes of an encoder's link; those of fewer encoders are
            faster.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        *,
        encoders: int = ENCODERS,
        language_servers: int = 1,
        sizes: Sequence[tuple[int, int]] = EQUAL,
        cached: float = CACHED_SHARE,
        images: int = IMAGES,
        link_s: float = 0.0,
    ) -> None:
        self._link_s = link_s * encoders / ENCODERS
        self._rng = random.Random(seed)
        grids = [(height // 14, width // 14) for width, height in sizes]
        # Which size an image has is chance, not its rank.
        self._grids = [self._rng.choice(grids) for _ in range(images)]
        tokens = {rows * columns // 4 for rows, columns in grids}
        self._embeddings = {count: torch.zeros(count, 8) for count in tokens}
        self._keys = [self._rng.randbytes(32) for _ in range(images)]
        every = sum(self._embedding(image).nbytes for image in range(images))
        share = int(cached * every / encoders)
        # Other names, other orders: as another deployment would have.
        self._encoders = {
            url: Encoder(url, EmbeddingCache(share), RATE * ENCODERS / encoders)
            for url in (f"http://{self._rng.randrange(1 << 32):x}:30000" for _ in range(encoders))
        }
        self._now = 0.0
        self._asks = [
            (Pool(NAMESPACE, lambda: self._now), make(name)) for _ in range(language_servers)
        ]
        for pool, _ in self._asks:
            for url in self._encoders:
                pool.add(url)
        self._probed = -PROBE_S
        # By the time at which each will be there.
        self._coming: list[tuple[float, int, Sent]] = []
        self._numbers = itertools.count()
        self.took_s: list[float] = []

    def _patches(self, image: int) -> float:
        rows, columns = self._grids[image]
        return float(rows * columns)

    def _embedding(self, image: int) -> torch.Tensor:
        rows, columns = self._grids[image]
        return self._embeddings[rows * columns // 4]

    async def run(self, requests: Iterable[Sequence[int]], clients: int) -> None:
        """To the end, in no time: nothing is awaited, but attempts want an event loop.

        Args:
            requests: the numbers of each one's images, which differ.
        """
        coming = iter(requests)
        for images in itertools.islice(coming, clients):
            self._send(images)
        while self._coming:
            self._now, _, image = heapq.heappop(self._coming)
            image.attempt.__exit__(None, None, None)
            key = self._keys[image.number]
            image.encoder.done(key, self._embedding(image.number))
            image.choose.heard(key, image.source)
            image.request.left -= 1
            if not image.request.left:
                self.took_s.append(self._now - image.request.began)
                for following in itertools.islice(coming, 1):
                    self._send(following)

    def _send(self, images: Sequence[int]) -> None:
        self._probe()
        pool, choose = self._rng.choice(self._asks)
        works = [ItemCost(self._keys[image], self._patches(image)) for image in images]
        urls = choose(works, pool.snapshot(), self._rng)
        pool.assigned(len(works))
        request = Asked(self._now, len(works))
        for number, work, url in zip(images, works, urls, strict=True):
            attempt = pool.attempt(url, work.patches)
            attempt.__enter__()
            encoder = self._encoders[url]
            end, source = encoder.ask(work.key, work.patches, self._now)
            end = encoder.send(end, self._link_s) if self._link_s else end
            sent = Sent(number, encoder, attempt, choose, source, request)
            heapq.heappush(self._coming, (end, next(self._numbers), sent))

    def _probe(self) -> None:
        """What the encoders say of themselves, once a second."""
        if self._now < self._probed + PROBE_S:
            return
        self._probed = self._now
        for encoder in self._encoders.values():
            queued = max(0.0, encoder.free_at - self._now) * encoder.rate
            for pool, _ in self._asks:
                pool.heard(encoder.url, Report(NAMESPACE, False, queued, encoder.rate))

    def outcome(self, name: str, clients: int, seed: int) -> Outcome:
        encoders = list(self._encoders.values())
        asked = sum(encoder.asked for encoder in encoders)
        return Outcome(
            name,
            clients,
            seed,
            round(sum(encoder.hits for encoder in encoders) / asked, 5),
            by_mean([encoder.asked for encoder in encoders]),
            by_mean([encoder.computed for encoder in encoders]),
            round(self._now, 1),
            round(1e3 * statistics.fmean(self.took_s), 1),
        )


_MIXED = "images of 224, 448 and 896"
_FOUR = "four images a request"
_FOUR_NEW = "four images a request, no image twice"
# What is replayed beside the main case: how it differs, by what the page calls it.
CASES: dict[str, dict[str, Any]] = {
    "": {},
    _MIXED: {"sizes": MIXED},
    "encoders without a cache": {"cached": 0.0},
    "no image twice": {"cached": 0.0, "distinct": True},
    "embeddings that take 15 ms of a link": {"link_s": 0.015},
    _FOUR: {"items": 4},
    _FOUR_NEW: {"items": 4, "cached": 0.0, "distinct": True},
}


def replay(name: str, clients: int, seed: int, count: int, **how: Any) -> Outcome:
    distinct, items = how.pop("distinct", False), how.pop("items", 1)
    run = Replay(name, seed, **how, images=count if distinct else IMAGES)
    drawn = range(count) if distinct else draw(count, seed)
    # An image that is drawn twice for a request is in it once.
    asked = [tuple(dict.fromkeys(drawn[at : at + items])) for at in range(0, count, items)]
    asyncio.run(run.run(asked, clients))
    return run.outcome(name, clients, seed)


def compare(
    names: Sequence[str],
    clients: int,
    options: argparse.Namespace,
    *,
    servers: int = 1,
    case: str = "",
) -> list[Outcome]:
    """All policies on the same draws, each next to one cache."""
    outcomes = []
    how = CASES[case]
    for seed in range(options.seeds):
        one = replay(ONE_CACHE, clients, seed, options.requests, encoders=1, **how)
        runs = [one]
        for name in names:
            ran = replay(name, clients, seed, options.requests, language_servers=servers, **how)
            ran.lost = round(100 * (one.hit_rate - ran.hit_rate), 2)
            runs.append(ran)
        for ran in runs:
            ran.servers, ran.case = servers, case
        outcomes += runs
    print(f"{clients} clients, {servers} language servers, {case or 'the main case'}", flush=True)
    return outcomes


def report(outcomes: Sequence[Outcome]) -> str:
    rows = [
        [
            "policy",
            "hit rate",
            "points below one cache, worst seed",
            "most requests, by the mean",
            "most computed patches, by the mean",
            "time, as one cache's",
            "a request's, as one cache's",
        ]
    ]
    base = {one.seed: one for one in outcomes if one.policy == ONE_CACHE}
    for name in dict.fromkeys(one.policy for one in outcomes):
        runs = [one for one in outcomes if one.policy == name]
        rows.append(
            [
                f"`{name}`" if name in POLICIES else name,
                f"{statistics.fmean(one.hit_rate for one in runs):.3f}",
                f"{max(one.lost for one in runs):.1f}",
                _spread([max(one.requests_by_mean) for one in runs]),
                _spread([max(one.computed_by_mean) for one in runs]),
                *(
                    f"{statistics.fmean(of(one) / of(base[one.seed]) for one in runs):.2f}"
                    for of in (attrgetter("seconds"), attrgetter("request_ms"))
                ),
            ]
        )
    return table(rows)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f} (up to {max(values):.2f})"


# Real servers


class Servers:
    """Three encoder servers, and one language server's end that all of them deliver to."""

    def __init__(self, model: str, logs: Path) -> None:
        env = {"SGLANG_VLM_CACHE_SIZE_MB": str(CACHE_MB)}
        self.arms = [Ours(model, logs, cache=True, env=env) for _ in range(ENCODERS)]

    def __enter__(self) -> Servers:
        try:
            for arm in self.arms:
                arm.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_reason: object) -> None:
        self.stop()

    def stop(self) -> None:
        for arm in self.arms:
            arm.stop()

    def clear(self) -> None:
        for arm in self.arms:
            http.delete(f"{arm.url}/v1/cache", timeout=10).raise_for_status()

    def counts(self) -> dict[str, Counter[str]]:
        """How often each encoder computed, found or shared an embedding so far."""
        found = {}
        for arm in self.arms:
            metrics = arm.metrics()
            found[arm.url] = Counter(
                {
                    source: int(
                        metrics.get(f'sglang:epd_encoder_lookups_total{{source="{source}"}}', 0)
                    )
                    for source in ("computed", "cached", "coalesced")
                }
            )
        return found

    async def run(
        self, name: str, sequence: Sequence[int], pictures: Sequence[bytes], clients: int
    ) -> Outcome:
        """All requests by one policy, the caches empty at first."""
        self.clear()
        before = self.counts()
        namespace = self.arms[0].namespace
        pool, choose, rng = Pool(namespace), make(name), random.Random(0)
        for arm in self.arms:
            pool.add(arm.url)
        patches = (SIZE[0] // 14) * (SIZE[1] // 14)
        coming = iter(sequence)
        tickets: list[str] = []

        async def client() -> None:
            for image in coming:
                if not tickets:
                    tickets.extend(self.arms[0].tickets([1] * 64))
                work = ItemCost(image.to_bytes(32), patches)
                (url,) = choose([work], pool.snapshot(), rng)
                pool.assigned(1)
                request = self.arms[0].request(tickets.pop(), [pictures[image]])
                with pool.attempt(url, patches):
                    reply = await asker.encode(url, request)
                (outcome,) = reply.outcomes
                choose.heard(work.key, outcome.source)
                if outcome.state != "delivered":
                    raise RuntimeError(f"{outcome.state}: {outcome.code} {outcome.message}")

        loop = asyncio.get_running_loop()
        async with EncoderClient() as asker:
            await self._probe(pool)
            probing = asyncio.create_task(self._keep_probing(pool))
            begin = loop.time()
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(clients):
                        group.create_task(client())
                seconds = loop.time() - begin
            finally:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)
        self.arms[0].abandon(tickets)
        after = self.counts()
        new = {url: after[url] - before[url] for url in after}
        computed = [float(counts["computed"]) for counts in new.values()]
        asked = [float(counts.total()) for counts in new.values()]
        hit_rate = 1 - sum(computed) / sum(asked)
        return Outcome(
            name,
            clients,
            0,
            round(hit_rate, 5),
            by_mean(asked),
            by_mean(computed),
            round(seconds, 1),
        )

    async def _keep_probing(self, pool: Pool) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            await self._probe(pool)

    async def _probe(self, pool: Pool) -> None:
        for arm in self.arms:
            status = await asyncio.to_thread(_status, arm.url)
            pool.heard(
                arm.url,
                Report(
                    status["namespace"],
                    status["state"] == "draining",
                    status["patches_queued"],
                    status["patches_per_s"],
                ),
            )


def _status(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = http.get(f"{url}/v1/status", timeout=10).json()
    return answer


def picture(seed: object) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(jpeg("224", seed))).resize(SIZE).save(file, "JPEG", quality=90)
    return file.getvalue()


async def on_servers(options: argparse.Namespace) -> list[Outcome]:
    sequence = draw(options.requests, options.seed)
    pictures = [picture(("zipf", options.seed, number)) for number in range(IMAGES)]
    per_encoder = (CACHE_MB << 20) // EMBEDDING_BYTES
    # One cache, by the same order of requests.
    cache = EmbeddingCache(ENCODERS * per_encoder * EMBEDDING_BYTES)
    hits, embedding = 0, torch.zeros(EMBEDDING_BYTES // 4)
    for image in sequence:
        key = image.to_bytes(32)
        entry = cache.find(key)
        hits += entry is not None
        spec = Layout("IMAGE", TensorSpec("float32", (77, 128)), [[1, 14, 22]])
        cache.release(entry or cache.add(key, spec, embedding))
    best = hits / len(sequence)
    outcomes = [Outcome(ONE_CACHE, 8, options.seed, round(best, 5), [1.0], [1.0], 0.0)]
    with Servers(str(ensure("tiny-qwen2_5-vl")), Path(tempfile.mkdtemp())) as servers:
        for name in POLICIES:
            ran = await servers.run(name, sequence, pictures, 8)
            ran.lost = round(100 * (best - ran.hit_rate), 2)
            outcomes.append(ran)
            print(ran, flush=True)
    return outcomes


def servers_table(outcomes: Sequence[Outcome]) -> str:
    rows = [["policy", "hit rate", "points below one cache", "requests, by the mean"]]
    rows[0] += ["computed, by the mean", "seconds"]
    for one in outcomes:
        every = len(one.requests_by_mean) > 1
        rows.append(
            [
                f"`{one.policy}`" if one.policy in POLICIES else one.policy,
                f"{one.hit_rate:.3f}",
                f"{one.lost:.1f}",
                ", ".join(f"{value:.2f}" for value in one.requests_by_mean) if every else "",
                ", ".join(f"{value:.2f}" for value in one.computed_by_mean) if every else "",
                f"{one.seconds:.0f}" if every else "",
            ]
        )
    return table(rows)


# The page


def page(figures: dict[str, Any]) -> str:
    parts = ["# Dispatch policies and the encoders' caches\n"]
    if "replay" in figures:
        outcomes = [Outcome(**one) for one in figures["replay"]["outcomes"]]
        count, seeds = figures["replay"]["requests"], figures["replay"]["seeds"]
        parts.append(f"""## Replay

`{figures["replay"]["command"]}`: {figures["replay"]["machine"]}.

{IMAGES} images, Zipf's law with s = {EXPONENT}, one image a request unless said,
{ENCODERS} encoders whose caches together hold {100 * CACHED_SHARE:.0f}% of all embeddings,
{count} requests a run, {seeds} seeds (each with other images and encoder names, so with other
orders). Real policies, pools and caches; towers and time are reckoned: a picture of 448x448
takes 0.1 s, one after the other, a hit 5 ms. `one cache` has the summed size, and one tower as
fast as three. A request for what is in the making counts as a hit. Requests and patches are
those of the encoder that has most, by the mean of the three: the mean over the seeds, and the
worst. A request's time is until its last image is there.
""")
        cases = dict.fromkeys((one.clients, one.servers, one.case) for one in outcomes)
        for clients, servers, case in cases:
            chosen = [
                one
                for one in outcomes
                if (one.clients, one.servers, one.case) == (clients, servers, case)
            ]
            title = f"{clients} client{'s' * (clients > 1)}" + (f", {case}" if case else "")
            if servers > 1:
                title += f", behind {servers} language servers that know nothing of each other"
            parts.append(f"### {title}\n\n{report(chosen)}\n")
    if "servers" in figures:
        outcomes = [Outcome(**one) for one in figures["servers"]["outcomes"]]
        parts.append(f"""## Real servers

`{figures["servers"]["command"]}`: {figures["servers"]["machine"]}.

The same law on {ENCODERS} encoder servers (tiny checkpoint, `--enable-prefix-mm-cache`,
`SGLANG_VLM_CACHE_SIZE_MB={CACHE_MB}`: {(CACHE_MB << 20) // EMBEDDING_BYTES} embeddings each),
8 clients, {figures["servers"]["requests"]} requests a policy, from empty caches; hits and loads
by the servers' `/metrics`. `one cache` is reckoned from the same order of requests.

{servers_table(outcomes)}
""")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", action="store_true", help="real encoder servers instead")
    parser.add_argument("--requests", type=int, help="default: 20000, on servers 3000")
    parser.add_argument("--seeds", type=int, default=4, help="of the replay")
    parser.add_argument("--seed", type=int, default=1, help="on servers")
    parser.add_argument("--out", type=Path, default=RESULTS / "dispatch.md")
    options = parser.parse_args()
    options.requests = options.requests or (3000 if options.servers else 20_000)
    outcomes: list[Outcome] = []
    if options.servers:
        outcomes = asyncio.run(on_servers(options))
    else:
        names = [*POLICIES, DEAF, *_OTHERS]
        for clients in CLIENTS:
            outcomes += compare(names, clients, options)
        for case in list(CASES)[1:]:
            outcomes += compare(names, 8, options, case=case)
        for servers in (2, 4):
            outcomes += compare(["affinity", DEAF, *_OTHERS], 8, options, servers=servers)
        outcomes += compare(["affinity", DEAF, *_OTHERS], 8, options, servers=4, case=_MIXED)
        for clients in (1, 8):
            outcomes += compare(names, clients, options, case=_FOUR_NEW)
            outcomes += compare(names, clients, options, servers=4, case=_FOUR)
        outcomes += compare(["affinity", DEAF, *_OTHERS], 8, options, servers=4, case=_FOUR_NEW)
    kept = options.out.with_suffix(".json")
    figures: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    figures["servers" if options.servers else "replay"] = {
        "command": " ".join([".venv/bin/python", "benchmark/zipf.py", *sys.argv[1:]]),
        "machine": machine(),
        "requests": options.requests,
        "seeds": options.seeds,
        "outcomes": [asdict(one) for one in outcomes],
    }
    kept.write_text(json.dumps(figures, indent=1) + "\n")
    options.out.write_text(page(figures))
    print(page(figures))


if __name__ == "__main__":
    main()
