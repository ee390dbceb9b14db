"""`scripts/demo --emulate`: a fleet on emulated accelerators, as `bench_serving` sees it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sglang_epd.cli.processes import ServerProcess
from sglang_epd.cli.topology import Fleet

# Requests a second, of the emulated machines' time, and their number.
_RATE, _REQUESTS = 4.0, 32
_LOAD = shlex.split(
    "--backend sglang-oai-chat --dataset-name image --image-count 2 --image-resolution 448x448 "
    "--image-format jpeg --random-input-len 128 --random-output-len 32 --random-range-ratio 1 "
    "--warmup-requests 1 --disable-tqdm"
)
_PREFIX = "sglang:epd_emulated_"
_ITEMS = "sglang:epd_dispatch_items_total"


@dataclass(frozen=True)
class Counted:
    """What a server's emulated accelerator has done so far, in dilated seconds.

    Attributes:
        seconds: by tower, prefill and decode.
        items: media of its requests by where their KV or embedding came from; none of a server
            that has its own tower.
    """

    seconds: dict[str, float]
    overrun_s: float
    passes: float
    items: Counter[str] = field(default_factory=Counter)

    def since(self, before: Counted) -> Counted:
        spent = {kind: s - before.seconds.get(kind, 0.0) for kind, s in self.seconds.items()}
        overrun_s, passes = self.overrun_s - before.overrun_s, self.passes - before.passes
        return Counted(spent, overrun_s, passes, self.items - before.items)


def processes_of(
    fleet: Fleet, logs: Path, more: Mapping[str, str] = MappingProxyType({})
) -> list[ServerProcess]:
    """The servers' processes, not started, in the fleet's order.

    Args:
        more: of their environment.
    """
    # Nothing is looked up on a hub: the checkpoint is complete.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **more}
    return [
        ServerProcess(
            server.name,
            server.argv(sys.executable),
            log_path=logs / f"{server.name}.log",
            ready_url=f"{server.url}{server.ready_path}",
            env=env,
        )
        for server in fleet.servers
    ]


def read_metrics(url: str) -> Iterator[Sample]:
    """All that a server counts."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    for family in text_string_to_metric_families(text):
        yield from family.samples


def counted(url: str) -> Counted:
    """What a server's metrics say of its accelerator."""
    seconds: dict[str, float] = {}
    items: Counter[str] = Counter()
    other = {"overrun_seconds_total": 0.0, "passes_total": 0.0}
    for sample in read_metrics(url):
        name = sample.name.removeprefix(_PREFIX)
        if sample.name == f"{_PREFIX}seconds_total":
            kind = sample.labels["kind"]
            seconds[kind] = seconds.get(kind, 0.0) + sample.value
        elif sample.name == _ITEMS:
            items[sample.labels["source"]] += int(sample.value)
        elif sample.name.startswith(_PREFIX) and name in other:
            other[name] += sample.value
    return Counted(seconds, other["overrun_seconds_total"], other["passes_total"], items)


def show(fleet: Fleet, options: argparse.Namespace, checkpoint: Path, logs: Path) -> None:
    """Send the load, and print one table, in the emulated machines' time."""
    devices = {one.name: one.url for one in fleet.servers if one.role != "router"}
    before = {name: counted(url) for name, url in devices.items()}
    output, begin = logs / "bench.jsonl", time.monotonic()
    command = [sys.executable, "-m", "sglang.bench_serving", *_LOAD]
    command += ["--base-url", fleet.api_url, "--model", str(checkpoint), "--seed", "1"]
    command += ["--num-prompts", str(_REQUESTS), "--output-file", str(output)]
    command += ["--request-rate", f"{_RATE / options.dilate:g}"]
    print(
        f"\n{_REQUESTS} requests of two pictures of 448 px, {_RATE:g} a second of the emulated "
        f"machines, which is {_RATE / options.dilate:g} of this one",
        flush=True,
    )
    with (logs / "bench.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    elapsed_s = time.monotonic() - begin
    result = json.loads(output.read_text().splitlines()[-1])
    print(f"\n{result['completed']} of {_REQUESTS} answered, ms{'':<3} mean      p50      p99")
    for name in ("ttft", "tpot"):
        times = [result[f"{kind}_{name}_ms"] / options.dilate for kind in ("mean", "median", "p99")]
        print(f"  {name.upper():<24}" + "".join(f"{one:>9.1f}" for one in times))
    print(f"  {'accelerator':<20}{'busy':>9}{'tower':>9}{'prefill':>9}{'decode':>9}{'overrun':>9}")
    for name, url in devices.items():
        spent = counted(url).since(before[name])
        total = sum(spent.seconds.values())
        shares = [total, *(spent.seconds.get(kind, 0.0) for kind in ("tower", "prefill", "decode"))]
        cells = [f"{100 * one / elapsed_s:>8.0f}%" for one in shares]
        # What it was longer than emulated, of all that was emulated.
        print(f"  {name:<20}{''.join(cells)}{100 * spent.overrun_s / max(total, 1e-9):>8.1f}%")
