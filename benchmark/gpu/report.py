"""Makes a page of what `run.py` left.

    python benchmark/gpu/report.py DIR [DIR ...] [--out benchmark/results/gpu.md]

A part that several folders have counts as it is in the last of them. Beside the page goes a
JSON file with the figures; given in place of a folder, it gives the same page again. What a
reader made of a part is in that file, too: its `read`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

BENCHMARK = Path(__file__).resolve().parents[1]
if not __package__:  # a program; in the tests encoder.py there would hide theirs
    sys.path.append(str(BENCHMARK))

from pages import table  # noqa: E402

from gpu.run import MORE, PARTS  # noqa: E402

# Of `serve.py`, that head its tables.
STEPS = ("parity", "ttft-8b")
# What the columns of a part's tables are; of `copies` and `peers` the figures are kept.
READ = {
    "copies": "GB are of 10^9 bytes; medians of 7. Registering is `cudaHostRegister` of a memfd.",
    "peers": "An embedding of 67 MB, of a 1080p picture in Qwen3-VL-8B. Times in milliseconds.",
    "engine": (
        "*Launch* is the host's time for a pass, *kernels* the device's where all of it was "
        "launched before it began, *alone* the device's where the host launches meanwhile; a "
        "pass *waits* where the host has to wait for the device within it. *Busy* is the share "
        "of time in which a pass was on the device; a pass in which the device waits for "
        "launches counts in full. Host milliseconds are processor time, of all threads and "
        "children."
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("made", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=BENCHMARK / "results" / "gpu.md")
    options = parser.parse_args()
    parts: dict[str, Any] = {}
    for path in options.made:
        parts |= read(path)
    options.out.write_text(page(parts))
    options.out.with_suffix(".json").write_text(json.dumps(parts) + "\n")


def read(path: Path) -> dict[str, Any]:
    """The parts in a folder, or in a file that this program wrote."""
    if path.is_file():
        made: dict[str, Any] = json.loads(path.read_text())
        return made
    return {file.stem: json.loads(file.read_text()) for file in sorted(path.glob("*.json"))}


def page(parts: dict[str, Any]) -> str:
    """The page of some parts, by their names."""
    told = [["part", "came to", "seconds", "figures"]]
    texts = []
    for name, part in parts.items():
        headline = str(part.get("headline", "")).replace("|", "/")
        told.append([name, part["status"], f"{part['seconds']:.0f}", headline])
        if part.get("tables") or "read" in part:
            texts.append(_section(name, part))
    machines: dict[str, list[str]] = {}
    for name, part in parts.items():
        if "machine" in part:
            machines.setdefault(_machine(part["machine"]), []).append(name)
    places = " ".join(f"{', '.join(names)}: {where}" for where, names in machines.items())
    return f"""# One GPU

`python benchmark/gpu/run.py --out DIR`, and `benchmark/gpu/report.py DIR`. {places}

{table(told)}

{chr(10).join(texts)}"""


def _machine(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {one}" for name, one in facts["versions"].items())
    gpu = ""
    if "gpu" in facts:
        driver = facts["nvidia_smi"].partition(": ")[2].split(",")[0]
        gpu = f"{facts['gpu']} of {facts['gpu_memory_gib']} GiB, driver {driver}, "
    return (
        f"{gpu}{facts['cores']} cores, {facts['memory_gib']} GiB, {facts['system']}; "
        f"Python {facts['python']}, {versions}."
    )


def _section(name: str, part: dict[str, Any]) -> str:
    lines = [f"## {name}", ""]
    if name in PARTS | MORE:
        lines += [f"`python benchmark/gpu/run.py --out DIR --parts {name}`", ""]
    elif "machine" in part:
        lines += [f"`{part['machine']['command']}`", ""]
    kind = "engine" if name.startswith("engine") else name
    if kind in READ:
        lines += [READ[kind], ""]
    if "read" in part:
        lines += [f"Read: {part['read']}", ""]
    for title, rows in part.get("tables", {}).items():
        # Several parts have the same steps of `serve.py`.
        step, _, rest = title.partition(": ")
        lines += [f"### {name}: {rest}" if step in STEPS else f"### {title}", "", table(rows), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
