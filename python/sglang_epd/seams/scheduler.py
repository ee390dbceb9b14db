"""The scheduler's `mm_receiver`: holds requests back until their items are there.

Leans on `managers.scheduler.Scheduler`, which calls
`create_mm_receiver(server_args, dtype=, hf_config=, scheduler=)` in every rank, and again when
its role is switched;
`scheduler_components.request_receiver.SchedulerRequestReceiver`, which each tick pulls
requests on the rank that leads a group (`_pull_raw_reqs`), broadcasts them to the others,
and calls `process_waiting_requests` on all of them; `Scheduler.abort_request`, which calls
`abort_waiting_requests`; the metrics reporter, which reads `len(waiting_list)`; the poller
of `scheduler_components.idle_sleeper.IdleSleeper`; and two methods of the in-tree
`MMReceiverBase` that build its multimodal processor and an abortable request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import zmq

from sglang_epd import logs
from sglang_epd.families import family_of
from sglang_epd.families.adapter import load_processor
from sglang_epd.language.assembly import HasLayout, assemble, lay_out_some
from sglang_epd.language.backend import Backend, Failure, Leader
from sglang_epd.language.early import Early
from sglang_epd.language.parts import Parts
from sglang_epd.language.prefix import PrefixGate, Resting, mark
from sglang_epd.language.relay import Receive, Relay
from sglang_epd.language.uploads import Stager
from sglang_epd.seams import (
    early,
    embeddings,
    idle,
    prefix,
    receiving,
    rundir,
    stages,
    staging,
    tracing,
)
from sglang_epd.seams.prompt import as_tokenized, lays_out
from sglang_epd.transfer.arena import ReceivedItem
from sglang_epd.transfer.control import Claims
from sglang_epd.wire.http import ItemLayout
from sglang_epd.wire.messages import Expect

logger = logging.getLogger(__name__)

# Data-parallel replicas start each for itself, and the one that receives may compile kernels for
# all of them first, which takes SGLang up to twenty minutes. If it ends, so does the server.
_CONNECT_S = 3600.0
# A replica of attention waits so long for each of the others, which hear nothing of its requests.
_REPLICA_POLL_S = 0.01


class SchedulerSeam:
    """Stands as `Scheduler.mm_receiver` while this package serves EPD.

    Args:
        backend: makes runnable requests of the leader's; None in later pipeline stages, which
            get them made.
        leader: on the rank that takes requests in; None on the others.
        gate: where requests wait that the prefix cache was asked about.
        stager: on a device, copies embeddings to it.
        parts: of prompts; later pipeline stages hear what the first does with them.
    """

    # For the CPU platform: no need to poll for embeddings.
    wakes_idle_scheduler = True

    def __init__(
        self,
        backend: Backend | None = None,
        leader: Leader | None = None,
        gate: PrefixGate | None = None,
        stager: Stager | None = None,
        parts: Parts | None = None,
    ) -> None:
        self._backend = backend
        self._leader = leader
        self._gate = gate
        self._stager = stager
        self._parts = parts

    @property
    def waiting_list(self) -> list[Any]:
        return self._leader.waiting if self._leader is not None else []

    def pass_on(self, pulled: list[Any]) -> list[Any]:
        """On the leading rank, before the broadcast: hold back requests that wait for items."""
        if self._leader is None:
            return pulled
        passed = self._leader.pass_on(pulled)
        prefix.note_waiting(self._leader, passed)
        return passed

    def process_waiting_requests(self, recv_reqs: list[Any]) -> tuple[list[Any], list[Failure]]:
        """On every rank: the requests that can go on, and those that failed."""
        tidied = self._gate is not None and self._gate.tidy()
        if self._stager is not None:
            self._stager.let_go()
        assert self._backend is not None, "SGLang asks the first pipeline stage alone"
        ready, failed = self._backend.sort_out(recv_reqs)
        for request, *_ in failed:
            # SGLang sends this along where the model makes embeddings, and cannot send None.
            request.embedding = []
        if self._parts is not None and self._parts.stages and (self._parts.heard or tidied):
            heard, self._parts.heard = stages.Heard(self._parts.heard), []
            return [heard, *ready], failed
        return ready, failed

    def hear(self, heard: stages.Heard) -> None:
        """On every rank, before a tick's requests are queued: do as the first stage did."""
        if self._backend is None and self._gate is not None and self._parts is not None:
            self._gate.tidy()
            self._parts.told(heard.calls)

    def abort_waiting_requests(self, recv_req: Any) -> None:
        """Give up the requests that an `AbortReq` names (all whose id starts with its)."""

        def named(rid: str) -> bool:
            return bool(recv_req.abort_all or rid.startswith(recv_req.rid))

        if self._leader is not None:
            self._leader.abandon(named)
        if self._parts is not None:
            self._parts.abort(named)


def _streams(scheduler: Any, session: str) -> bool:
    found = scheduler.session_controller.get(session)
    return found is not None and found.streaming


def _relay(elsewhere: range) -> Relay | None:
    """This rank's way to, or from, ranks on other hosts; None where it has none.

    A group of ranks is made by all of the world, whether they belong to it or not.
    """
    if not elsewhere:
        return None
    from sglang.srt.runtime_context import get_device

    ranks = [0, *elsewhere]
    # After as long SGLang ends a server whose forward pass does not end.
    limit_s = get_device().watchdog_timeout
    group = dist.new_group(
        ranks, backend="gloo", timeout=timedelta(seconds=limit_s) if limit_s else None
    )
    return None if group == dist.GroupMember.NON_GROUP_MEMBER else Relay(group)


class _Inputs:
    """The multimodal inputs of requests, as a processor of SGLang's lays their prompts out.

    Args:
        reads_text: whether it reads a prompt's text, rather than token ids.
        context_tokens: as of `assemble`.
    """

    def __init__(self, processor: Any, *, reads_text: bool, context_tokens: int) -> None:
        self._processor = processor
        self._context_tokens = context_tokens
        self._reads_text = reads_text

    def make(self, request: Any, items: Sequence[ReceivedItem]) -> Any:
        return assemble(self._processor, self._prompt(request, items), items, self._context_tokens)

    def make_bare(self, request: Any, expect: Expect) -> Any:
        items = [
            ItemLayout(key, layout) for key, layout in zip(expect.keys, expect.layouts, strict=True)
        ]
        return self.make_part(request, items, expect)

    def make_part(
        self, request: Any, items: Sequence[ReceivedItem | ItemLayout], expect: Expect | None
    ) -> Any:
        output, rows = lay_out_some(
            self._processor, self._prompt(request, items), items, self._context_tokens
        )
        if expect is not None:
            mark(output, rows, Resting(request, expect))
        return output

    def _prompt(self, request: Any, items: Sequence[HasLayout]) -> str | list[int]:
        from sglang.srt.disaggregation.encoder.receiver import _select_mm_processor_prompt

        given = [item.layout.modality for item in items]
        ids = None
        if not self._reads_text:
            ids = as_tokenized(self._processor, request.input_ids, given)
        if ids is not None:
            return ids
        prompt: str | list[int] = _select_mm_processor_prompt(request, self._processor)
        return prompt


def create_backend(
    server_args: Any, scheduler: Any, dtype: Any = None, hf_config: Any = None
) -> SchedulerSeam:
    """Stands in for `create_mm_receiver` in a scheduler process. One that is given the other role
    (`--enable-pd-role-switch`), idle as it is then, goes on with what it has."""
    from sglang.srt.disaggregation.encoder.receiver import MMReceiverBase
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.runtime_context import get_memory, get_parallel, get_serving

    logs.install()
    receiving_already = getattr(scheduler, "request_receiver", None)
    if receiving_already is not None:
        seam: SchedulerSeam = receiving_already.mm_receiver
        return seam
    idle.Hosted.language = True
    parallel = get_parallel()
    ranks = receiving.ranks(parallel)
    relay = _relay(ranks.elsewhere)
    if parallel.pp_rank:
        return _later_stage(scheduler, ranks)
    registered = load_processor(server_args, scheduler.model_config)
    processor = lays_out(registered, hf_config.architectures[0])
    # Adapters put texts into texts; and token ids that were cut off are not the prompt's.
    reads_text = bool(family_of(hf_config.architectures[0]) or get_serving().allow_auto_truncate)
    context_tokens = scheduler.model_config.context_len
    inputs = _Inputs(processor, reads_text=reads_text, context_tokens=context_tokens)
    parts = None if reads_text else early.parts(scheduler, ranks)
    prefix.Installed.releases = True
    arena, leader, gate = None, None, None
    receive: Receive
    if not ranks.reads:
        assert relay is not None
        secret, receive = relay.share(rundir.secret()), relay.receive
    else:
        if ranks.reader == 0:
            # Hosts have as many of its ranks each.
            receiving.start(ranks.readers, copies=ranks.readers if ranks.elsewhere else 1)
        claims = Claims(rundir.control_path(), ranks.first_in_group, ranks.group)
        arena, secret = claims.connect(_CONNECT_S), rundir.secret()
        receive = partial(arena.receive, reader=ranks.reader)
        if relay is not None:
            relay.share(secret)
            receive = relay.sending(receive)
        if ranks.leads:
            asks = receiving.asks_prefix(parallel, get_memory().disable_radix_cache)
            in_parts = None
            if parts is not None:
                in_parts = early.leading(parts, claims, processor, secret)
            leader = Leader(
                claims,
                secret,
                prefix=asks,
                resume=tracing.resume,
                early=in_parts,
                streams=partial(_streams, scheduler),
            )
            prefix.Installed.leader = leader
            replicas = parallel.attn_dp_enabled
            _wake(scheduler.idle_sleeper, claims.socket, in_parts, replicas=replicas)
    if parts is not None or parallel.pp_size == 1:
        gate = prefix.install(scheduler, leader, receive, parts)
    host = SimpleNamespace(scheduler=scheduler)

    def abortable(request: Any) -> Any:
        generates = isinstance(request, TokenizedGenerateReqInput)
        return (
            MMReceiverBase.create_req(host, request) if generates else embeddings.abortable(request)
        )

    backend = Backend(
        receive,
        ranks.reader,
        assemble=inputs.make,
        abortable=abortable,
        secret=secret,
        lay_out=inputs.make_bare,
        gate=gate,
        span_of=tracing.span_of,
        parts=parts,
        lay_out_part=inputs.make_part,
    )
    return SchedulerSeam(backend, leader, gate, staging.connect(arena), parts)


def _wake(
    sleeper: Any, claims: zmq.Socket[bytes], in_parts: Early | None, *, replicas: bool
) -> None:
    """Have an idle scheduler woken by what the receiver says, and by a part that pauses.

    Args:
        replicas: whether it has to join in what other replicas run, of which no socket tells.
    """
    # SGLang's Rust server brings a sleeper without a poller, which wakes once a second.
    if not hasattr(sleeper, "poller"):
        return
    sleeper.poller.register(claims, zmq.POLLIN)
    if replicas:
        sleeper.poller = early.Waking(sleeper.poller, lambda: _REPLICA_POLL_S)
    if in_parts is not None:
        sleeper.poller = early.Waking(sleeper.poller, in_parts.due_s)


def _later_stage(scheduler: Any, ranks: receiving.Ranks) -> SchedulerSeam:
    """Of a stage that gets its requests from the one before, and no rows."""
    parts = early.parts(scheduler, ranks)
    if parts is None:
        return SchedulerSeam()
    gate = prefix.install(scheduler, None, lambda settled: [], parts)
    return SchedulerSeam(gate=gate, parts=parts)
