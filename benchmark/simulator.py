"""What the simulator makes of published comparisons, and how large a fleet it can run.

    .venv/bin/python benchmark/simulator.py [sglang] [vllm] [scale]

Each part replaces its own figures in `results/simulator.json`; without one only the page is
written anew. `--fit` finds the two figures of the vLLM comparison that nothing published gives
(a minute). `benchmark/validate_emulated.py` compares the simulator with real servers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from pages import machine, table

from encoder import RESULTS
from sglang_epd.profile import Profile, load_profile
from sglang_epd.schema import convert, load
from sglang_epd_plan import plots
from sglang_epd_plan.goodput import goodput
from sglang_epd_plan.model import simulate
from sglang_epd_plan.report import Report, Slo
from sglang_epd_plan.topology import parse
from sglang_epd_plan.workload import Traffic, Workload

HERE = Path(__file__).parent / "simulated"
replace = msgspec.structs.replace

SGLANG = "https://lmsys.org/blog/2026-01-12-epd"
VLLM = "https://blog.vllm.ai/2025/12/15/vllm-epd.html"
# The SGLang comparison: 64 requests a run.
SEEDS = 10
RATES = (0.2, 0.4, 0.6, 0.8, 1.0)
ARMS = ("1EPD", "1E1PD", "2E1PD")
# Seconds that a 1080p picture takes in the tower: by the published table, by its FLOP, more.
PICTURES_S = (0.123, 0.2, 0.3, 0.4, 0.5)
PREFILL_PEAKS = (0.5, 0.75)

# The vLLM comparison: (text tokens, images) to goodput of DP4 and of 1E3PD.
PUBLISHED = {(400, 1): (23, 24), (400, 4): (6, 12), (2000, 1): (8, 18), (2000, 4): (4, 8)}
VLLM_SLO = Slo(ttft_s=20.0, tpot_s=0.1)
# Found by `--fit`: what an image costs a server that also decodes, and what an embedding
# costs one that receives it.
FITTED = {"image_s": 0.0916, "received_s": 0.0118}


# SGLang's comparison


def h20(picture_s: float, peak: float, *, keeps: bool = True) -> Profile:
    """The published profile with another time of a picture, and of its prefill at another
    share of the accelerators' peak.

    Args:
        keeps: whether colocated servers keep embeddings, as by SGLang's default for most GPUs.
    """
    profile = load_profile("h20-qwen3-vl-235b")
    patch_s = picture_s / 8160
    language = profile.language
    # By the published table a tower on 4 GPUs takes 0.947 times one on 2.
    tower = replace(language.tower, patch_s=patch_s * 465.80 / 492.13)
    language = replace(
        language,
        tower=tower,
        keeps_embeddings=keeps,
        prefill_token_s=language.prefill_token_s * 0.5 / peak,
        prefill_context_s=language.prefill_context_s * 0.5 / peak,
    )
    encoder = replace(profile.encoder, tower=replace(profile.encoder.tower, patch_s=patch_s))
    return replace(profile, encoder=encoder, language=language)


def _runs(profile: Profile, workload: Workload, arm: str, rate: float) -> dict[str, float]:
    """Means over seeds of 64 requests."""
    runs = [
        simulate(profile, workload, parse(arm), Traffic(rate=rate, requests=64), seed=seed)
        for seed in range(SEEDS)
    ]
    return {
        "ttft_s": statistics.fmean(run.mean("ttft") for run in runs),
        "tpot_s": statistics.fmean(run.mean("tpot") for run in runs),
        "requests_per_s": statistics.fmean(run.throughput for run in runs),
    }


def sglang() -> dict[str, Any]:
    workload = load(HERE / "images-1-to-8.json", Workload)
    published = h20(0.49213 / 4, 0.5)
    rates = {
        arm: [{"rate": rate, **_runs(published, workload, arm, rate)} for rate in RATES]
        for arm in ARMS
    }
    sensitivity = []
    for peak in PREFILL_PEAKS:
        for picture_s in PICTURES_S:
            profile = h20(picture_s, peak)
            arms = {arm: _runs(profile, workload, arm, 1.0) for arm in ARMS}
            sensitivity.append({"picture_s": picture_s, "peak": peak, "arms": arms})
    # Goodput of equal numbers of GPUs, by an SLO of five unloaded requests.
    equal = []
    for picture_s in (0.49213 / 4, 0.3):
        profile = h20(picture_s, 0.75)
        for arm in ("1EPD", "2EPD", "4E1PD", "1E1PD", "2E1PD"):
            found = goodput(
                profile, workload, parse(arm), Slo(ttft_s=10.0, tpot_s=0.2), seconds=600,
                start=0.5, least_requests=300,
            )  # fmt: skip
            gpus = parse(arm).gpus(profile)
            equal.append({"picture_s": picture_s, "arm": arm, "gpus": gpus, "goodput": found.rate})
    # The same with chunks that encode the pictures that they cut once more.
    unkept = _runs(h20(0.49213 / 4, 0.5, keeps=False), workload, "1EPD", 1.0)
    # The same with this package's own bound on received embeddings.
    bounded = replace(published, language=replace(published.language, receive_mb=2048))
    budget = {arm: _runs(bounded, workload, arm, 1.0) for arm in ARMS[1:]}
    return {
        "rates": rates,
        "sensitivity": sensitivity,
        "equal": equal,
        "budget": budget,
        "unkept": unkept,
    }


# vLLM's comparison


def a100(image_s: float | None = None, received_s: float = 0.0) -> Profile:
    """The reckoned profile, or with the two figures that were fitted."""
    profile = load_profile("a100-qwen3-vl-4b")
    if image_s is None:
        return profile
    tower = replace(profile.language.tower, launch_s=0.0, patch_s=image_s / 1600, patch2_s=0.0)
    language = replace(profile.language, tower=tower, received_item_s=received_s)
    return replace(profile, language=language)


def _text_and_images(text: int, images: int) -> Workload:
    kind = {
        "text_tokens": text,
        "output_tokens": 150,
        "items": images,
        "pictures": [{"width": 640, "height": 640}],
    }
    return convert({"name": f"{text} + {images}", "kinds": [kind], "source": VLLM}, Workload, "")


def _goodput(profile: Profile, case: tuple[int, int], arm: str) -> float:
    """A minute and a half of load at each rate."""
    return goodput(
        profile, _text_and_images(*case), parse(arm), VLLM_SLO, seconds=90, start=8.0
    ).rate


def vllm() -> dict[str, Any]:
    profiles = {
        "reckoned": a100(),
        "fitted": a100(FITTED["image_s"], FITTED["received_s"]),
    }
    arms = ("4EPD", "1E3PD", "2E2PD")
    found = {
        name: {
            f"{text} + {images}": {arm: _goodput(profile, (text, images), arm) for arm in arms}
            for text, images in PUBLISHED
        }
        for name, profile in profiles.items()
    }
    return {"goodput": found, "fitted": FITTED}


def fit() -> None:
    """One figure by each arm's goodput at 400 tokens and 4 images."""

    def search(low: float, high: float, wanted: float, at: Callable[[float], float]) -> float:
        while high - low > 2e-4:
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle) > wanted else (low, middle)
        return (low + high) / 2

    alone, apart = PUBLISHED[400, 4]
    image_s = search(0.0, 0.3, alone, lambda one: _goodput(a100(one), (400, 4), "4EPD"))
    received_s = search(
        0.0, 0.1, apart, lambda one: _goodput(a100(image_s, one), (400, 4), "1E3PD")
    )
    print({"image_s": round(image_s, 4), "received_s": round(received_s, 4)})


# A large fleet


def scale(cells: int) -> dict[str, Any]:
    """Ten minutes of so many cells of 25 encoders; 400 are 10,000 encoders."""
    profile = h20(0.3, 0.75)
    workload = load(HERE / "video.json", Workload)
    topology = parse("25E25PD", cells=cells)
    rate = 0.6 * _most(profile, workload) * 25 * cells
    begin, load_average = time.perf_counter(), os.getloadavg()[0]
    worked = time.process_time()
    run = simulate(profile, workload, topology, Traffic(rate=rate, seconds=600))
    seconds = time.perf_counter() - begin
    return {
        "rate": rate,
        "seconds": seconds,
        "processor_s": time.process_time() - worked,
        "cells": cells,
        "load": load_average,
        "requests": run.counted,
        "summary": run.summary(),
    }


def _most(profile: Profile, workload: Workload) -> float:
    """Requests a second of an encoder and a language server, at most: of so few users that none
    waits until its deadline."""
    closed = convert(
        {**msgspec.to_builtins(workload), "arrival": {"kind": "closed", "users": 16}}, Workload, ""
    )
    run: Report = simulate(profile, closed, parse("1E1PD"), Traffic(requests=500))
    return run.throughput


# The page


def _times(value: float) -> str:
    return f"{value:.1f}x"


def _sglang_page(figures: dict[str, Any]) -> str:
    arms = figures["rates"]
    rows = [["rate", "arm", "mean TTFT (s)", "mean TPOT (ms)", "requests/s", "TTFT, 1EPD by it"]]
    for number, rate in enumerate(RATES):
        alone = arms["1EPD"][number]
        for arm in ARMS:
            one = arms[arm][number]
            rows.append(
                [
                    f"{rate}", arm, f"{one['ttft_s']:.2f}", f"{1000 * one['tpot_s']:.0f}",
                    f"{one['requests_per_s']:.3f}", _times(alone["ttft_s"] / one["ttft_s"]),
                ]
            )  # fmt: skip
    swept = [
        [
            "picture in the tower (s)", "prefill, of peak", "TTFT, 1EPD by 1E1PD", "by 2E1PD",
            "TPOT, 1EPD by 1E1PD", "by 2E1PD", "requests/s, 1E1PD by 1EPD", "2E1PD by 1EPD",
        ]
    ]  # fmt: skip
    for one in figures["sensitivity"]:
        alone, first, second = (one["arms"][arm] for arm in ARMS)
        swept.append(
            [
                f"{one['picture_s']}", f"{one['peak']:.0%}",
                *(_times(alone[name] / arm[name]) for name in ("ttft_s", "tpot_s")
                  for arm in (first, second)),
                *(f"{arm['requests_per_s'] / alone['requests_per_s']:.2f}x"
                  for arm in (first, second)),
            ]
        )  # fmt: skip
    equal = [["picture (s)", "arm", "GPUs", "goodput (requests/s)", "a GPU"]]
    for one in figures["equal"]:
        equal.append(
            [
                f"{one['picture_s']:.3f}", one["arm"], f"{one['gpus']:g}",
                f"{one['goodput']:.3f}", f"{one['goodput'] / one['gpus']:.4f}",
            ]
        )  # fmt: skip
    return f"""## SGLang's comparison: one server of TP 4 against 1E1P and 2E1P

Source: {SGLANG}. 8 H20, Qwen3-VL-235B-A22B-FP8, 64 requests of 1 to 8 pictures of 1080p,
128 tokens in and 256 out at most, 0.2 to 1 request a second; a ViT of 492.13 ms (TP 2) and
465.80 ms (TP 4) for 4 images, measured with another model at a size that is not told.
Published: TTFT 6 to 8 times lower, TPOT 8 to 10 times lower, throughput about double, at 1
request a second. All else in the profile (`h20-qwen3-vl-235b`) is reckoned from vendors'
figures, and says so. Here P of 1E1P prefills and decodes (1E1PD). Means over {SEEDS} seeds.

With the published 123 ms a picture:

{table(rows)}

A colocated server that keeps no embeddings, as SGLang 0.5.23 with this model on this GPU unless
`SGLANG_VLM_CACHE_SIZE_MB` is set, encodes a picture once more for each chunk of its prompt: at
1 request a second its mean TTFT is {figures["unkept"]["ttft_s"]:.2f} s,
{_times(figures["unkept"]["ttft_s"] / arms["1E1PD"][-1]["ttft_s"])} and
{_times(figures["unkept"]["ttft_s"] / arms["2E1PD"][-1]["ttft_s"])} those of 1E1PD and 2E1PD.
Whether the published one kept them is not told; all else here is of servers that do.

With other times of a picture, and the prefill at another share of the peak, at 1 request a
second (by its FLOP the model's own tower takes some 0.2 s for a picture of 1080p at half of
one H20's peak):

{table(swept)}

![ratio of TTFT](simulator-sglang.svg)

{_SGLANG_READING}

`SGLANG_EPD_RECEIVE_BUDGET_MB` would give way first here: an embedding of this model is 32 KiB a
token (deepstack included), 300 MB a request, and stays until its answer ends. With the default
of 2048 the same requests at 1 a second have a mean TTFT of
{figures["budget"]["1E1PD"]["ttft_s"]:.1f} s (1E1PD) and
{figures["budget"]["2E1PD"]["ttft_s"]:.1f} s (2E1PD), in place of
{arms["1E1PD"][-1]["ttft_s"]:.1f} s and
{arms["2E1PD"][-1]["ttft_s"]:.1f} s.

What equal numbers of GPUs give (p99 TTFT within 10 s and TPOT within 200 ms, prefill at 75%):

{table(equal)}
"""


def _vllm_page(figures: dict[str, Any]) -> str:
    rows = [["text + images", "arm", "published", "reckoned", "fitted"]]
    ratios = [["text + images", "published", "reckoned", "fitted", "2E2PD by DP4, fitted"]]
    found = figures["goodput"]
    for (text, images), published in PUBLISHED.items():
        case = f"{text} + {images}"
        reckoned, fitted = found["reckoned"][case], found["fitted"][case]
        for arm, told in zip(("4EPD", "1E3PD"), published, strict=True):
            rows.append([case, arm, f"{told}", f"{reckoned[arm]:.1f}", f"{fitted[arm]:.1f}"])
        ratios.append(
            [
                case,
                f"{published[1] / published[0]:.2f}x",
                *(f"{one['1E3PD'] / one['4EPD']:.2f}x" for one in (reckoned, fitted)),
                f"{fitted['2E2PD'] / fitted['4EPD']:.2f}x",
            ]
        )
    return f"""## vLLM's comparison: four servers (DP4) against 1E3PD

Source: {VLLM}. 4 A100, Qwen3-VL-4B, 640 x 640 pictures of 400 tokens each, 150 tokens out,
goodput by p99 TTFT of 20 s and p99 TPOT of 100 ms, rates from 4 to 24. Both arms have 4 GPUs,
so this comparison is at equal counts. No times of single steps are published. `reckoned` takes
them from FLOP and bandwidth (profile `a100-qwen3-vl-4b`). `fitted` takes two figures from two
of the eight goodputs, those at 400 tokens and 4 images, and predicts the other six: an image
costs a server that does everything {1000 * figures["fitted"]["image_s"]:.0f} ms (by its FLOP
{1000 * _reckoned_image_s():.0f} ms), an embedding one that receives it
{1000 * figures["fitted"]["received_s"]:.0f} ms.

{table(rows)}

1E3PD by DP4:

{table(ratios)}

![goodput](simulator-vllm.svg)

{_VLLM_READING}
"""


def _reckoned_image_s() -> float:
    return a100().language.tower.seconds([(1600.0, 1)])


def _scale_page(runs: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            "encoders", "requests", "seconds", "requests/s", "processor time (s)",
            "load average", "TTFT p50 (s)", "p99", "encoders busy",
        ]
    ]  # fmt: skip
    for one in sorted(runs.values(), key=lambda one: one["cells"]):
        ttft = one["summary"]["ttft_ms"]
        rows.append(
            [
                f"{25 * one['cells']:,}", f"{one['requests']:,}", f"{one['seconds']:.0f}",
                f"{one['requests'] / one['seconds']:.0f}",
                f"{one['processor_s']:.0f}", f"{one['load']:.1f}",
                f"{ttft['p50'] / 1000:.1f}", f"{ttft['p99'] / 1000:.1f}",
                f"{one['summary']['busy']['encode']:.0%}",
            ]
        )  # fmt: skip
    return f"""## 10,000 encoders

Cells of 25 encoders and 25 servers that prefill and decode, `affinity`, ten minutes of videos of
64 frames of 720p at 60% of what they can do; `scale`: 400 cells, one after the other in one
process, and `--cells 40`. The load average is that of the {os.cpu_count()} cores when a run began:
what else they had to do.

{table(rows)}

{_scale_aim(runs)} Cells do not see each other: a policy knows the 25 encoders of its own.
"""


def _scale_aim(runs: dict[str, dict[str, Any]]) -> str:
    whole = runs.get("400")
    if whole is None:
        return "The aim for 10,000 encoders is five minutes; this was not run."
    judged = "met" if whole["seconds"] < 300 else "missed"
    return (
        f"The aim for 10,000 encoders is five minutes: {judged}, with {whole['seconds']:.0f} s "
        f"({whole['processor_s']:.0f} s of processor time) at a load average of "
        f"{whole['load']:.1f} as it began."
    )


_SGLANG_READING = """Read: with the published ViT the order is right and the factors are too
small, because four and a half pictures of 116 ms are a third of what a request costs a server
of TP 4; the rest is the prefill of 9,300 tokens, which all arms pay. With the 0.2 to 0.3 s that
a picture of 1080p comes to, 2E1P has the published TTFT (6 to 8 times lower) or better, nearly
the throughput (about double), and, with a prefill at 75% of the peak, the TPOT (8 to 10 times
lower) or better. 1E1P has not: at 0.3 s a picture one encoder would need 1.35 s a request at 1
request a second. What was published of 1E1P alone is in plots, whose values are not in the
text."""
_VLLM_READING = """Read: reckoned from FLOP and bandwidth, DP4 does two to three times what was
published, and 1E3PD does not pay at equal counts: a quarter of the GPUs would encode, which is
a smaller part of the work. So the published gain comes from something that an image costs a
server that also decodes, beyond arithmetic. Given that one cost (and that of receiving an
embedding), DP4 is within a quarter of the published figure at 400 + 1 and 2000 + 4 and half too
high at 2000 + 1; 1E3PD is near at 2000 + 4, above the rates that were tried at 400 + 1, and a
third too low at 2000 + 1: 18 requests of 2,400 tokens on three GPUs are 14,400 tokens a second
on each beside decoding, nearly all that the profile's prefill can do (17,200). So four images
are reproduced, and long text with one image is not. 2E2PD would have been worse than 1E3PD
everywhere."""


def page(figures: dict[str, Any]) -> str:
    parts = [
        "# The simulator: published comparisons, and size\n",
        f"`.venv/bin/python benchmark/simulator.py sglang vllm scale`: {machine()}. What is "
        "modelled and what is not: [docs/planner.md](../../docs/planner.md).\n",
    ]
    for name, make in (
        ("sglang", _sglang_page),
        ("vllm", _vllm_page),
        ("scale", _scale_page),
    ):
        if name in figures:
            parts.append(make(figures[name]))
    return "\n".join(parts)


def draw(figures: dict[str, Any], folder: Path) -> None:
    if "sglang" in figures:
        series = {
            f"{arm}, prefill at {peak:.0%} of peak": [
                (
                    one["picture_s"],
                    one["arms"]["1EPD"]["ttft_s"] / one["arms"][arm]["ttft_s"],
                )
                for one in figures["sglang"]["sensitivity"]
                if one["peak"] == peak
            ]
            for arm in ARMS[1:]
            for peak in PREFILL_PEAKS
        }
        path = folder / "simulator-sglang.svg"
        plots.lines(path, series, "seconds a picture takes in the tower, TTFT of 1EPD by it")
    if "vllm" in figures:
        groups = {}
        for (text, images), (alone, apart) in PUBLISHED.items():
            case = f"{text} + {images}"
            fitted = figures["vllm"]["goodput"]["fitted"][case]
            groups[case] = {
                "DP4, published": float(alone),
                "DP4, fitted": fitted["4EPD"],
                "1E3PD, published": float(apart),
                "1E3PD, fitted": fitted["1E3PD"],
            }
        plots.bars(folder / "simulator-vllm.svg", groups, "goodput (requests/s)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="sglang|vllm|scale")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--cells", type=int, default=400, help="of scale")
    parser.add_argument("--out", type=Path, default=RESULTS / "simulator.md")
    options = parser.parse_args()
    unknown = set(options.parts) - {"sglang", "vllm", "scale"}
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if options.fit:
        fit()
        return
    kept = options.out.with_suffix(".json")
    figures: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "sglang": sglang, "vllm": vllm, "scale": lambda: scale(options.cells),
    }  # fmt: skip
    for part in options.parts:
        figures[part] = makers[part]()
        # Others may have written meanwhile.
        current = json.loads(kept.read_text()) if kept.exists() else {}
        if part == "scale":
            current.setdefault(part, {})[str(options.cells)] = figures[part]
        else:
            current[part] = figures[part]
        kept.write_text(json.dumps(current, indent=1) + "\n")
        figures = current
    draw(figures, options.out.parent)
    options.out.write_text(page(figures))
    print(options.out)


if __name__ == "__main__":
    main()
