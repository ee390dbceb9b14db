"""README's rows again, those that need no GPU: a short run of each benchmark behind them, and
each row beside the one that README quotes.

    benchmark/readme.py [--only chaos serving] [--out FOLDER]

The runs are shorter than those of `results/`, so figures scatter more, and nothing there is
written: the pages are in FOLDER, with the logs of the runs.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

from claims import RESULTS, named, rows  # noqa: E402

COMMANDS = {
    "chaos": "chaos.py --minutes 1",
    "conversations": "conversations.py --rounds 1 --at-once 1",
    "repeats": "compare.py --arms colocated in-tree-1e1p in-tree-1e1p-unbatched epd-1e1p "
    "--workloads repeats --rounds 1",
    "serving": "serving.py --rounds 1",
}


def quoted(result: str) -> list[str]:
    """The words of the rows that README takes figures from, each once."""
    entries = named((ROOT / "README.md").read_text())
    return list(
        dict.fromkeys(word for (of, _), every in entries.items() if of == result for word in every)
    )


def beside(result: str, page: str) -> Iterator[str]:
    """Each row that README quotes, as it is in the results and as it is now; a row that the
    shorter run does not have is left out."""
    for words in quoted(result):
        now = [row.text for row in rows(page) if row.has(words)]
        kept = [row for row in rows((RESULTS / f"{result}.md").read_text()) if row.has(words)]
        if now:
            head = kept[0].above.splitlines()[-1]
            yield f"         {head}\n  README {kept[0].text}\n  now    {now[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="sglang-epd-readme-"))
    out.mkdir(parents=True, exist_ok=True)
    print(f"pages and logs: {out}", flush=True)
    failed = []
    for name in options.only:
        script, *flags = shlex.split(COMMANDS[name])
        page = out / f"{name}.md"
        command = [sys.executable, str(ROOT / "benchmark" / script), *flags, "--out", str(page)]
        begin = time.monotonic()
        with (out / f"{name}.log").open("w") as log:
            ended = subprocess.run(command, stdout=log, stderr=log, check=False)
        print(f"\n{name}: {COMMANDS[name]}, {time.monotonic() - begin:.0f} s", flush=True)
        if ended.returncode:
            failed.append(name)
            print(f"  ended with {ended.returncode}: see {name}.log", flush=True)
        else:
            print(*beside(name, page.read_text()), sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
