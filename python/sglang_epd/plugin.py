"""All hooks on SGLang: on what, of which server or process, and why.

The only place that lists them. Each is on a function that SGLang calls only under an EPD
flag, or returns at once without one, so that an installed but unused package changes
nothing. The server without such a flag that it serves is the decode server
(`seams/decode.py`). `SGLANG_EPD=off` leaves SGLang's in-tree EPD untouched (`entry.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from sglang_epd.seams import (
    bootstrap,
    contract,
    hooks,
    idle,
    large_bodies,
    prefix,
    requests,
    roles,
    server_args,
    stages,
    staging,
    tracing,
    transcription,
    vision_weights,
)
from sglang_epd.seams.hooks import Hook, Kind

_FLAGS = "sglang.srt.arg_groups.pd_disaggregation_hook"
_CONTEXT = "sglang.srt.runtime_context"
_ENCODER = "sglang.srt.disaggregation.encoder"
_HTTP = "sglang.srt.entrypoints.http_server"
_TRANSCRIPTION = "sglang.srt.entrypoints.openai.serving_transcription"
_ENGINE = "sglang.srt.entrypoints.engine"
_CONN = "sglang.srt.disaggregation.common.conn"
_PREFILL = "sglang.srt.disaggregation.prefill"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager"
_SCHEDULER = "sglang.srt.managers.scheduler"
_STAGES = "sglang.srt.managers.scheduler_pp_mixin"
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"
_OUTPUTS = "sglang.srt.managers.scheduler_components.output_streamer"
_LOADS = "sglang.srt.managers.scheduler_components.load_inquirer"
_POLICY = "sglang.srt.managers.schedule_policy"
_BATCH = "sglang.srt.managers.schedule_batch"
_MULTIMODAL = "sglang.srt.managers.mm_schedule"
_ALLOCATOR = "sglang.srt.mem_cache.allocator.base"
_ROLE_SWITCH = "sglang.srt.disaggregation.role_switch"
_KV_POOL = "sglang.srt.mem_cache.kv_cache_configurator"
_RUNNER = "sglang.srt.model_executor.model_runner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_STATS = "sglang.srt.observability.req_time_stats"
_TRACE = "sglang.srt.observability.trace"


def _launch_encoder(args: Any) -> None:
    from sglang_epd.encoder.server import launch

    launch(args)


def _serve_grpc_encoder(args: Any) -> Coroutine[Any, Any, None]:
    """SGLang runs what this returns; the encoder, which has a loop of its own, has ended then."""
    _launch_encoder(args)
    return asyncio.sleep(0)


def _create_mm_receiver(args: Any, scheduler: Any = None, **options: Any) -> Any:
    if scheduler is None:
        from sglang_epd.seams.frontend import create_frontend

        return create_frontend(args, **options)
    from sglang_epd.seams.scheduler import create_backend

    return create_backend(args, scheduler, **options)


def _pull_and_pass_on(original: Any, request_receiver: Any) -> Any:
    pulled, seam = original(request_receiver), request_receiver.mm_receiver
    # None on the ranks that do not lead.
    return pulled if pulled is None or seam is None else seam.pass_on(pulled)


def _process(original: Any, scheduler: Any, recv_reqs: Any) -> None:
    requests = stages.hear(scheduler, recv_reqs)
    original(scheduler, requests)
    prefix.forgo_refused(scheduler, requests)


def _manager(method: str, kind: Kind, function: Callable[..., Any]) -> Hook:
    return Hook(_TOKENIZER, f"TokenizerManager.{method}", kind, function)


# In the launcher of every server, and in each of its processes: a server that needs this
# package does not run without it.
GUARDS = (
    # Also: serve models that are not on SGLang's list, refuse flags that would fail later.
    Hook(_FLAGS, "handle_encoder_disaggregation", "around", server_args.resolve),
    Hook(_CONTEXT, "publish", "after", roles.hold),
)

HOOKS = (
    *GUARDS,
    # --encoder-only: our server instead of the in-tree one.
    Hook(f"{_ENCODER}.http_server", "launch_server", "replace", _launch_encoder),
    Hook(f"{_ENCODER}.grpc_server", "serve_grpc_encoder", "replace", _serve_grpc_encoder),
    # --language-only: our dispatcher (tokenizer process) and receiver (scheduler).
    Hook(f"{_ENCODER}.receiver", "create_mm_receiver", "replace", _create_mm_receiver),
    # ... tokenizer process: our registration of encoders, which wants a token and knows leases.
    Hook(f"{_ENCODER}.receiver", "EncoderBootstrapServer", "replace", bootstrap.BootstrapPlace),
    # ... tokenizer process of an `Engine`: which may be followed by another.
    Hook(_ENGINE, "Engine.shutdown", "after", bootstrap.end),
    # ... tokenizer process: JSON of many parts is parsed one body at a time.
    Hook(_HTTP, "ORJSONRequest.json", "around", large_bodies.read),
    # ... and of a decode server: recordings to be transcribed are decoded on encoders alone.
    Hook(
        _TRANSCRIPTION,
        "OpenAIServingTranscription.create_transcription",
        "around",
        transcription.create,
    ),
    # ... tokenizer process: large media are read in a thread, before the request is begun.
    _manager("generate_request", "around", requests.around("read_first")),
    # ... tokenizer process: how late its event loop is; a large request's turn is over.
    _manager("auto_create_handle_loop", "after", requests.begun),
    # ... tokenizer process: encoders hear that a request is over.
    _manager("abort_request", "after", requests.after("cancel")),
    _manager("_release_req_states_on_failure", "after", requests.after("cancel_refused")),
    # ... tokenizer process: a request whose client has left is aborted; an answer, and a trace,
    # say where the media came from.
    _manager("_wait_one_response", "around", requests.around("attend")),
    _manager("convert_to_span_attrs", "after", tracing.add_sources),
    # ... tokenizer process: a stream that fails before its first token has an HTTP status.
    _manager("_handle_abort_finish_reason", "around", requests.around("answer_before_streaming")),
    # ... tokenizer process, --enable-adaptive-dispatch-to-encoder: images encoded on this server.
    _manager("_init_req_state", "after", requests.noted),
    _manager("_should_dispatch_to_encoder", "around", requests.around("adaptive.should_dispatch")),
    _manager("_tokenize_one_request", "around", requests.around("tokenize")),
    # ... tokenizer process: the samples of a prompt are announced one by one.
    _manager("_send_one_request", "around", requests.around("send")),
    # ... tokenizer process: requests for embeddings wait for encoders, too.
    _manager(
        "_handle_epd_disaggregation_encode_request", "around", requests.around("begin_to_encode")
    ),
    _manager("_create_tokenized_object", "around", requests.around("carry")),
    # ... schedulers: requests whose items have not landed stay with the leading rank.
    Hook(_RECEIVER, "SchedulerRequestReceiver._pull_raw_reqs", "around", _pull_and_pass_on),
    # ... the scheduler with the receiver's thread: leaves it the interpreter while idle.
    Hook(_SCHEDULER, "Scheduler.on_idle", "after", idle.give_way),
    Hook(
        _SCHEDULER,
        "Scheduler._record_scheduler_state_for_paused_engine",
        "after",
        idle.give_way_paused,
    ),
    # ... schedulers: no vision weights in memory.
    Hook(_RUNNER, "ModelRunner.load_model", "around", vision_weights.load),
    Hook(_UPDATER, "_model_load_weights_direct", "around", vision_weights.load_direct),
    # ... schedulers: the prefix cache is asked before a request is queued.
    Hook(_SCHEDULER, "Scheduler._add_request_to_queue", "around", prefix.add_request),
    Hook(_SCHEDULER, "Scheduler.flush_cache", "around", prefix.flush),
    Hook(_POLICY, "PrefillAdder.add_one_req", "around", prefix.add_one),
    Hook(
        _ALLOCATOR, "BaseTokenToKVPoolAllocator.evict_to_free_tokens", "around", prefix.free_tokens
    ),
    Hook(_LOADS, "SchedulerLoadInquirer.get_loads", "after", prefix.count_held),
    Hook(_ROLE_SWITCH, "_reject_reason", "around", prefix.refuse_switch),
    # ... schedulers, --pp-size: embeddings stay with the first stage.
    Hook(_STAGES, "SchedulerPPMixin._pp_send_pyobj_to_next_stage", "around", stages.send),
    # ... and all stages hear of parts of prompts what the first one does. Requests that SGLang has
    # refused without queueing them give their tickets up.
    Hook(_SCHEDULER, "Scheduler.process_input_requests", "around", _process),
    # ... schedulers on an accelerator: embeddings go onto it while it computes.
    Hook(_MULTIMODAL, "get_embedding_chunk", "around", staging.take_rows),
    Hook(_KV_POOL, "mm_runtime_reservation_gb", "around", staging.reserve),
    # ... schedulers: embeddings are given back as soon as SGLang is done with them.
    Hook(_BATCH, "MultimodalInputs.release_features", "after", prefix.drop),
    Hook(
        _PREFILL,
        "SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue",
        "after",
        prefix.release_sent,
    ),
    Hook(
        _OUTPUTS,
        "SchedulerOutputStreamer._stream_output_embedding",
        "after",
        prefix.release_embedded,
    ),
    # ... schedulers: parts of prompts that are prefilled early are answered to no client.
    Hook(_OUTPUTS, "SchedulerOutputStreamer.stream_output", "around", prefix.stream),
    # --language-only prefill, tokenizer process: layouts, for the decode servers.
    Hook(_CONN, "CommonKVBootstrapServer._setup_routes", "after", bootstrap.serve_layouts),
    # Decode, tokenizer process: prompts are laid out by what the prefill server knows.
    # --language-only: our dispatcher gets the parts of the manager.
    _manager("init_disaggregation", "after", requests.made),
    # Prefill and decode, --enable-trace: one trace on both.
    Hook(_STATS, "APIServerReqTimeStats.set_created_time", "around", tracing.begin_root),
    Hook(_TRACE, "TraceCustomIdGenerator.generate_trace_id", "around", tracing.trace_id),
)


def register(*, role: bool) -> None:
    """Hook SGLang in this process.

    With another version of SGLang only the guards are hooked, which end servers that need
    this package, and nothing is changed of the others.

    Args:
        role: whether the server is known to have an EPD role; it may have one anyway.

    Raises:
        ConfigError: it has one, and this package does not fit SGLang.
    """
    installed, wanted = contract.versions()
    hooks.install(HOOKS if installed == wanted else GUARDS)
    if role:
        hooks.require()
