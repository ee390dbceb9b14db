"""Prefill that begins while later pictures are being encoded, on emulated accelerators.

    .venv/bin/python benchmark/early.py --cells h100-1E1PD-4-alone h100-1E1PD-8-alone
    .venv/bin/python benchmark/early.py --cells h100-2E1PD-4-half --add
    .venv/bin/python benchmark/early.py --render

Real servers run a tiny checkpoint, and each of their forward passes takes the time of a profile
(docs/emulated.md). A cell is a machine, a topology, what a request has, and a load; without
`--cells` all of them are measured, which takes hours. Cells of one machine and topology use the
same servers. All arms are up, and have their turns: each request goes to one arm after the other,
so that a drift of this machine is the same for all. Of the load `half` an arm's turn is some
requests.

A picture of 448 px stands for one of 1080p, and costs what that one does. All times of
`results/early_prefill.json` and of its page are the emulated machines'.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

import aiohttp  # noqa: E402
import msgspec  # noqa: E402
import reproduce  # noqa: E402
import tokenizers  # noqa: E402
from comparison.arms import Arm, Place, Running  # noqa: E402
from comparison.files import read_all  # noqa: E402
from comparison.results import machine, versions  # noqa: E402
from comparison.workloads import Request, requests, text  # noqa: E402
from early_cells import (  # noqa: E402
    FLAGS,
    MACHINES,
    OFF,
    ON,
    TEXT_TOKENS,
    TOPOLOGIES,
    Cell,
    Measured,
    Results,
    cell,
    cells,
    half_rate,
    passes,
)
from early_page import page, rows  # noqa: E402
from open_loop import Answer, ask, session  # noqa: E402

from demo_emulated import Counted, read_metrics  # noqa: E402
from make_checkpoint import ensure  # noqa: E402

KEPT = ROOT / "benchmark" / "results" / "early_prefill.json"
SETTING = "SGLANG_EPD_PREFILL_EARLY"
_EARLY_TOKENS = "sglang:epd_early_tokens_total"
# Of an answer, of the emulated machines' time.
_TIMEOUT_S = 60.0
# A text's first token is there by then, and its steps have begun.
_HEAD_START_S = 0.1
# Of a text beside: so many times as long as a request takes whose prefill waits.
_BESIDE = 1.3
# New images after which `affinity` takes a server for alone (dispatch/policies.py), and one more.
_KNOWN_IMAGES = 30
# Requests of an arm's turn under load.
_TURN = 6
replace = msgspec.structs.replace
Spent = tuple[dict[str, list[Counted]], float]


def _flagged(arm: Arm, flags: str) -> Arm:
    """With more flags on the servers that prefill."""
    servers = [
        server if server.role == "encoder" else replace(server, flags=f"{server.flags} {flags}")
        for server in arm.servers
    ]
    return replace(arm, servers=servers)


def arms_of(topology: str, chosen: Sequence[str]) -> list[Arm]:
    """This package twice, in-tree EPD, and a server that encodes itself.

    Args:
        chosen: of `on`, `off`, `in-tree` and `one`.
    """
    ours, *others = read_all(reproduce.HERE / "arms", Arm, list(TOPOLOGIES[topology]))
    if topology in FLAGS:
        ours, *others = [_flagged(arm, FLAGS[topology]) for arm in (ours, *others)]
    on, off = _set(ours, "on", ON, "auto"), _set(ours, "off", OFF, "off")
    known = dict(zip(("on", "off", "in-tree", "one"), (on, off, *others), strict=True))
    return [known[name] for name in known if name in chosen]


def _set(arm: Arm, name: str, title: str, value: str) -> Arm:
    """With the setting on the server that prefills."""
    servers = [
        replace(server, env={SETTING: value}) if server.role in ("language", "prefill") else server
        for server in arm.servers
    ]
    return replace(arm, name=name, title=title, servers=servers)


@contextmanager
def running(one: Cell, arms: Sequence[Arm], dilation: float, folder: Path) -> Iterator[list[Up]]:
    """The servers of a cell's machine and topology, all of the arms' at once."""
    folder.mkdir()
    profile = folder / "profile.json"
    profile.write_bytes(msgspec.json.encode(one.profile))
    os.environ["SGLANG_EPD_EMULATE"] = str(profile)
    os.environ["SGLANG_EPD_EMULATE_DILATE"] = f"{dilation:g}"
    # In-tree encoders answer no probe during a pass, and their servers forget them after this.
    os.environ["SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_TIMEOUT"] = f"{2 * dilation:g}"
    model = str(ensure(MACHINES[one.machine].checkpoint))
    place = Place(cores=sorted(os.sched_getaffinity(0)))
    servers = [Running(arm, model, "", place, folder) for arm in arms]
    # The threads outlive the servers, which the kernel ends with the thread that started them.
    with ThreadPoolExecutor(len(servers)) as threads:
        try:
            for arm, seconds in zip(arms, threads.map(Running.start, servers), strict=True):
                print(f"{arm.title}: up after {seconds:.0f} s", flush=True)
            yield [Up(arm, found) for arm, found in zip(arms, servers, strict=True)]
        finally:
            for found in servers:
                found.stop()


@dataclass
class Up:
    """An arm whose servers are up, and what has been seen of it in a cell."""

    arm: Arm
    servers: Running
    ttfts_s: list[float] = field(default_factory=list)
    tpots_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def take(self, answer: Answer, tokens: int, *, media: bool) -> None:
        if answer.failure or answer.ttft_s is None:
            self.failures.append(answer.failure or "no token")
        elif media:
            self.ttfts_s.append(answer.ttft_s)
        else:
            self.tpots_s.append((answer.seconds - answer.ttft_s) / (tokens - 1))

    def spent(self) -> Spent:
        """What its accelerators have done so far, and the tokens that were prefilled early."""
        urls = [*self.servers.urls("language"), *self.servers.urls("prefill")]
        samples = itertools.chain.from_iterable(map(read_metrics, urls))
        early = sum(sample.value for sample in samples if sample.name == _EARLY_TOKENS)
        return reproduce.spent(self.servers), early


class Turns:
    """One cell on all arms, in turns.

    Args:
        made: the requests with media; all arms get the same. The first `warm` are not counted.
        texts: of those beside, without an end.
    """

    def __init__(
        self,
        one: Cell,
        ups: list[Up],
        dilation: float,
        made: list[Request],
        texts: Iterator[str],
        *,
        warm: int,
    ) -> None:
        self._cell, self._ups, self._by, self._warm = one, ups, dilation, warm
        self._bodies = [body(request.turns[0], request.answer_tokens) for request in made]
        self._texts = texts

    async def measure(self) -> list[Measured]:
        """All requests but the first ones, which warm servers up and tell the prompt's length."""
        async with session() as http:
            warm = self._bodies[: self._warm]
            prompts = {await self._warm_up(http, up, sent) for sent in warm for up in self._ups}
            prompt = max(prompts)
            before = [await asyncio.to_thread(up.spent) for up in self._ups]
            bodies = self._bodies[self._warm :]
            if self._cell.load == "half":
                for number, first in enumerate(range(0, len(bodies), _TURN)):
                    for up in self._ups:
                        await self._poisson(http, up, bodies[first : first + _TURN], prompt, number)
            else:
                for sent in bodies:
                    for up in self._ups:
                        await self._alone(http, up, sent, prompt)
        after = [await asyncio.to_thread(up.spent) for up in self._ups]
        return [
            self._measured(up, prompt, then, now)
            for up, then, now in zip(self._ups, before, after, strict=True)
        ]

    async def _warm_up(self, http: aiohttp.ClientSession, up: Up, sent: bytes) -> int:
        plain = json.loads(sent) | {"stream": False}
        url = f"{up.servers.url}/v1/chat/completions"
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S * self._by)
        async with http.post(url, json=plain, timeout=timeout) as response:
            if response.status != 200:
                raise RuntimeError(f"{up.arm.title}: {await response.text()}")
            return int((await response.json())["usage"]["prompt_tokens"])

    async def _alone(self, http: aiohttp.ClientSession, up: Up, sent: bytes, prompt: int) -> None:
        async with asyncio.TaskGroup() as group:
            if self._cell.load == "beside":
                group.create_task(self._text(http, up, prompt))
                await asyncio.sleep(_HEAD_START_S * self._by)
            await self._media(http, up, sent, time.monotonic())

    async def _poisson(
        self, http: aiohttp.ClientSession, up: Up, bodies: list[bytes], prompt: int, number: int
    ) -> None:
        rate = half_rate(self._cell, prompt) / self._by
        draw, due = random.Random(repr((self._cell.name, number))), time.monotonic()
        async with asyncio.TaskGroup() as group:
            over = asyncio.Event()
            beside = group.create_task(self._texts_until(http, up, prompt, over))
            async with asyncio.TaskGroup() as load:
                for sent in bodies:
                    due += draw.expovariate(rate)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    load.create_task(self._media(http, up, sent, due))
            over.set()
            await beside

    async def _texts_until(
        self, http: aiohttp.ClientSession, up: Up, prompt: int, over: asyncio.Event
    ) -> None:
        while not over.is_set():
            await self._text(http, up, prompt)

    async def _media(self, http: aiohttp.ClientSession, up: Up, sent: bytes, due: float) -> None:
        up.take(await self._ask(http, up, sent, due), 0, media=True)

    async def _text(self, http: aiohttp.ClientSession, up: Up, prompt: int) -> None:
        step_s = self._cell.profile.language.step_s(1, TEXT_TOKENS)
        tokens = math.ceil(_BESIDE * passes(self._cell, prompt).serial / step_s)
        said = [{"type": "text", "text": next(self._texts)}]
        answer = await self._ask(http, up, body(said, tokens), time.monotonic())
        up.take(answer, tokens, media=False)

    async def _ask(self, http: aiohttp.ClientSession, up: Up, sent: bytes, due: float) -> Answer:
        timeout_s = _TIMEOUT_S * self._by
        return await ask(http, up.servers.url, sent, due, due, timeout_s=timeout_s)

    def _measured(self, up: Up, prompt: int, before: Spent, after: Spent) -> Measured:
        busy = reproduce.busy(before[0], after[0])
        found = Measured(
            self._cell.name,
            up.arm.title,
            self._by,
            prompt,
            [1e3 * seconds / self._by for seconds in up.ttfts_s],
            [1e3 * seconds / self._by for seconds in up.tpots_s],
            up.failures,
            after[1] - before[1],
            (busy.encoder_s + sum(busy.language_s.values())) / self._by,
            busy.overrun_s / self._by,
        )
        up.ttfts_s, up.tpots_s, up.failures = [], [], []
        return found


def body(content: object, tokens: int) -> bytes:
    """A streamed chat completion of so many tokens."""
    told = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    more = {"model": "default", "temperature": 0, "ignore_eos": True, "stream": True}
    return json.dumps(told | more).encode()


def measure(one: Cell, ups: list[Up], options: argparse.Namespace) -> list[Measured]:
    """A cell on servers that are up."""
    model = ensure(MACHINES[one.machine].checkpoint)
    tokenizer = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")

    def count(said: str) -> int:
        return len(tokenizer.encode(said, add_special_tokens=False).ids)

    # Cells of one machine have the same pictures otherwise, and servers keep their KV.
    seed = (one.name, options.seed)
    # A server that knows of more new images spreads those of a request over several encoders.
    spread = one.encoders > 1 and one.sent != "video"
    warm = math.ceil(_KNOWN_IMAGES / len(one.items())) if spread else 1
    made = list(islice(requests(one.workload(), "small", seed, count), options.requests + warm))
    draw = random.Random(repr(seed))
    texts = (text(TEXT_TOKENS, draw, count) for _ in itertools.count())
    return asyncio.run(Turns(one, ups, options.dilate, made, texts, warm=warm).measure())


def begin(out: Path, add: bool) -> Results:
    """Results to add to."""
    if add and out.exists():
        return msgspec.json.decode(out.read_bytes(), type=Results)
    return Results(machine(), versions())


def keep(out: Path, results: Results) -> None:
    out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    out.with_suffix(".md").write_text(page(results))


def groups(chosen: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that use the same servers."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for one in chosen:
        found.setdefault((one.machine, one.topology), []).append(one)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", type=cell, help="as h100-1E1PD-4-alone; all without")
    names = ["on", "off", "in-tree", "one"]
    parser.add_argument("--arms", nargs="+", choices=names, default=names)
    parser.add_argument("--requests", type=int, default=8, help="with media, of a cell and arm")
    parser.add_argument("--dilate", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1, help="another one, other pictures")
    parser.add_argument("--add", action="store_true", help="keep other cells' results")
    parser.add_argument("--out", type=Path, default=KEPT)
    parser.add_argument("--render", action="store_true", help="write the page anew")
    options = parser.parse_args()
    results = begin(options.out, options.add or options.render)
    if options.render:
        keep(options.out, results)
        return
    results.commands.append(" ".join(["benchmark/early.py", *sys.argv[1:]]))
    folder = Path(tempfile.mkdtemp(prefix="sglang-epd-early-"))
    print("logs:", folder, flush=True)
    for number, group in enumerate(groups(options.cells or cells())):
        arms = arms_of(group[0].topology, options.arms)
        with running(group[0], arms, options.dilate, folder / str(number)) as ups:
            for one in group:
                results.put(one.name, measure(one, ups, options))
                keep(options.out, results)
                print("\n".join(" | ".join(row) for row in rows(results, one)), flush=True)


if __name__ == "__main__":
    main()
