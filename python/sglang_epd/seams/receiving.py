"""Starts this server's receiver, in the process that the transfer backend calls for.

Leans on the rank and width names of `runtime_context`'s parallel context, on the places that
`entrypoints.engine._calculate_rank_ranges` gives to ranks, and on
`utils.network.get_local_ip_auto`. The launcher ends a server at SIGQUIT, which
`managers.scheduler.run_scheduler_process` sends it when a scheduler fails.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import multiprocessing
import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

from sglang_epd.config import Settings, announce
from sglang_epd.errors import ConfigError
from sglang_epd.machine import share_mb
from sglang_epd.seams import idle, rundir
from sglang_epd.tally import Tally
from sglang_epd.transfer import mooncake
from sglang_epd.transfer.receiver import Receiver

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranks:
    """A scheduler's place among the server's.

    Attributes:
        reads: whether it reads what arrives: it is in the first pipeline stage, and on the
            receiver's host.
        reader: this process among those that read, if it does.
        readers: how many those are.
        leads: whether it takes in the requests of its group, the ranks that run one
            together.
        first_in_group, group: the group's first reader, and how many it has.
        elsewhere: the first stage's ranks on other hosts, by their ranks in the world.
    """

    reads: bool
    reader: int
    readers: int
    leads: bool
    first_in_group: int
    group: int
    elsewhere: range


def ranks(parallel: Any) -> Ranks:
    """Where this scheduler stands, from SGLang's parallel context.

    Data-parallel replicas have each their own tensor-parallel ranks; with data-parallel
    attention the ranks of one tensor-parallel group are divided among the replicas. Hosts
    take whole pipeline stages; only where there are fewer stages than hosts, a stage's
    tensor-parallel ranks are divided among hosts, in order.
    """
    apart = not parallel.attn_dp_enabled
    first = (parallel.dp_rank or 0) * parallel.tp_size if apart else 0
    # Of a stage, on one host.
    here = parallel.tp_size // max(parallel.nnodes // parallel.pp_size, 1)
    group = min(parallel.attn_tp_size * parallel.attn_cp_size, here)
    reads = parallel.pp_rank == 0 and parallel.tp_rank < here
    return Ranks(
        reads=reads,
        reader=first + parallel.tp_rank,
        readers=(parallel.dp_size if apart else 1) * here,
        leads=reads and parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0,
        first_in_group=first + parallel.attn_dp_rank * group,
        group=group,
        elsewhere=range(here, parallel.tp_size),
    )


def asks_prefix(parallel: Any, disable_radix_cache: bool) -> bool:
    """Whether the prefix cache is asked before embeddings are sent.

    Not with several pipeline stages: the first one only hears what has settled, and all have
    to schedule the same requests.
    """
    return not disable_radix_cache and parallel.pp_size == 1


def start(readers: int, receivers: int = 1, copies: int = 1) -> Receiver:
    """Start the receiver thread in this process, with the settings of this server.

    Args:
        readers: processes that read what arrives.
        receivers: of this server; each has an equal part of its memory for embeddings.
        copies: of each embedding in use, on another host; they have a share of its memory too.

    Raises:
        ConfigError: the transfer engine cannot be used here.
    """
    from sglang.srt.runtime_context import get_disagg, get_mm, get_observability, get_serving

    settings = Settings.from_env()
    tally = Tally()
    if get_observability().enable_metrics:
        from sglang_epd.observability.language import PrometheusTally, ReceiverMetrics

        tally = PrometheusTally(ReceiverMetrics())
    engine = mooncake.started(get_disagg().encoder_transfer_backend)
    rundir.claim()
    budget_mb = settings.receive_budget_mb or share_mb() // copies
    kept_mb = settings.embedding_cache_mb
    kept_mb = budget_mb // 2 if kept_mb is None else kept_mb
    budget_mb, kept_mb = max(budget_mb // receivers, 1), kept_mb // receivers
    address = _reachable_address(get_serving().host, get_disagg().encoder_urls)
    try:
        receiver = Receiver(
            _own(address),
            address,
            rundir.control_path(),
            budget_bytes=budget_mb << 20,
            cache_bytes=kept_mb << 20,
            readers=readers,
            grant_ttl_s=settings.grant_timeout_s,
            engine=engine,
            tally=tally,
            on_death=end_server,
        )
    except OSError as error:
        raise ConfigError(f"the receiver cannot start at {address}: {error}") from error
    receiver.start()
    idle.Hosted.receiver = True
    announce("language", {"--trust-mm-content-hashes": get_mm().trust_mm_content_hashes})
    logger.info(
        "EPD receiver: encoders deliver to %s (%s, budget %d MiB, %d of it to keep, %d readers)",
        # Without its secret.
        f"tcp://{receiver.endpoint.rpartition('@')[2]}",
        get_disagg().encoder_transfer_backend,
        budget_mb,
        kept_mb,
        readers,
    )
    return receiver


def end_server() -> None:
    """End all of this server's processes, as SGLang does when one of its own fails.

    Without a receiver no request with media ends but by its deadline. It owns memory that
    schedulers read and encoders write to, so another could not take its place; a supervisor
    starts the server anew.
    """
    launcher = os.getpid() if multiprocessing.parent_process() is None else os.getppid()
    os.kill(launcher, signal.SIGQUIT)


def _own(address: str) -> str:
    """Where to listen for what comes to an address: at all of this machine's, where it is one that
    is translated to them, as a cloud's floating addresses are."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as trial:
        try:
            trial.bind((address, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return "::" if family == socket.AF_INET6 else "0.0.0.0"
    return address


def _reachable_address(serving_host: str | None, encoder_urls: list[str]) -> str:
    """The address to tell encoders.

    The serving host if it is one; loopback only if every encoder is there too. A host may have
    its own name at a loopback address.

    Raises:
        ConfigError: the serving host has no address.
    """
    from sglang.srt.utils.network import get_local_ip_auto

    host = (serving_host or "").strip("[]")
    local = ("127.0.0.1", "localhost", "::1")
    if host in local:
        if encoder_urls and all(any(f"//{name}" in url for name in local) for url in encoder_urls):
            return "127.0.0.1" if host == "localhost" else host
    elif host not in ("", "0.0.0.0", "::"):
        try:
            # ZMQ listens at addresses only.
            address = str(socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)[0][4][0])
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--host {host}: {error}") from None
        if not ipaddress.ip_address(address).is_loopback or address == host:
            return address
    return get_local_ip_auto()
