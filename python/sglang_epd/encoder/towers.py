"""Which towers a server's flags ask for: one in this process, or several in workers.

`--dp-size N` is N towers, `--tp-size T` T ranks each; with neither, the engine lives in
the server's own process. Tower i's rank j uses accelerator `--base-gpu-id` + i * T + j.

A worker resolves the flags itself, from the user's own, as SGLang's launcher does:
plain data crosses. The front keeps the settings of the whole server (how many towers there
are, a transfer engine).

Leans on `ServerArgs` being a msgspec Struct that holds the user's flags, on
`plugins.load_plugins`, and on `utils.common.maybe_reindex_device_id`.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from sglang_epd import logs
from sglang_epd.encoder.model.engine import Engine
from sglang_epd.encoder.tower import Tower
from sglang_epd.encoder.workers.crew import Rank, WorkerTower
from sglang_epd.errors import ConfigError
from sglang_epd.media import MediaLimits

_FACTORY = f"{__name__}:create"
_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
_THREADS = "OMP_NUM_THREADS"
# Ports that towers of this process were given lately.
_drawn: deque[int] = deque(maxlen=256)


async def start_towers(
    server_args: Any, limits: MediaLimits, decode_mb: int, patches: int
) -> tuple[Sequence[Tower], Any]:
    """Start the towers that the flags ask for; all are loaded and warm when it returns.

    Call it on a thread that lives as long as the server, after
    `publish(server_args, role="encoder")`. `close()` each tower before the loop ends.

    Args:
        server_args: SGLang's, resolved.
        limits: bounds on one item's decoding.
        decode_mb: for all that is decoded at a time, in all workers together.
        patches: of one pass, where a tower takes long videos in several.

    Returns:
        The towers, and the model's configuration as the checkpoint has it, which a language
        server compares: models write to theirs.

    Raises:
        TowerStartError: a worker failed or died while it loaded; none is left running.
        ConfigError: flags that workers cannot be given.
    """
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import get_parallel

    hf_config = copy.deepcopy(model_config_of(server_args).hf_config)
    towers, ranks = get_parallel().dp_size, get_parallel().tp_size
    if towers == ranks == 1:
        engine = Engine(server_args, limits, decode_mb << 20, patches)
        await engine.warm_up()
        return [engine], hf_config
    starts = partial(starts_of, server_args, limits, decode_mb << 20, patches)
    workers = [
        WorkerTower(f"vision worker {tower}", _FACTORY, partial(starts, tower))
        for tower in range(towers)
    ]
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.start())
    except BaseException as error:
        await asyncio.gather(*(worker.close() for worker in workers))
        if isinstance(error, ExceptionGroup):
            # One of them has the cause to be mended; the others repeat it, or were ended.
            raise error.exceptions[0] from None
        raise
    return workers, hf_config


def create(options: dict[str, Any]) -> Engine:
    """In a worker: SGLang's plug-ins and configuration, then one rank's engine."""
    if options["cores"]:
        os.sched_setaffinity(0, options["cores"])
    from sglang.srt.plugins import load_plugins

    load_plugins()

    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import configure_logger

    server_args = ServerArgs(**options["server_args"])
    server_args.resolve_once()
    configure_logger(server_args, prefix=options["log_prefix"])
    logs.install()
    publish(server_args, role="encoder")
    return Engine(
        server_args,
        MediaLimits.read(options["limits"]),
        options["decode_bytes"],
        options["patches"],
        rank=options["rank"],
        gpu_id=options["gpu_id"],
        rendezvous=options["rendezvous"],
        share=options["share"],
    )


def starts_of(
    server_args: Any, limits: MediaLimits, decode_bytes: int, patches: int, tower: int
) -> list[Rank]:
    """The ranks of a tower; each call takes another port for their rendezvous.

    Args:
        limits: bounds on decoding.
        decode_bytes: for all that one rank decodes at a time.
        patches: as of `start_towers`.
        tower: its number among those of this server, from 0.

    Raises:
        ConfigError: flags that workers cannot be given.
    """
    from sglang.srt.runtime_context import get_device, get_parallel
    from sglang.srt.utils.common import maybe_reindex_device_id
    from sglang.srt.utils.network import NetworkAddress, get_free_port_below_ephemeral

    if server_args.nccl_port is not None:
        port = server_args.nccl_port + tower
    else:
        port = undrawn(get_free_port_below_ephemeral)
    rendezvous = NetworkAddress("127.0.0.1", port).to_tcp()
    ranks = get_parallel().tp_size
    places = workers()
    typed = _typed(server_args, ranks)
    made = []
    for rank in range(ranks):
        place = tower * ranks + rank
        cores, threads = share_of_cores(place, places, os.environ)
        # It names the one device of a worker in the environment, where it is asked to.
        with maybe_reindex_device_id(get_device().base_gpu_id + place) as gpu_id:
            env = {_THREADS: str(threads), **os.environ}
        options = {
            # SGLang's processors use the device that this names.
            "server_args": {**typed, "base_gpu_id": gpu_id},
            "limits": limits.plain(),
            "decode_bytes": decode_bytes // places,
            "patches": patches,
            "rank": rank,
            "gpu_id": gpu_id,
            "rendezvous": rendezvous,
            "cores": cores,
            "share": 1 if cores else places,
            "log_prefix": f" encoder {tower}" + (f" TP{rank}" if ranks > 1 else ""),
        }
        made.append(Rank(options, env))
    return made


def workers() -> int:
    """Processes of this server's towers."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().dp_size * get_parallel().tp_size


def undrawn(draw: Callable[[], int]) -> int:
    """A random port that no other tower of this process was given lately: a worker binds its own
    some seconds after it was found free."""
    while (port := draw()) in _drawn:
        pass
    _drawn.append(port)
    return port


def _typed(server_args: Any, ranks: int) -> dict[str, Any]:
    """The user's flags, as far as they concern one tower.

    Raises:
        ConfigError: something that is not plain data.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    typed = msgspec.structs.asdict(server_args) | {
        "dp_size": 1,
        "tp_size": ranks,
        "nccl_port": None,
        # The front's: a worker's own transfer engine would send nothing.
        "encoder_transfer_backend": "zmq_to_scheduler",
        "encoder_register_urls": [],
        # Drawn where no flag sets it; ranks have to agree.
        "random_seed": resolving_view(server_args).random_seed,
    }
    for name, value in typed.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{name}={value!r} cannot be handed to the workers of --dp-size and --tp-size"
            ) from None
    return typed


def share_of_cores(place: int, places: int, env: Mapping[str, str]) -> tuple[Sequence[int], int]:
    """The cores that a worker is bound to (none: it is not bound) and its OpenMP threads.

    As SGLang has it for ranks on a CPU, `SGLANG_CPU_OMP_THREADS_BIND` names the cores of
    each: `0,1|2-3`. Unbound workers share the cores out in number only, so that one at
    work may use those of one that is idle.

    Args:
        place: of the worker among `places` of this server.
        env: the environment that says how.

    Raises:
        ConfigError: the variable does not name cores for this worker.

    >>> share_of_cores(1, 2, {"SGLANG_CPU_OMP_THREADS_BIND": "0,1|2-4"})
    ([2, 3, 4], 3)
    """
    binding = env.get(_BINDING, "all")
    if binding == "all":
        return [], max(1, len(os.sched_getaffinity(0)) // places)
    lists = binding.split("|")
    if len(lists) < places:
        raise ConfigError(
            f"{_BINDING}={binding!r} names cores for {len(lists)} ranks, --dp-size times "
            f"--tp-size is {places}"
        )
    cores: list[int] = []
    try:
        for part in lists[place].split(","):
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        raise ConfigError(f"{_BINDING}={binding!r}: {lists[place]!r} is not cores") from None
    return cores, len(cores)
