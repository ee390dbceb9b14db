"""The scheduler process's seam: SGLang's multimodal receiver, as its scheduler calls it.

Leans on `managers.scheduler.Scheduler`, which calls
`create_mm_receiver(server_args, dtype=, hf_config=, scheduler=)` once;
`scheduler_components.request_receiver`, which calls `process_waiting_requests` every
tick; `Scheduler.abort_request`, which calls `abort_waiting_requests`; the metrics
reporter, which reads `len(waiting_list)`; the poller of
`scheduler_components.idle_sleeper.IdleSleeper`; and two methods of the in-tree
`MMReceiverBase` that build its multimodal processor and an abortable request.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import zmq

from sglang_epd.config import Settings
from sglang_epd.language.assembly import assemble
from sglang_epd.language.backend import Backend, Failure
from sglang_epd.seams import rundir
from sglang_epd.seams.prompt import robust_placeholders
from sglang_epd.transfer.ledger import ReceivedItem
from sglang_epd.transfer.receiver import Receiver

logger = logging.getLogger(__name__)


class SchedulerSeam:
    """What `Scheduler.mm_receiver` is while this package serves EPD."""

    # For the CPU platform: no need to poll for embeddings.
    wakes_idle_scheduler = True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def waiting_list(self) -> list[Any]:
        return self._backend.waiting

    def process_waiting_requests(self, recv_reqs: list[Any]) -> tuple[list[Any], list[Failure]]:
        """Take the new requests that wait, return what can go on and what failed."""
        ready: list[Any] = []
        failed: list[Failure] = []
        for received in recv_reqs:
            for request in _split_batch(received):
                if not getattr(request, "need_wait_for_mm_inputs", False):
                    ready.append(request)
                    continue
                failure = self._backend.wait(request)
                if failure is not None:
                    failed.append(failure)
        settled, settled_failed = self._backend.poll()
        return ready + settled, failed + settled_failed

    def abort_waiting_requests(self, recv_req: Any) -> None:
        """Give up the requests that an `AbortReq` names (all whose id starts with its)."""
        self._backend.abandon(
            lambda rid: recv_req.abort_all or rid.startswith(recv_req.rid),
        )


def create_backend(
    server_args: Any, scheduler: Any, dtype: Any = None, hf_config: Any = None
) -> SchedulerSeam:
    """Stands in for `create_mm_receiver` in the scheduler process."""
    from sglang.srt.disaggregation.encoder.receiver import (
        MMReceiverBase,
        _select_mm_processor_prompt,
    )
    from sglang.srt.managers.schedule_batch import Modality
    from sglang.srt.runtime_context import get_disagg, get_serving

    host = SimpleNamespace(scheduler=scheduler, mm_processor=None)
    MMReceiverBase._init_mm_processor(
        host, server_args, hf_config, model_config=scheduler.model_config
    )
    processor = robust_placeholders(host.mm_processor)
    modalities = {member.name: member for member in Modality}

    def make_inputs(request: Any, items: tuple[ReceivedItem, ...]) -> Any:
        prompt = _select_mm_processor_prompt(request, processor)
        return assemble(processor, prompt, items, modalities)

    rundir.claim()
    address = _reachable_address(get_serving().host, get_disagg().encoder_urls)
    receiver = Receiver(address, address, rundir.control_path())
    receiver.start()
    # SGLang's Rust server brings a sleeper without one, which wakes once a second.
    if hasattr(scheduler.idle_sleeper, "poller"):
        scheduler.idle_sleeper.poller.register(receiver.wake_socket, zmq.POLLIN)
    logger.info("EPD receiver: encoders deliver to %s", receiver.endpoint)
    return SchedulerSeam(
        Backend(
            receiver,
            make_inputs,
            abortable=lambda request: MMReceiverBase.create_req(host, request),
            max_wait_s=Settings.from_env().request_timeout_s,
        )
    )


def _split_batch(received: Any) -> list[Any]:
    """A batch whose members wait is taken apart, so that each goes on by itself."""
    batch = getattr(received, "batch", None)
    if batch and any(getattr(member, "need_wait_for_mm_inputs", False) for member in batch):
        return list(batch)
    return [received]


def _reachable_address(serving_host: str | None, encoder_urls: list[str]) -> str:
    """The address to listen on and to tell encoders.

    The serving host if it is one; loopback only if every encoder is there too.
    """
    from sglang.srt.utils.network import get_local_ip_auto

    host = (serving_host or "").strip("[]")
    local = ("127.0.0.1", "localhost", "::1")
    if host in local:
        if encoder_urls and all(any(f"//{name}" in url for name in local) for url in encoder_urls):
            return "127.0.0.1" if host == "localhost" else host
    elif host not in ("", "0.0.0.0", "::"):
        return host
    return get_local_ip_auto()
