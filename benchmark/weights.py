"""What encoder-only and language-only servers hold of a checkpoint.

    .venv/bin/python benchmark/weights.py             # ours
    .venv/bin/python benchmark/weights.py --in-tree   # also SGLang's own EPD

Beside them a server that does everything. Each checkpoint's language model is ten times its
tower, and lies in several files. Of Qwen2-VL in-tree EPD builds the language model on encoders,
too, of Qwen2.5-VL it does not. What a server of it takes more than one of a tiny
checkpoint of the same family, whose fixed cost is the same, is compared with the weights
that it needs. Fails where ours take 1.3 times those or more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import requests
from main_job import first_token_s, memory_mb, picture
from pages import machine, table
from safetensors import safe_open

from make_checkpoint import ensure
from sglang_epd.cli.processes import ServerProcess, free_port
from sglang_epd.namespace import of_language_model

FAMILIES = ("qwen2-vl", "qwen2_5-vl")
ARMS = {"sglang-epd": {}, "in-tree EPD": {"SGLANG_EPD": "off"}}
ONE_SERVER = "one server"
START_TIMEOUT_S = 400.0
BOUND = 1.3
# The KV cache is not what is weighed.
LANGUAGE = ("--max-total-tokens", "512", "--max-running-requests", "1", "--enable-metrics")


@dataclass
class Weighed:
    """A server's memory after its first request, and the weights that it says it holds."""

    memory_mb: float
    said_mb: float | None


@contextmanager
def server(
    role: str, model: str, arm: str, logs: Path, *flags: str
) -> Iterator[tuple[ServerProcess, str]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(ensure(model))]
    command += ["--dtype", "float32", "--port", str(port), *flags]
    process = ServerProcess(
        role,
        command,
        log_path=logs / f"{arm}-{model}-{role}.log",
        ready_url=f"{url}/health",
        env={**os.environ, "SGLANG_VLM_CACHE_SIZE_MB": "0", **ARMS.get(arm, {})},
    )
    process.start()
    try:
        yield process, url
    finally:
        process.stop()


def weigh(model: str, arm: str, logs: Path) -> dict[str, Weighed]:
    """An encoder and a language server of a checkpoint, or the one that does everything,
    after one picture."""
    if arm == ONE_SERVER:
        with server("whole", model, arm, logs, *LANGUAGE) as (whole, url):
            whole.wait_ready(START_TIMEOUT_S)
            first_token_s(url, [picture(0, 224)])
            return {"whole": Weighed(memory_mb(whole), None)}
    with server("encoder", model, arm, logs, "--encoder-only") as (encoder, encoder_url):
        flags = ["--language-only", "--encoder-urls", encoder_url, *LANGUAGE]
        flags += ["--encoder-bootstrap-port", str(free_port())]
        with server("language", model, arm, logs, *flags) as (language, language_url):
            for process in (encoder, language):
                process.wait_ready(START_TIMEOUT_S)
            first_token_s(language_url, [picture(0, 224)])
            # Encoders give free memory back once they have been idle for a while.
            time.sleep(15.0)
            said: dict[str, float | None] = {"encoder": None, "language": None}
            if arm == "sglang-epd":
                status = requests.get(f"{encoder_url}/v1/status", timeout=30).json()
                said["encoder"] = status["weights_bytes"] / 1e6
                said["language"] = metric(language_url, "sglang:epd_language_weights_bytes") / 1e6
            return {
                "encoder": Weighed(memory_mb(encoder), said["encoder"]),
                "language": Weighed(memory_mb(language), said["language"]),
            }


def metric(url: str, name: str) -> float:
    """The one value of a metric."""
    lines = requests.get(f"{url}/metrics", timeout=30).text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def tensors_mb(model: str) -> dict[str, float]:
    """The checkpoint's weights by the server that needs them, and its files."""
    files = sorted(ensure(model).glob("*.safetensors"))
    found = {"encoder": 0.0, "language": 0.0}
    for file in files:
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no mapping)
                tensor = weights.get_tensor(name)
                role = "language" if of_language_model(name) else "encoder"
                found[role] += tensor.numel() * tensor.element_size() / 1e6
    return found | {"whole": sum(found.values()), "files": len(files)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--in-tree", action="store_true", help="next to SGLang's own")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/weights.md")
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-weights-"))
    head = ["model", "server", "arm", "its weights (MB)", "memory (MB)", "of a tiny one (MB)"]
    rows = [[*head, "more, of its weights", "says it holds (MB)"]]
    failed = False
    arms = [*(ARMS if options.in_tree else ["sglang-epd"]), ONE_SERVER]
    for family, arm in itertools.product(FAMILIES, arms):
        heavy, tiny = (tensors_mb(f"{size}-{family}") for size in ("heavy", "tiny"))
        large, small = (weigh(f"{size}-{family}", arm, logs) for size in ("heavy", "tiny"))
        for role in large:
            ratio = (large[role].memory_mb - small[role].memory_mb) / (heavy[role] - tiny[role])
            failed |= arm == "sglang-epd" and ratio >= BOUND
            said = large[role].said_mb
            figures = [heavy[role], large[role].memory_mb, small[role].memory_mb]
            shown = [f"{one:.0f}" for one in figures]
            shown += [f"{ratio:.2f}", "" if said is None else f"{said:.0f}"]
            rows.append([f"heavy-{family}", role, arm, *shown])
    command = " ".join([".venv/bin/python", "benchmark/weights.py", *sys.argv[1:]])
    page = "\n".join(
        [
            "# Weights\n",
            "What a server with one part of a checkpoint holds of it: proportional set size of "
            "all its processes after one picture, less that of a server of a tiny checkpoint, "
            f"over the weights that it needs. The bound is {BOUND}.\n",
            f"`{command}`: {machine()}, "
            f"{psutil.virtual_memory().total / 1e9:.0f} GB, sglang {version('sglang')}, "
            f"torch {version('torch')}; in float32.\n",
            table(rows),
            "",
        ]
    )
    options.out.write_text(page)
    print(page)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
