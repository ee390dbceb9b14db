from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sglang_epd.cli.console import LineReporter


def reported(*, logs: bool) -> str:
    out = Console(file=io.StringIO(), width=40, highlight=False, markup=False)
    reporter = LineReporter(out, ["encoder-0", "router"], logs=logs)
    reporter.news("encoder-0", "started, pid 7")
    reporter.tick({"encoder-0": "importing", "router": "pending"})
    reporter.line("encoder-0", "a [bold]line[/bold] \x1b[31mof a server\x1b[0m " + "x" * 60)
    reporter.tick({"encoder-0": "loading weights", "router": "pending"})
    reporter.close()
    return out.file.getvalue()


def test_lines_have_their_servers_name_in_front_and_stay_whole():
    lines = reported(logs=True).splitlines()
    assert lines[0] == "encoder-0 = started, pid 7"
    assert lines[1] == "encoder-0 | a [bold]line[/bold] of a server " + "x" * 60
    assert len(lines) == 2


def test_without_logs_phases_are_shown():
    assert reported(logs=False).splitlines()[1:] == ["encoder-0 = loading weights"]


def test_a_full_disk_takes_no_lines_and_ends_nothing():
    full = Path("/dev/full").open("w")  # noqa: SIM115 - to close it fails as well
    out = Console(file=full)
    reporter = LineReporter(out, ["router"], logs=True)
    for _ in range(100):
        reporter.line("router", "x" * 1000)
    reporter.close()
    assert not out._buffer, "each line would be written again with the next one"
    with pytest.raises(OSError, match="No space"):
        full.write("x" * 100_000)
    with contextlib.suppress(OSError):
        full.close()


def test_no_word_of_a_user_in_a_log_ends_the_command():
    out = Console(file=io.StringIO(), width=40, highlight=False, markup=False)
    reporter = LineReporter(out, ["router"], logs=True)
    reporter.line("router", f"no adapter \x1b[{'9' * 5000}m")
    reporter.line("router", "next")
    assert "no adapter" in out.file.getvalue() and "router | next" in out.file.getvalue()


def test_a_status_line_on_a_terminal_that_is_gone_ends_nothing():
    full = Path("/dev/full").open("w")  # noqa: SIM115 - to close it fails as well
    out = Console(file=full, force_terminal=True)
    reporter = LineReporter(out, ["router"], logs=False)
    reporter.tick({"router": "importing"})
    reporter.tick({"router": "loading weights"})
    reporter.close()
    with contextlib.suppress(OSError):
        full.close()


def test_a_reader_that_leaves_ends_the_command_in_order():
    code = (
        "import signal, sys\n"
        "from sglang_epd.cli.console import console\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "out = console()\n"
        "for _ in range(100_000):\n"
        "    out.print('x' * 100, soft_wrap=True)\n"
        "    if told: sys.exit(7)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"x" * 100 + b"\n"
        process.stdout.close()
        assert process.wait(30) == 7
