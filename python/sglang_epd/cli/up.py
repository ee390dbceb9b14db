"""`sglang-epd up`: a topology on this machine, with one command."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sglang_epd.cli import runs
from sglang_epd.cli.console import LineReporter, console, lossy, print_json, state, table
from sglang_epd.cli.lives import Restarts
from sglang_epd.cli.places import Cores, Gpus, accelerators
from sglang_epd.cli.processes import ServerError, free_port, unproxied
from sglang_epd.cli.supervisor import Supervisor
from sglang_epd.cli.topology import LOOPBACK, Fleet, Shape, plan
from sglang_epd.config import Settings
from sglang_epd.errors import ConfigError
from sglang_epd.media.limits import MediaLimits

_USUAL_PORT = 8000
_shape = partial(typer.Option, rich_help_panel="Topology")
_flags = partial(typer.Option, rich_help_panel="SGLang's flags")
_running = partial(typer.Option, rich_help_panel="Running")


def up(
    *,
    model: Annotated[str, _shape(help="Checkpoint: a folder, or a name on the hub.")],
    encoders: Annotated[int, _shape(help="Encoder servers (--encoder-only).")] = 1,
    language: Annotated[
        int | None,
        _shape(
            help="Language servers that prefill and decode; 1 unless --prefill is given. "
            "Several stand behind SGLang's router."
        ),
    ] = None,
    prefill: Annotated[
        int, _shape(help="Prefill servers; with --decode, behind SGLang's mini load balancer.")
    ] = 0,
    decode: Annotated[int, _shape(help="Decode servers; with --prefill.")] = 0,
    host: Annotated[
        str,
        _shape(
            help="Address that chat requests are taken on; 0.0.0.0 for all. The other servers "
            "stay on the loopback interface."
        ),
    ] = LOOPBACK,
    port: Annotated[
        int | None,
        _shape(
            min=1, max=65535, help=f"Port for chat requests; {_USUAL_PORT} if it is free, else any."
        ),
    ] = None,
    flags: Annotated[
        str,
        _flags(
            help="SGLang flags for every server with a model, encoders too: "
            '--flags "--dtype bfloat16". A --tp-size belongs into the flags of one role.'
        ),
    ] = "",
    encoder_flags: Annotated[str, _flags(help="For encoders alone.")] = "",
    language_flags: Annotated[
        str, _flags(help='For language servers alone: --language-flags "--tp-size 4".')
    ] = "",
    prefill_flags: Annotated[str, _flags(help="For prefill servers alone.")] = "",
    decode_flags: Annotated[str, _flags(help="For decode servers alone.")] = "",
    router_flags: Annotated[str, _flags(help="For the router.")] = "",
    gpus: Annotated[
        str,
        _running(
            help="GPUs to deal out, in the order encoders, language or prefill, decode: "
            "0,1,2. Each server gets as many as its flags have ranks (--tp-size, --dp-size, "
            "--pp-size); one that is listed twice is shared; none for the CPU. All that the "
            "machine has, unless given."
        ),
    ] = "",
    timeout: Annotated[float, _running(min=1, help="Seconds until all have to be ready.")] = 1800.0,
    quiet: Annotated[
        bool,
        _running(
            "--quiet",
            "-q",
            help="Show what becomes of servers, not what they write; their logs are files.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, _running("--dry-run", help="Only print the commands of the servers.")
    ] = False,
    as_json: Annotated[bool, _running("--json", help="With --dry-run: as JSON.")] = False,
) -> None:
    """Bring a topology up on this machine, and keep it up until Ctrl-C.

    Encoders, and language servers or prefill and decode servers, each on its own GPU or
    cores, on free ports of the loopback interface. Waits until all are ready, prints where
    to send chat requests and the command of each server, so that you can move them to units
    of your own; starts again what dies; Ctrl-C and SIGTERM stop everything.

    `sglang-epd up --model Qwen/Qwen2.5-VL-7B-Instruct --encoders 2`

    `sglang-epd up --model ... --encoders 2 --prefill 1 --decode 1`
    """
    if as_json and not dry_run:
        raise ConfigError("--json goes with --dry-run; `sglang-epd status --json` tells of a run")
    apart = prefill > 0 or decode > 0
    shape = Shape(
        model=_checkpoint(model),
        encoders=encoders,
        language=(0 if apart else 1) if language is None else language,
        prefill=prefill,
        decode=decode,
        host=host,
        port=_api_port(host, port),
        flags={
            "all": flags,
            "encoder": encoder_flags,
            "language": language_flags,
            "prefill": prefill_flags,
            "decode": decode_flags,
            "router": router_flags,
        },
    )
    if apart and importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            "--prefill and --decode hand KV over by Mooncake, which is not installed: "
            'pip install ".[mooncake]" in a clone of sglang-epd (mooncake-cpu without CUDA)'
        )
    keyed = any(
        word.partition("=")[0] == "--api-key"
        for role in ("all", "language", "prefill", "decode")
        for word in shape.words(role)
    )
    if apart and keyed:
        raise ConfigError(
            "SGLang's mini load balancer, which --prefill and --decode take, forwards no key: "
            "leave --api-key out, and check keys at your gateway"
        )
    # Combinations that servers would refuse are refused here, before any of them starts.
    checked = Settings.from_env()
    MediaLimits.from_env()
    if checked.store:
        from sglang_epd.store.url import StoreUrl

        StoreUrl.parse(checked.store)
    made = plan(shape, free_port, _places(gpus, shape))
    out = console()
    if as_json:
        print_json(_described(made))
        return
    if dry_run:
        for server in made.servers:
            out.print(server.line(), soft_wrap=True)
        return
    open_to_all = host not in (LOOPBACK, "localhost", "::1")
    if open_to_all and not keyed:
        mend = "check keys at your gateway" if apart else "the flags have no --api-key"
        out.print(f"Chat requests on {host} need no key: {mend}.")
    _run(
        made,
        out,
        model=shape.model,
        quiet=quiet,
        timeout_s=timeout,
    )


def _run(
    made: Fleet,
    out: Console,
    *,
    model: str,
    quiet: bool,
    timeout_s: float,
) -> None:
    run = runs.Run(runs.root())
    told: dict[str, Any] = {"pid": os.getpid(), "started_at": time.time(), "model": model}
    told["api_url"] = made.api_url

    def write() -> None:
        run.write({**told, "servers": supervisor.describe()})

    def ready() -> None:
        reporter.close()
        with lossy(out):
            _show(made, supervisor, out)

    reporter = LineReporter(out, [server.name for server in made.servers], logs=not quiet)
    supervisor = Supervisor(
        made,
        run.folder,
        reporter,
        env={**unproxied(os.environ), "TMPDIR": str(run.temporary)},
        restarts=Restarts(),
        changed=write,
        ready=ready,
        start_timeout_s=timeout_s,
    )
    keep = True
    write()
    out.print(f"Starting {len(made.servers)} servers; their logs are in {run.folder}")
    try:
        supervisor.run()
        keep = False
        reporter.close()
        with lossy(out):
            out.print("All servers have stopped.")
    except ServerError as error:
        raise ServerError(f"{error}\nThe logs are kept in {run.folder}") from None
    finally:
        reporter.close()
        run.close(keep=keep)


def _show(made: Fleet, supervisor: Supervisor, out: Console) -> None:
    """The summary for a user once everything is ready."""
    shown = table("server", "state", "pid", "url", "on")
    for told in supervisor.describe():
        place = told["place"] or "all cores"
        shown.add_row(told["name"], state(told["state"]), str(told["pid"]), told["url"], place)
    out.print()
    out.print(shown)
    out.print("\nThe same servers, in units of your own:")
    for server in made.servers:
        out.print(f"  {server.line()}", soft_wrap=True)
    out.print(f"\nReady. Chat requests go to {made.api_url}/v1/chat/completions")
    out.print("`sglang-epd status` and `sglang-epd top` show how it does; Ctrl-C stops it.\n")


def _described(made: Fleet) -> dict[str, Any]:
    return {
        "api_url": made.api_url,
        "servers": [
            {
                "name": server.name,
                "role": server.role,
                "url": server.url,
                "env": server.place.env,
                "argv": server.argv("python"),
            }
            for server in made.servers
        ],
    }


def _checkpoint(model: str) -> str:
    """A folder as an absolute path, anything else as typed."""
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if model.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"--model {model}: there is no such folder")
    return model


def _api_port(host: str, port: int | None) -> int | None:
    """The port for users; None for any."""
    wanted = port or _USUAL_PORT
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a connection that has just ended is no reason to refuse.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            if port is None and error.errno == errno.EADDRINUSE:
                return None
            name = "--host" if error.errno != errno.EADDRINUSE else "--port"
            raise ConfigError(
                f"{name}: cannot listen on {host}:{wanted}: {error.strerror}"
            ) from None
    return wanted


def _places(gpus: str, shape: Shape) -> Gpus | Cores:
    named = [name for name in map(str.strip, gpus.split(",")) if name]
    if not named:
        named = accelerators()
    if named and named != ["none"]:
        return Gpus(named)
    servers = shape.encoders + shape.language + shape.prefill + shape.decode
    # Where it was typed, servers are not to see any, nor to miss any.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if named else {}
    return Cores(sorted(os.sched_getaffinity(0)), servers, hidden)
