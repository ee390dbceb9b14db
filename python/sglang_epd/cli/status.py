"""`sglang-epd status` and `sglang-epd top`: how a topology does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from sglang_epd.cli import runs
from sglang_epd.cli.console import console, print_json, state, table
from sglang_epd.errors import ConfigError

if TYPE_CHECKING:
    from sglang_epd.cli.probes import ServerView, Target

Urls = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[URL]...", help="Servers to ask, of any role; those of the last `up` unless given."
    ),
]
Certificates = Annotated[
    str,
    typer.Option(
        "--ssl-ca-certs",
        help="CA certificates that https:// servers are verified against; else the system's.",
    ),
]


def status(
    urls: Urls = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON document.")] = False,
    ssl_ca_certs: Certificates = "",
) -> None:
    """Show every server once: state, queue, hit rate, namespace.

    Of the topology that `sglang-epd up` runs, or of the servers whose URLs you give. The
    exit code is 0 if all are ready and see an encoder, 1 if one is not.

    `sglang-epd status http://encoder-0:30000 http://prefill:30100`
    """
    from sglang_epd.cli.probes import ask

    targets, run = _targets(urls)
    views = ask(targets, ssl_ca_certs)
    if as_json:
        print_json(
            {"run": run, "servers": [asdict(view) | {"hit_rate": view.hit_rate} for view in views]}
        )
    else:
        out = console()
        if run:
            out.print(f"{run['model']} at {run['api_url']}, up for {_span(run['started_at'])}")
        out.print(_table(views))
        for view in views:
            if view.trouble or view.hint:
                out.print(f"{view.name}: {view.trouble or view.hint}", soft_wrap=True)
    if any(view.state != "ready" or view.trouble for view in views):
        raise typer.Exit(1)


def top(
    urls: Urls = None,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")
    ] = 1.0,
    ssl_ca_certs: Certificates = "",
) -> None:
    """Watch every server: queue, running items, items a second, hit rate. Ctrl-C leaves.

    Rates are those between two looks. Servers that `up` starts again are followed.
    """
    from sglang_epd.cli.probes import ask

    before: dict[str, tuple[float, ServerView]] = {}
    with Live(console=console(), auto_refresh=False, transient=False) as live:
        try:
            while True:
                begin = time.monotonic()
                views = ask(_targets(urls)[0], ssl_ca_certs)
                now = time.monotonic()
                live.update(_live_table(views, before, now), refresh=True)
                before = {view.url: (now, view) for view in views}
                time.sleep(max(0.0, interval - (time.monotonic() - begin)))
        except KeyboardInterrupt:
            return


def _targets(urls: Sequence[str] | None) -> tuple[list[Target], dict[str, Any] | None]:
    """The servers to ask, and the run that they belong to.

    Raises:
        ConfigError: there is no server to ask.
    """
    from sglang_epd.cli.probes import target, targets_of

    if urls:
        return [target(url) for url in urls], None
    found = runs.find(runs.root())
    if not found:
        raise ConfigError("no `sglang-epd up` runs here; name servers by their URLs")
    told = found[0]
    run = {name: told[name] for name in ("pid", "model", "api_url", "started_at")}
    return targets_of(told), run


def _table(views: Sequence[ServerView]) -> Table:
    # Servers that are asked by their URLs have no other names.
    names = any(view.name != view.url for view in views)
    columns = ("role", "state", "queue", "running", "hits", "namespace", "url")
    shown = table(*(("server",) if names else ()), *columns)
    for view in views:
        again = f" ({view.restarts} restart{'s' * (view.restarts > 1)})" if view.restarts else ""
        known = ", ".join(f"{number} {name}" for name, number in view.encoders.items())
        shown.add_row(
            *((view.name,) if names else ()),
            view.role,
            state(view.state).append(again).append(f", encoders: {known}" if known else ""),
            _number(view.queued),
            _number(view.running),
            _number(view.hit_rate, ".0%"),
            # Its digits tell it from others of the same model.
            view.namespace.rpartition("/")[2][:12] or "-",
            view.url,
        )
    return shown


def _live_table(
    views: Sequence[ServerView], before: dict[str, tuple[float, ServerView]], now: float
) -> Table:
    shown = table("server", "state", "queue", "running", "items/s", "hits", "busy", "tokens/s")
    for view in views:
        items, hits = _since(view, before.get(view.url), now)
        shown.add_row(
            view.name,
            state(view.state),
            _number(view.queued),
            _number(view.running),
            _number(items, ".1f"),
            _number(hits, ".0%"),
            _number(view.utilisation, ".0%"),
            _number(view.tokens_per_s),
        )
    return shown


def _since(
    view: ServerView, before: tuple[float, ServerView] | None, now: float
) -> tuple[float | None, float | None]:
    """Items a second and the share of hits since the last look.

    None where there was none, or where the server has been started again meanwhile.
    """
    if before is None or view.items is None or view.hits is None:
        return None, None
    then, old = before
    if old.items is None or old.hits is None or view.items < old.items or now <= then:
        return None, None
    items = view.items - old.items
    return items / (now - then), (view.hits - old.hits) / items if items else None


def _number(value: float | None, form: str = ".0f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _span(since: float) -> str:
    minutes, seconds = divmod(int(time.time() - since), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
