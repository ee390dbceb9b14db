"""Runs the kit's parts one after the other, each in a process with a time limit of its own.

    python benchmark/gpu/run.py --out DIR [--parts device,engine] [--minutes 9] [--device cpu]

A part that fails, or is ended at its limit, does not keep the next ones from running. DIR gets
a JSON file for each part, with its figures and how it ended, and `logs.txt` with the output of
all of them: few files, none of which is large. The last lines printed are a table of parts.
`report.py DIR` makes a page of DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPU = Path(__file__).resolve().parent
ROOT = GPU.parents[1]
if not __package__:  # a program; in the tests encoder.py there would hide theirs
    sys.path.append(str(GPU.parent))

from gpu.results import aligned  # noqa: E402

# Of one part's output in logs.txt, half from its beginning and half from its end.
_LOG_BYTES = 2 << 20
_END_S = 10.0
_PYTEST = ("-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-q", "-s")
_OWN = ("--json", "{json}", "--device", "{device}", "--minutes", "{minutes}")


@dataclass(frozen=True)
class Part:
    """A part of the kit.

    Attributes:
        command: after `python`. `{json}`, the file for its results, `{device}` and
            `{minutes}` are put in, and `{work}`, a folder that is gone afterwards but for
            its logs and, in place of the first, its one JSON file.
        minutes: that it is told to take; it is ended half a minute, or a quarter, after them.
        tiny: what `--tiny` adds to the command.
    """

    command: tuple[str, ...]
    minutes: float
    tiny: tuple[str, ...] = ()

    @property
    def limit_s(self) -> float:
        return 60 * self.minutes + max(30.0, 15 * self.minutes)


def script(name: str) -> str:
    return str(GPU / name)


_ENGINE = (script("tower.py"), *_OWN)
_FEW = ("--arms", "few")
_7B = ("--shape", "qwen2.5-vl-7b")
_SERVE = (script("serve.py"), "--out", "{work}", *_OWN[2:], "--steps")
_TINY = ("--tiny",)

_EARLY = ("--arms", "sglang-epd", "early off", "--cells", "4 x 1080p", "4 x 448")
_ONE = ("--arms", "one", "one, CUDA IPC", "--cells", "4 x 1080p", "1 x 1080p", "1 x 448")

# In the order in which they run, unless `--parts` has another.
PARTS = {
    "device": Part((*_PYTEST, script("test_device.py")), 2.0),
    "uploads": Part((script("uploads.py"), *_OWN), 2.0, _TINY),
    "engine": Part((*_ENGINE, *_FEW), 2.0, _TINY),
    "parity": Part((*_SERVE, "parity", "--rounds", "2"), 3.0),
    "ttft": Part((*_SERVE, "ttft-8b"), 5.0),
    "early": Part((*_SERVE, "ttft-8b", "--alone", *_EARLY), 2.5),
    "one": Part((*_SERVE, "ttft-8b", "--alone", *_ONE), 2.5),
    "graphs": Part((*_ENGINE, "--arms", "graphs"), 1.5, _TINY),
}
# Where they are asked for.
MORE = {
    "engine-all": Part(_ENGINE, 3.5, _TINY),
    "engine-7b": Part((*_ENGINE, *_FEW, *_7B), 2.0, _TINY),
    "serve": Part(_SERVE[:-1], 9.0),
}


def main() -> None:
    known = PARTS | MORE
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(known)}")
    parser.add_argument("--minutes", type=float, default=22.0, help="of all parts together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no parts: {', '.join(unknown)}; there are {', '.join(known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "logs.txt").write_text("")
    end = time.monotonic() + 60 * options.minutes
    ended = {name: run(name, options, end) for name in names}
    rows = [["part", "came to", "seconds", "figures"]]
    for name, told in ended.items():
        rows.append([name, told["status"], f"{told['seconds']:.0f}", told.get("headline", "")])
    print(f"\n{aligned(rows)}", flush=True)
    sys.exit(any(told["status"] != "ok" for told in ended.values()))


def run(name: str, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """Run a part, and write what came of it.

    Args:
        end: of all parts, by `time.monotonic`.

    Returns:
        What its file has.
    """
    part = (PARTS | MORE)[name]
    path, log = options.out / f"{name}.json", options.out / f"{name}.log"
    path.unlink(missing_ok=True)
    left_s = end - time.monotonic()
    if left_s < 15.0:
        return _note(path, {"part": name, "status": "no time left", "seconds": 0.0})
    limit_s = min(part.limit_s, left_s)
    # Half a minute to end by itself, unless there is less.
    minutes = min(part.minutes, max(0.1, left_s / 60 - 0.5))
    work = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    told = {"json": path, "device": options.device, "minutes": f"{minutes:.2f}", "work": work}
    words = [word.format(**told) for word in part.command]
    command = [sys.executable, *words, *(part.tiny if options.tiny else ())]
    print(f"{name}: at most {limit_s:.0f} s", flush=True)
    began = time.monotonic()
    path_of_imports = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path_of_imports)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = "ok" if process.wait(limit_s) == 0 else f"failed ({process.returncode})"
        except subprocess.TimeoutExpired:
            status = "time limit"
        finally:
            _end(process)
    text = log.read_text(errors="replace")
    lines = text.strip().splitlines()
    print(text[-2000:] if status != "ok" else f"{name}: ok", flush=True)
    with (options.out / "logs.txt").open("a") as logs:
        logs.write(f"===== {name}: {' '.join(command)}\n{_shortened(text, _LOG_BYTES)}\n")
        for other in sorted(work.rglob("*.log")):
            said = _shortened(other.read_text(errors="replace"), _LOG_BYTES // 16)
            logs.write(f"===== {name}, {other.name}\n{said}\n")
    log.unlink()
    if not path.exists() and (others := list(work.glob("*.json"))):
        shutil.copy(others[0], path)
    shutil.rmtree(work)
    made = json.loads(path.read_text()) if path.exists() else {"part": name}
    if not made.get("headline"):
        made["headline"] = lines[-1] if lines else ""
    seconds = time.monotonic() - began
    return _note(path, made | {"status": status, "seconds": seconds})


def _end(process: subprocess.Popen[bytes]) -> None:
    """A part and what it has started, which are a session of their own."""
    for way in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, way)
        except ProcessLookupError:
            break
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


def _note(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    path.write_text(json.dumps(told, indent=1) + "\n")
    return told


if __name__ == "__main__":
    main()
