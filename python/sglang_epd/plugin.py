"""Entry point: which hooks, on what, and why. The only place that says so.

Every target is a function that SGLang calls only under an EPD flag, or our side of it
returns at once without one, so an installed but unused package changes nothing. The one
server without such a flag that it serves is the decode server (`seams/decode.py`), unless
`SGLANG_EPD_CONTENT_IDENTITY` asks for more (`seams/identities.py`).
`SGLANG_EPD=off` leaves SGLang's in-tree EPD untouched.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_epd.seams import (
    bootstrap,
    discovery,
    parts,
    rundir,
    server_args,
    tracing,
    vision_weights,
)
from sglang_epd.seams.hooks import hook

SWITCH = "SGLANG_EPD"
_SRT = "sglang.srt"


def enabled() -> bool:
    """Whether this package takes over EPD in this process."""
    return os.environ.get(SWITCH, "").strip().lower() not in {"off", "0", "false", "no"}


def register() -> None:
    """Called by SGLang in the launcher and in each of its processes."""
    if not enabled():
        return
    rundir.draw_run_id()

    # Flags: serve models that are not on SGLang's list, refuse what would fail later.
    module = f"{_SRT}.arg_groups.pd_disaggregation_hook"
    hook(module, "handle_encoder_disaggregation", server_args.resolve, "around")

    # --encoder-only: our server instead of the in-tree one.
    module = f"{_SRT}.disaggregation.encoder.http_server"
    hook(module, "launch_server", _launch_encoder, "replace")

    # --language-only: our dispatcher (tokenizer process) and receiver (scheduler).
    module = f"{_SRT}.disaggregation.encoder.receiver"
    hook(module, "create_mm_receiver", _create_mm_receiver, "replace")
    # ... and our registration of encoders, which wants a token and knows leases.
    hook(module, "EncoderBootstrapServer", discovery.BootstrapPlace, "replace")

    # --language-only: requests whose items have not landed stay with the leading rank.
    module = f"{_SRT}.managers.scheduler_components.request_receiver"
    hook(module, "SchedulerRequestReceiver._pull_raw_reqs", _pull_and_pass_on, "around")

    # --language-only: no vision weights in memory.
    module = f"{_SRT}.model_executor.model_runner"
    hook(module, "ModelRunner.load_model", vision_weights.load, "around")

    # Prefill and decode apart: the decode server asks the prefill server for the layouts.
    # By its own setting: a server that encodes itself names media as encoders do.
    module = f"{_SRT}.disaggregation.common.conn"
    hook(module, "CommonKVBootstrapServer._setup_routes", bootstrap.serve_layouts, "after")
    module = f"{_SRT}.managers.tokenizer_manager"
    hook(module, "TokenizerManager.init_disaggregation", parts.made, "after")

    # --language-only: where a request's media came from, in its trace.
    hook(module, "TokenizerManager.convert_to_span_attrs", tracing.add_sources, "after")

    # Prefill and decode apart, traced: one trace on both.
    module = f"{_SRT}.observability"
    began = "APIServerReqTimeStats.set_created_time"
    hook(f"{module}.req_time_stats", began, tracing.begin_root, "around")
    generated = "TraceCustomIdGenerator.generate_trace_id"
    hook(f"{module}.trace", generated, tracing.trace_id, "around")


def _launch_encoder(args: Any) -> None:
    from sglang_epd.encoder.server import launch

    launch(args)


def _pull_and_pass_on(original: Any, request_receiver: Any) -> Any:
    if request_receiver.mm_receiver is None:
        return original(request_receiver)
    from sglang_epd.seams.scheduler import pull_and_pass_on

    return pull_and_pass_on(original, request_receiver)


def _create_mm_receiver(args: Any, scheduler: Any = None, **options: Any) -> Any:
    if scheduler is None:
        from sglang_epd.seams.tokenizer import create_frontend

        return create_frontend(args, **options)
    from sglang_epd.seams.scheduler import create_backend

    return create_backend(args, scheduler, **options)
