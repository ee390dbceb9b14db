"""The functions of SGLang that this package leans on, and whether they are as they were.

`test/seams/test_contract.py` compares them by importing SGLang; `violations` reads its
bytecode instead, in a tenth of a second, so that `sglang-epd doctor`, and the launcher of a
server with an EPD role (`hooks.require`), can tell before anything starts.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import CodeType

_PINNED = re.compile(r"(sglang(?:-router)?)==([^ ;]+)")

# Modules below `sglang.srt`, and of each: our modules that lean on it, a function or
# Class.method where it is defined, its parameters. "async" marks a coroutine function, or an
# asynchronous generator.
_TABLE = """
arg_groups.model_override_base
    encoder/towers and seams/server_args: model_config_of(server_args)
    seams/server_args: resolving_view(server_args)
arg_groups.overrides
    seams/server_args: declare_resolution(server_args source fields)
arg_groups.pd_disaggregation_hook
    plugin: handle_encoder_disaggregation(server_args)
beam_search.coordinator
    seams/prefix: BeamCoordinator.retire_group(self req)
disaggregation.common.conn
    seams/bootstrap: CommonKVBootstrapServer._setup_routes(self)
disaggregation.encoder.grpc_server
    plugin: async serve_grpc_encoder(server_args)
disaggregation.encoder.http_server
    plugin: launch_server(server_args)
disaggregation.encoder.preprocessor
    encoder/model/preparing: EncoderPreprocessor._load_single_item(self data modality
        frame_count_limit discard_alpha_channel)
    encoder/model/preparing: async EncoderPreprocessor.process_mm_items(self mm_items modality)
    encoder/model/preparing: _convert(data)
disaggregation.encoder.receiver
    encoder/sglang_rpc: EmbeddingData.__init__(self req_id num_parts part_idx grid_dim modality
        embedding embedding_shape error_msg error_code kwargs)
    encoder/sglang_rpc: EmbeddingData.copy_without_embedding(self)
    families/adapter: MMReceiverBase._init_mm_processor(self server_args hf_config model_config)
    plugin: create_mm_receiver(server_args dtype hf_config scheduler transport_mode encode_urls)
    seams/bootstrap: EncoderBootstrapServer(host port urls health_check_interval
        health_check_timeout evicted_ttl)
    seams/bootstrap: EncoderBootstrapServer.close(self)
    seams/bootstrap: EncoderBootstrapServer.list_urls(self)
    seams/scheduler: MMReceiverBase.create_req(self recv_req)
    seams/scheduler: _select_mm_processor_prompt(recv_req mm_processor)
disaggregation.encoder.runtime
    encoder/sglang_rpc: validate_encode_request(request)
disaggregation.encoder.server
    encoder/model/engine: EncoderProfiler.start(self obj)
    encoder/model/engine: EncoderProfiler.step(self)
    encoder/model/engine: EncoderProfiler.stop(self)
    encoder/model/engine: MMEncoder.__init__(self server_args schedule_path dist_init_method rank
        gpu_id)
    encoder/model/preparing: MMEncoder._build_model_mm_items(self mm_feature preprocess_result
        indices modality)
    encoder/model/preparing: MMEncoder.supports_modality(self modality)
    encoder/model/preparing: _get_mm_feature(mm_inputs modality)
disaggregation.prefill
    seams/prefix: SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue(self
        rids_to_check)
    seams/prefix: SchedulerDisaggregationPrefillMixin.release_aborted_prefill_waiting_req(self req)
disaggregation.role_switch
    seams/prefix: _reject_reason(scheduler new_role)
distributed.device_communicators.mooncake_transfer_engine
    transfer/mooncake: get_mooncake_transfer_engine()
    transfer/mooncake: maybe_init_shared_mooncake_transfer_engine(gpu_id)
distributed.parallel_state
    encoder/model/loading: init_distributed_environment(world_size rank distributed_init_method
        local_rank backend timeout moe_a2a_backend recovered_rank max_world_size)
    encoder/model/loading: set_custom_all_reduce(enable)
entrypoints.engine
    seams/bootstrap: Engine.shutdown(self)
entrypoints.http_server
    seams/large_bodies: async ORJSONRequest.json(self)
    seams/large_bodies: get_global_state()
entrypoints.openai.serving_transcription
    seams/transcription: async OpenAIServingTranscription.create_transcription(self audio_data model
        language response_format temperature stream raw_request timestamp_granularities)
managers.io_struct
    seams/tokenizer: GenerateReqInput.__getitem__(self i)
    seams/tokenizer: GenerateReqInput.contains_mm_input(self)
managers.mm_schedule
    seams/staging: get_embedding_chunk(embedding extend_prefix_len extend_seq_len items_offset)
managers.schedule_batch
    language/assembly: MultimodalDataItem.set_identity(self identity)
    seams/prefix: MultimodalInputs.release_features(self)
    seams/prefix: Req._compute_max_prefix_len(self input_len)
managers.schedule_policy
    seams/prefix: PrefillAdder.add_one_req(self req has_chunked_req truncation_align_size)
managers.scheduler
    seams/idle: Scheduler._record_scheduler_state_for_paused_engine(self)
    seams/idle: Scheduler.is_fully_idle(self for_health_check ignore_waiting)
    seams/idle: Scheduler.on_idle(self)
    seams/prefix: Scheduler._add_request_to_queue(self req is_retracted)
    seams/prefix: Scheduler._release_aborted_request(self req)
    seams/prefix: Scheduler.collect_inflight_reqs(self)
    seams/prefix: Scheduler.flush_cache(self empty_cache)
    seams/stages: Scheduler.process_input_requests(self recv_reqs)
managers.scheduler_components.load_inquirer
    seams/prefix: SchedulerLoadInquirer.get_loads(self)
managers.scheduler_components.output_streamer
    seams/prefix: SchedulerOutputStreamer._stream_output_embedding(self reqs)
    seams/prefix: SchedulerOutputStreamer.stream_output(self reqs return_logprob skip_req)
managers.scheduler_components.request_receiver
    plugin: SchedulerRequestReceiver._pull_raw_reqs(self)
managers.scheduler_pp_mixin
    seams/stages: SchedulerPPMixin._pp_send_pyobj_to_next_stage(self data async_send)
managers.tokenizer_manager
    seams/adaptive: TokenizerManager._should_dispatch_to_encoder(self obj)
    seams/adaptive: async TokenizerManager._tokenize_one_request(self obj)
    seams/embeddings: TokenizerManager._create_tokenized_object(self obj input_text input_ids
        input_embeds mm_inputs token_type_ids)
    seams/embeddings: TokenizerManager._handle_epd_disaggregation_encode_request(self obj)
    seams/requests: TokenizerManager._init_req_state(self obj request)
    seams/requests: TokenizerManager.init_disaggregation(self start_pd_bootstrap_service)
    seams/tokenizer: async TokenizerManager._handle_abort_finish_reason(self out state is_stream)
    seams/tokenizer: TokenizerManager._release_req_states_on_failure(self request_states)
    seams/tokenizer: async TokenizerManager._send_one_request(self tokenized_obj)
    seams/tokenizer: TokenizerManager._wait_one_response(self obj request)
    seams/tokenizer: TokenizerManager.abort_request(self rid abort_all)
    seams/tokenizer: TokenizerManager.auto_create_handle_loop(self)
    seams/tokenizer: async TokenizerManager.generate_request(self obj request)
    seams/tracing: TokenizerManager.convert_to_span_attrs(self state recv_obj i)
mem_cache.allocator.base
    seams/prefix: BaseTokenToKVPoolAllocator.evict_to_free_tokens(self tree_cache num_tokens)
mem_cache.common
    seams/prefix: _req_radix_key(tree_cache req token_ids max_prefix_len)
mem_cache.kv_cache_configurator
    seams/staging: mm_runtime_reservation_gb(is_multimodal mm_feature_transport)
mem_cache.unified_radix_cache
    seams/prefix: UnifiedRadixCache.match_prefix(self params)
    seams/prefix: UnifiedRadixCache.unlock(self lock)
model_executor.model_runner
    plugin: ModelRunner.load_model(self)
model_executor.model_runner_components.weight_updater
    seams/vision_weights: _model_load_weights_direct(model named_tensors)
model_loader
    encoder/model/loading: get_model(model_config load_config device_config)
model_loader.loader
    checkpoint and families/reading: DefaultModelLoader._prepare_weights(self model_name_or_path
        revision fall_back_to_pt allow_patterns_overrides)
    checkpoint: ShardedStateLoader._prepare_weights(self model_name_or_path revision)
    families/reading: _initialize_model(model_config load_config quant_config)
multimodal.processors.base_processor
    families/adapter: BaseMultimodalProcessor.compute_mrope_positions(self input_ids mm_items)
    families/adapter: async BaseMultimodalProcessor.process_mm_data_async(self image_data audio_data
        input_text request_obj kwargs)
    seams/precomputed: BaseMultimodalProcessor._get_preprocessed_input_format(data)
    language/assembly: BaseMultimodalProcessor.get_validated_mm_data(self prompt embeddings kwargs)
    seams/prompt: BaseMultimodalProcessor.build_input_ids(self prompt img_grid_thw video_grid_thw
        audio_seq_lens)
multimodal.processors.internvl
    families/family: InternVLProcessor._ensure_placeholders_before_assistant(self prompt placeholder
        want)
    families/family: InternVLProcessor._resolve_video_num_frames(self requested num_videos text_len
        image_tile_cnt)
    families/family: InternVLProcessor._token_len(self text)
multimodal.processors.minimax_m3_vl
    seams/prompt: MiniMaxM3VLProcessor._image_placeholder_text(self grid)
    seams/prompt: MiniMaxM3VLProcessor._precomputed_media_items(self input_ids embeddings
        frames_per_video)
    seams/prompt: MiniMaxM3VLProcessor._video_placeholder_text(self grid timestamps)
    seams/prompt: MiniMaxM3VLProcessor.get_mm_data(self prompt embeddings kwargs)
multimodal.processors.qwen_audio
    seams/prompt: Qwen2AudioMultimodalProcessor._build_transcription_prompt(self input_text)
multimodal.processors.qwen_vl
    encoder/model/preparing: smart_nframes(ele total_frames video_fps)
    seams/decode: async QwenVLImageProcessor.process_mm_data_async(self image_data input_text
        request_obj args kwargs)
    seams/prompt: QwenVLImageProcessor.build_input_ids_with_timestamps(self prompt embeddings
        img_grid_thw video_grid_thw video_timestamps)
observability.metrics_collector
    encoder/sglang_metrics: EncoderMetricsCollector.__init__(self labels)
    encoder/sglang_metrics: EncoderMetricsCollector.inc_cache_evictions(self modality count)
    encoder/sglang_metrics: EncoderMetricsCollector.inc_requests_received(self modality)
    encoder/sglang_metrics: EncoderMetricsCollector.inc_requests_total(self modality status)
    encoder/sglang_metrics: EncoderMetricsCollector.observe_mm_items_per_batch(self count modality)
    encoder/sglang_metrics: EncoderMetricsCollector.observe_mm_items_per_request(self count
        modality)
    encoder/sglang_metrics: EncoderMetricsCollector.observe_model_forward(self latency_seconds
        modality)
    encoder/sglang_metrics: EncoderMetricsCollector.observe_preprocess(self latency_seconds
        modality)
    encoder/sglang_metrics: EncoderMetricsCollector.observe_queue_wait(self latency_seconds
        modality)
    encoder/sglang_metrics: EncoderMetricsCollector.observe_request_e2e_latency(self
        latency_seconds modality)
    encoder/sglang_metrics: EncoderMetricsCollector.observe_transfer(self latency_seconds backend)
    encoder/sglang_metrics: EncoderMetricsCollector.record_cache_files(self hit_files total_files
        modality)
    encoder/sglang_metrics: EncoderMetricsCollector.record_cache_tokens(self hit_tokens
        total_tokens modality)
observability.req_time_stats
    seams/tracing: APIServerReqTimeStats.set_created_time(self ts)
observability.trace
    seams/tracing: TraceCustomIdGenerator.generate_trace_id(self)
plugins
    encoder/towers: load_plugins()
runtime_context
    encoder and seams: get_device()
    encoder and seams: get_disagg()
    encoder and seams: get_exec()
    encoder and seams: get_memory()
    encoder and seams: get_mm()
    encoder and seams: get_model()
    encoder and seams: get_observability()
    encoder and seams: get_parallel()
    encoder and seams: get_serving()
    seams/early: get_schedule()
    encoder/server and seams/roles: publish(server_args role hf_config ranks)
server_args
    encoder/towers: ServerArgs.resolve_once(self)
session.session_controller
    seams/scheduler: SessionController.get(self session_id)
utils.common
    encoder/server: configure_logger(server_args prefix)
    decoding/sound: load_audio(audio_file sr mono)
    encoder/towers: maybe_reindex_device_id(gpu_id)
    families/films: load_video(video_file use_gpu)
utils.network
    encoder/model/engine: NetworkAddress.to_tcp(self)
    encoder/model/engine and encoder/towers: get_free_port_below_ephemeral(low high attempts)
    encoder/server: NetworkAddress.to_url(self scheme)
    encoder/server and seams/receiving: get_local_ip_auto(fallback)
utils.video_decoder
    encoder/model/preparing: VideoDecoderWrapper.__init__(self source device num_decode_threads)
    families/films: VideoDecoderWrapper.__getitem__(self idx)
    families/films: VideoDecoderWrapper.close(self)
    families/films: VideoDecoderWrapper.get_frames_as_tensor(self indices)
    families/films: VideoDecoderWrapper.get_frames_at(self indices)
"""
_ROW = re.compile(
    r"^(?P<module>\S+)$|^    (?P<ours>[^:]+): (?P<path>(async )?[\w.]+)\((?P<parameters>[^)]*)\)$",
    re.MULTILINE,
)


def read(table: str) -> dict[tuple[str, str, str], str]:
    """(our module, module below `sglang.srt`, function or Class.method): its parameters, as
    above."""
    found, module = {}, ""
    for row in _ROW.finditer(table):
        module = row["module"] or module
        if row["ours"]:
            mark, _, path = row["path"].rpartition(" ")
            found[row["ours"], module, path] = " ".join([*mark.split(), *row["parameters"].split()])
    return found


SIGNATURES = read(_TABLE)


def pinned() -> dict[str, str]:
    """The versions that this package is for, by the names of SGLang's packages."""
    found = (_PINNED.fullmatch(one) for one in requires("sglang-epd") or ())
    return {one[1]: one[2] for one in found if one}


def versions() -> tuple[str, str]:
    """Of SGLang: the one that is installed, and the one that this package is for.

    Without a local part ("+cu129"), which says how a version was built.
    """
    try:
        installed = version("sglang").partition("+")[0]
    except PackageNotFoundError:
        installed = "without a version"
    return installed, pinned()["sglang"]


def violations(srt: Path | None = None) -> list[str]:
    """Differences from the expected SGLang, a sentence each, with the dependent module of ours.

    Args:
        srt: the folder of `sglang.srt`, unless it is the installed one's.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
    """
    if srt is None:
        package = importlib.util.find_spec("sglang")
        if package is None or not package.submodule_search_locations:
            raise ModuleNotFoundError("sglang is not installed")
        srt = Path(package.submodule_search_locations[0]) / "srt"
    source = _Source(srt)
    found = []
    for (ours, module, path), expected in SIGNATURES.items():
        name = f"sglang.srt.{module}.{path}"
        parameters = source.parameters(module, path)
        if parameters is None:
            found.append(f"{ours} leans on {name}, and {path} is gone")
            continue
        if parameters != expected:
            found.append(f"{ours} leans on {name}({expected}), which takes ({parameters})")
    return found


def _inner(code: CodeType | None, name: str) -> CodeType | None:
    """What the code of a module or a class defines by that name."""
    every = () if code is None else code.co_consts
    return next((one for one in every if isinstance(one, CodeType) and one.co_name == name), None)


class _Source:
    """SGLang's modules, by the bytecode that Python keeps of them, which is read in a fiftieth of
    the time that syntax trees take."""

    def __init__(self, srt: Path) -> None:
        self._srt = srt
        self._code = functools.cache(self._compile)

    def parameters(self, module: str, path: str) -> str | None:
        """The parameters of a function, a method, or a class's constructor, as in the table; None
        unless the module defines it itself."""
        name, _, method = path.partition(".")
        code = _inner(self._code(module), name)
        if code is None:
            return None
        made = False
        if not code.co_flags & inspect.CO_OPTIMIZED:  # of a class
            code, made = _inner(code, method or "__init__"), not method
        if code is None:
            return None
        here, end = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
        names, keywords = list(code.co_varnames[:here]), code.co_varnames[here:end]
        for flag, more in ((inspect.CO_VARARGS, keywords), (inspect.CO_VARKEYWORDS, ())):
            if code.co_flags & flag:
                names.append(code.co_varnames[end])
                end += 1
            names += more
        # A class is called without its first parameter, and so is a class method.
        told = " ".join(names[1:] if made or names[:1] == ["cls"] else names)
        waits = code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
        return f"async {told}" if waits else told

    def _compile(self, module: str) -> CodeType | None:
        place = self._srt.joinpath(*module.split("."))
        files = (place.with_suffix(".py"), place / "__init__.py")
        file = next((file for file in files if file.is_file()), None)
        whole = f"sglang.srt.{module}"
        return SourceFileLoader(whole, str(file)).get_code(whole) if file else None
