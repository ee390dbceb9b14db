"""The `sglang-epd` command: its subcommands, and the form of its errors.

A subcommand is a function in a module of its own, which imports slow modules
inside the function: `sglang-epd --help` imports none of it. The planner's subcommand is an entry
point, because nothing here imports the planner.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from sglang_epd.cli import doctor, status, up
from sglang_epd.cli.processes import ServerError
from sglang_epd.errors import EpdError

app = typer.Typer(
    name="sglang-epd",
    help="Encode-prefill-decode disaggregation for models served by SGLang.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    # A defect shows the traceback that Python would show; a user's mistake is one line.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sglang-epd {installed_version('sglang-epd')}")
        raise typer.Exit()


@app.callback()
def _common(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and leave.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


app.command("up")(up.up)
app.command("status")(status.status)
app.command("top")(status.top)
app.command("doctor")(doctor.doctor)
# Of this distribution alone: other packages add no commands.
for _point in distribution("sglang-epd").entry_points.select(group="sglang_epd.commands"):
    app.command(_point.name)(_point.load())


def run() -> None:
    """The console script: as `app`, but a user's mistake is one line on stderr.

    Exit codes: 0, 1 for a failure, 2 for a wrong command line.
    """
    try:
        app()
    except (EpdError, ServerError) as error:
        print(f"sglang-epd: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run()
