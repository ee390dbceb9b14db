"""`sglang-epd doctor`: finds faults of a set-up, and says how to mend each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from sglang_epd.cli.checks import Finding, Verdict
from sglang_epd.cli.console import console, print_json, table
from sglang_epd.config import Settings
from sglang_epd.errors import ConfigError

_STYLES = {
    Verdict.OK: "green",
    Verdict.NOTE: "cyan",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
}


def doctor(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL]...",
            help="Servers to look at from here, of any role. Encoders are shown the token.",
        ),
    ] = None,
    *,
    model: Annotated[
        str, typer.Option(help="A checkpoint to look at: a folder, or a name on the hub.")
    ] = "",
    media: Annotated[
        list[str] | None,
        typer.Option(help="A URL of media to fetch as encoders would; may be repeated."),
    ] = None,
    port: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65535, help="A port that is to be free; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON document.")] = False,
    ssl_ca_certs: Annotated[
        str, typer.Option(help="CA certificates that https:// servers are verified against.")
    ] = "",
) -> None:
    """Look for faults that keep servers from running, and say how to mend each.

    Versions, SGLang's seams, and hooks beside other plug-ins; settings and the token;
    Mooncake and FFmpeg; GPUs and the servers on them, RDMA, ports, proxies, limits and the clock.
    With --model also a checkpoint's files, or whether the hub has it, and the receive budget
    beside its largest image; with --media whether encoders may fetch it; with URLs also whether
    servers there can be reached, share a namespace, take the token, and tell the same time.
    The exit code is 1 if something will not run.

    `sglang-epd doctor --model Qwen/Qwen2.5-VL-7B-Instruct http://encoder-0:30000`
    """
    findings = list(_examine(urls or [], model, media or [], port or [], ssl_ca_certs))
    failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(one) for one in findings]})
    else:
        shown = table("", "what", "found")
        for finding in findings:
            found = Text(finding.found)
            if finding.mend:
                found.append(f"\n-> {finding.mend}", style="bold")
            verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
            shown.add_row(verdict, finding.subject, found)
        console().print(shown)
    if failed:
        raise typer.Exit(1)


def _examine(
    urls: list[str], model: str, media: list[str], ports: list[int], ca_certs: str
) -> Iterator[Finding]:
    from sglang_epd.cli.checks import checkpoint, machine, servers, software
    from sglang_epd.cli.checks import media as fetching
    from sglang_epd.cli.probes import target

    targets = [target(url) for url in urls]
    yield from software.versions()
    yield from software.plugins()
    yield from software.seams()
    yield from software.hooks()
    yield from software.settings()
    yield from software.libraries()
    yield from machine.devices()
    yield from machine.rdma()
    yield from machine.ports(ports)
    yield from machine.proxies()
    yield from machine.limits()
    yield from machine.clock()
    if model:
        yield from checkpoint.checkpoint(model, _settings().receive_budget_mb)
    for url in media:
        yield from fetching.media(url)
    if targets:
        yield from servers.servers(targets, _settings().token, ca_certs)


def _settings() -> Settings:
    try:
        return Settings.from_env()
    except ConfigError:
        return Settings()  # listed with the settings
