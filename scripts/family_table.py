#!/usr/bin/env python3
"""Keeps docs/families.json, the results of the family tests, and the page made of it.

scripts/family_table.py results.xml     # adds what pytest's JUnit file has
scripts/family_table.py                 # only writes the page anew
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent))

from checkpoints.families import FAMILIES
from checkpoints.family import AUDIO, IMAGE, VIDEO, Family

DOCS = Path(__file__).parents[1] / "docs"
BACKENDS = ("zmq_to_scheduler", "zmq_to_tokenizer", "mooncake")
# The modality of a case is the first of these that its name has.
_WORDS = {"all three": "mixed", " and ": "mixed", "image": IMAGE, "video": VIDEO, "sound": AUDIO}
# What in-tree EPD allows and no checkpoint is made of, and why.
NOT_MADE = {
    "Qwen2_5OmniForConditionalGeneration": (
        "SGLang 0.5.23 has no class of that name; given one, it tries its backend for models of "
        "`transformers`, where `AutoModel.from_config` raises `ValueError: Unrecognized "
        "configuration class <class '...Qwen2_5OmniConfig'> for this kind of AutoModel`"
    ),
}
_VERSIONS = ("sglang", "transformers", "torch")
_HEAD = (
    "# Families\n\n"
    "Which model families were compared with a colocated server, and how far their "
    "log-probabilities were apart. Made by `scripts/families` from the results of "
    "`test/integration/test_families.py`; edit neither this page nor `families.json`.\n\n"
    "Each family is a small random checkpoint (`scripts/checkpoints/families/`; without weights "
    "where SGLang stops before it reads any), served on a CPU in float32 by an encoder and a "
    "language server with each transfer backend.\n\n"
    "- *A cell* has the number of cases that passed, and the largest difference between the "
    "log-probabilities, over the 20 likeliest tokens at each of 16 positions. The bound is 0.001.\n"
    "- *Depends* is by how much the log-probabilities of the first token change when the item is "
    "exchanged for another. Without it parity would prove nothing.\n"
)
_PROMPTS = (
    "## Prompts\n\n"
    "Prompts need no weights. `test/families/test_in_tree.py` compares token ids, places, rotary "
    "positions and preprocessed features of every family that in-tree EPD lists: as this package, "
    "as in-tree EPD and as a colocated server make them. The cases are images side by side, in "
    "text, in token ids that no tokenizer makes, not square, with an alpha channel and with an "
    "EXIF orientation, several videos, audio, "
    "and options of items. Each is equal to a colocated server's, or refused. These families "
    "differ:\n\n"
    "| family | in-tree EPD | this package |\n|---|---|---|\n"
    "| Dots3-Note | answers no request with media | images, in prompts that are text |\n"
    "| GLM-5-Next | no rotary positions; videos without the times and marks of frames; images "
    "neither turned nor laid over a background "
    "| as a colocated server, with options of videos; refuses other options, bounds on the tokens "
    "of one of several videos, and several videos that a colocated server would make smaller |\n"
    "| InternS2-Preview | fails on videos, as a colocated server does | takes no videos |\n"
    "| Kimi-K3 | drops the transparency of an image, which a colocated server lays over a "
    "background | as in-tree EPD |\n"
    "| MiMo-V2 | fails on a video with sound, and on one with options; follows none of images "
    "| refuses both |\n"
    "| MiniMax-M3 | a video's first time is tokenized apart from the text before it | as a "
    "colocated server, with options of items |\n"
    "| Qwen2.5-VL | videos at other positions | as a colocated server |\n"
    "| Qwen3-Omni-MoE | videos of another size | as a colocated server |\n"
)
_CARRIED = (
    "With processors or a configuration that were written for the tests "
    "(`scripts/checkpoints/remote/`), because the family's own are code that is published with "
    "its weights: "
)


def modality_of(case: str) -> str:
    """What a case of the family tests has in it: image, video, audio or mixed."""
    return next(modality for word, modality in _WORDS.items() if word in case)


def add(records: dict[str, Any], results: Path) -> None:
    """Put the tests of a JUnit file into `records`, in place of what they had there."""
    versions = {name: version(name) for name in _VERSIONS}
    for test in ElementTree.parse(results).iter("testcase"):
        told = {one.attrib["name"]: one.attrib["value"] for one in test.iter("property")}
        if "family" not in told:
            continue
        passed = test.find("failure") is None and test.find("error") is None
        if "stopped" in told:
            stopped = told["stopped"] if passed else "no longer as it was: see the test"
            records[told["family"]] = {"versions": versions, "stopped": stopped}
            continue
        record = records.setdefault(told["family"], {})
        record["versions"] = versions
        record.pop("stopped", None)
        if "modality" in told:
            change = float(told["change"]) if passed else None
            record.setdefault("depends", {})[told["modality"]] = change
        else:
            cases = record.setdefault("parity", {}).setdefault(told["backend"], {})
            cases[told["case"]] = _outcome(test, told, passed)


def _outcome(test: ElementTree.Element, told: dict[str, str], passed: bool) -> dict[str, Any]:
    skipped = test.find("skipped")
    if skipped is not None:
        return {"without": skipped.get("message")}
    distance = told.get("distance")
    return {"passed": passed} | ({"distance": float(distance)} if distance else {})


def page(records: dict[str, Any]) -> str:
    """The page, as Markdown."""
    lines = [_HEAD, "| family | modality | " + " | ".join(BACKENDS) + " | depends |"]
    lines.append("|---|---|" + "---|" * (len(BACKENDS) + 1))
    notes, stopped = [], []
    for name in sorted(records):
        record = records[name]
        if "stopped" in record:
            stopped.append(f"| {_title(name)} | `{record['stopped']}` |")
            continue
        parity = record.get("parity", {})
        for modality in (IMAGE, VIDEO, AUDIO, "mixed"):
            cells = [_cell(parity.get(backend, {}), modality) for backend in BACKENDS]
            if any(cells):
                depends = _depends(record.get("depends", {}), modality)
                shown = " | ".join(cell or "not run" for cell in cells)
                lines.append(f"| {_title(name)} | {modality} | {shown} | {depends} |")
        without = {
            f"{_title(name)}, {case}: {outcome['without']}"
            for cases in parity.values()
            for case, outcome in cases.items()
            if "without" in outcome
        }
        notes += sorted(without)
    if notes:
        lines += ["", "Not compared:", "", *(f"- {note}" for note in notes)]
    if stopped:
        lines += ["", "## Not served on a CPU", ""]
        lines += ["| family | the call that stops SGLang, and its error |", "|---|---|", *stopped]
    lines += ["", _PROMPTS.rstrip()]
    carrying = [family.title for family in FAMILIES.values() if family.carried]
    lines += ["", _CARRIED + ", ".join(carrying) + "."]
    waiting = [family for family in FAMILIES.values() if family.name not in records]
    if waiting:
        lines += ["", "Made, and not yet run by the tests:", "", *map(_waiting, waiting)]
    lines += ["", "Allowed by in-tree EPD, and not made:", ""]
    lines += [f"- {name}: {NOT_MADE[name]}" for name in sorted(NOT_MADE)]
    lines += ["", "## Versions", "", "Of the last run of each:", ""]
    families: dict[str, list[str]] = {}
    for name in sorted(records):
        told = ", ".join(f"{k} {v}" for k, v in sorted(records[name]["versions"].items()))
        families.setdefault(told, []).append(_title(name))
    lines += [f"- {told}: {', '.join(families[told])}" for told in sorted(families)]
    return "\n".join(lines) + "\n"


def _waiting(family: Family) -> str:
    stop = f": said to stop at `{': '.join(family.stopped)}`" if family.stopped else ""
    return f"- {family.title}{stop}"


def _title(name: str) -> str:
    return FAMILIES[name].title


def _depends(changes: dict[str, float | None], modality: str) -> str:
    if modality not in changes:
        return ""
    change = changes[modality]
    return "**failed**" if change is None else f"{change:.2g}"


def _cell(cases: dict[str, dict[str, Any]], modality: str) -> str:
    ran = [o for c, o in cases.items() if modality_of(c) == modality and "passed" in o]
    if not ran:
        return ""
    failed = sum(not outcome["passed"] for outcome in ran)
    if failed:
        return f"**{failed} of {len(ran)} failed**"
    return f"{len(ran)}: {max(outcome['distance'] for outcome in ran):.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", help="a JUnit file of pytest")
    options = parser.parse_args()
    file = DOCS / "families.json"
    records = json.loads(file.read_text()) if file.exists() else {}
    if options.results:
        add(records, options.results)
    # A family that is gone leaves the page.
    records = {name: records[name] for name in sorted(records) if name in FAMILIES}
    file.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    (DOCS / "families.md").write_text(page(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
