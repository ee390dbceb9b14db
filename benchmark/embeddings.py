"""Pages a second of a model of embeddings: batches of pages to one server, and to a language server
behind one encoder and behind two.

    .venv/bin/python benchmark/embeddings.py [--arms one epd-2e1p] [--dilate 8]

Real servers on emulated accelerators (docs/emulated.md), started with `--is-embedding`. Each batch
is one request to `/v1/embeddings` of so many pictures, of which none comes again, and so many
batches are in flight. In-tree EPD is no arm: it answers such requests with 500. All times of
`results/embeddings.md` are the emulated machines'.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

from comparison.arms import Arm, Place, Running  # noqa: E402
from comparison.files import read_all  # noqa: E402
from pages import machine, table  # noqa: E402
from pictures import jpeg  # noqa: E402
from reproduce import HERE, RESULTS, busy, spent  # noqa: E402

from make_checkpoint import ensure  # noqa: E402

ARMS = ("one", "epd-1e1p", "epd-2e1p")
CHECKPOINT = "tiny-qwen2_5-vl"
HEAD = ["arm", "pages/s", "p50 of a batch (s)", "towers busy", "language model busy", "overrun"]
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Load:
    """What every arm gets.

    Attributes:
        size: width and height of a page in pixels.
    """

    batches: int
    pages: int
    in_flight: int
    size: int


def embed(url: str, load: Load, number: int) -> float:
    """Seconds that one batch took.

    Raises:
        OSError: it was not answered.
        RuntimeError: it was answered with another number of embeddings.
    """
    pages = [jpeg((load.size, load.size), (number, page)) for page in range(load.pages)]
    urls = [f"data:image/jpeg;base64,{base64.b64encode(page).decode()}" for page in pages]
    body = {"model": "default", "input": [{"image": url} for url in urls]}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/embeddings", json.dumps(body).encode(), headers)
    began = time.monotonic()
    with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:
        found = len(json.load(answer)["data"])
    if found != load.pages:
        raise RuntimeError(f"{found} embeddings of {load.pages} pages")
    return time.monotonic() - began


def measure(arm: Arm, load: Load, dilation: float, folder: Path) -> list[str]:
    """A row of the table."""
    place = Place(cores=sorted(os.sched_getaffinity(0)))
    running = Running(arm, str(ensure(CHECKPOINT)), "--is-embedding", place, folder)
    try:
        print(f"{arm.name}: up after {running.start():.0f} s", flush=True)
        embed(running.url, load, -1)
        before, began = spent(running), time.monotonic()
        with ThreadPoolExecutor(load.in_flight) as pool:
            took = sorted(pool.map(lambda n: embed(running.url, load, n), range(load.batches)))
        seconds = time.monotonic() - began
        used = busy(before, spent(running))
    finally:
        running.stop()
    tower = used.encoder_s + used.language_s.pop("tower", 0.0)
    towers = max(1, sum(one.count for one in arm.servers if one.role == "encoder"))
    model = sum(used.language_s.values())
    return [
        arm.title,
        f"{load.batches * load.pages / seconds * dilation:.1f}",
        f"{took[len(took) // 2] / dilation:.2f}",
        f"{tower / towers / seconds:.0%}",
        f"{model / seconds:.0%}",
        f"{used.overrun_s / (tower + model):.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--pages", type=int, default=64, help="of a batch")
    parser.add_argument("--in-flight", type=int, default=2, help="batches")
    parser.add_argument("--size", type=int, default=448, help="of a page, px")
    parser.add_argument("--profile", default="h100-qwen2_5-vl-7b")
    parser.add_argument("--dilate", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "embeddings.md")
    options = parser.parse_args()
    os.environ["SGLANG_EPD_EMULATE"] = options.profile
    os.environ["SGLANG_EPD_EMULATE_DILATE"] = f"{options.dilate:g}"
    folder = Path(tempfile.mkdtemp(prefix="sglang-epd-embeddings-"))
    print("logs:", folder, flush=True)
    load = Load(options.batches, options.pages, options.in_flight, options.size)
    rows = [HEAD]
    for arm in read_all(HERE / "arms", Arm, list(options.arms)):
        rows.append(measure(arm, load, options.dilate, folder))
        print(" | ".join(rows[-1]), flush=True)
    command = " ".join([".venv/bin/python", "benchmark/embeddings.py", *sys.argv[1:]])
    text = (
        f"# Pages a second of a model of embeddings\n\n`{command}`: {machine()}, "
        f"{load.batches} batches of {load.pages} pages of {load.size} px, {load.in_flight} in "
        f"flight; profile `{options.profile}`, dilated {options.dilate:g} times. All times are the "
        f"emulated machines'.\n\n{table(rows)}\n"
    )
    options.out.write_text(text)


if __name__ == "__main__":
    main()
