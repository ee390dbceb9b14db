"""How the command writes: lines with a server's name in front, tables, and JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
_STATE_COLOURS = {
    "ready": "green",
    "starting": "yellow",
    "pending": "yellow",
    "draining": "yellow",
    "silent": "red",
    "down": "red",
    "failed": "red",
    "unreachable": "red",
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader has left (`up | head`): write no more, and end in order."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.kill(os.getpid(), signal.SIGTERM)


def console() -> Console:
    """For results, on stdout; without colours where that is no terminal."""
    return _Console(highlight=False, markup=False)


@contextlib.contextmanager
def lossy(out: Console) -> Iterator[None]:
    """Around prints that a full disk, or a terminal that is gone, takes or loses."""
    try:
        yield
    except OSError:
        # It would print what it could not once more, before all that comes after.
        quiet, out.quiet = out.quiet, True
        out.print()
        out.quiet = quiet


def print_json(value: Any) -> None:
    """For machines: one document on stdout, as it is."""
    print(json.dumps(value, indent=2))


def state(name: str) -> Text:
    """A state, in its colour."""
    return Text(name, style=_STATE_COLOURS.get(name, ""))


def table(*columns: str, title: str = "") -> Table:
    """An empty table in the command's look."""
    made = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    for column in columns:
        # Cut nothing: fold wide cells, since tables are copied from.
        made.add_column(column, overflow="fold")
    return made


class LineReporter:
    """Shows a run line by line: `name | text`, and a status line while servers start.

    Args:
        names: all servers, so that the names take one width.
        logs: whether the servers' logs are shown.
    """

    def __init__(self, out: Console, names: Sequence[str], *, logs: bool) -> None:
        self._out = out
        self._logs = logs
        self._width = max(map(len, names))
        self._styles = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._total = len(names)
        self._status: Status | None = None
        self._phases: dict[str, str] = {}

    def line(self, name: str, text: str) -> None:
        """A server wrote this."""
        if not self._logs:
            return
        try:
            shown = Text.from_ansi(text)
        except ValueError:  # an escape that is none: logs hold words of users
            shown = Text(text)
        self._write(name, "|", shown)

    def news(self, name: str, text: str) -> None:
        """Something became of a server."""
        self._write(name, "=", Text(text, style="bold"))

    def tick(self, waiting: Mapping[str, str]) -> None:
        """Some times a second, with the phase of each server that is not ready yet."""
        for name, phase in waiting.items():
            if self._phases.get(name, phase) != phase and not self._logs:
                self.news(name, phase)
        self._phases = dict(waiting)
        if not self._out.is_terminal:
            return
        if not waiting:
            self.close()
            return
        ready = self._total - len(waiting)
        phases = ", ".join(f"{name} {phase}" for name, phase in waiting.items())
        with lossy(self._out):
            if self._status is None:
                self._status = self._out.status("")
                self._status.start()
            self._status.update(f"{ready} of {self._total} ready; {phases}")

    def close(self) -> None:
        """Take the status line away."""
        if self._status is not None:
            with lossy(self._out):
                self._status.stop()
            self._status = None

    def _write(self, name: str, sign: str, text: Text) -> None:
        head = Text(f"{name:<{self._width}} {sign} ", style=self._styles[name])
        with lossy(self._out):
            self._out.print(head + text, soft_wrap=True)
