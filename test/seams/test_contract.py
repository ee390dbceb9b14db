"""Everything of SGLang's that this package leans on is where it was, shaped as it was.

A failure says which of our modules is concerned and what moved. It is to be answered
there, by reading what SGLang does now, and only then here.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import sglang_epd
from sglang_epd.families import IN_TREE
from sglang_epd.plugin import HOOKS
from sglang_epd.seams import contract, server_args
from sglang_epd.seams.contract import SIGNATURES, read, violations
from sglang_epd.seams.identities import REQUEST_OPTIONS, name_items

PACKAGE = Path(sglang_epd.__file__).parent
Find = Callable[[str, str], Any]

# Of classes, by module of SGLang: our module, and the attributes that are read or set.
ATTRIBUTES = read("""
arg_groups.fields.disagg
    flags: Disagg(encoder_only language_only encoder_transfer_backend encoder_urls
        encoder_register_urls encoder_bootstrap_port enable_adaptive_dispatch_to_encoder
        disaggregation_mode disaggregation_bootstrap_port enable_pd_role_switch)
arg_groups.fields.memory
    flags: Memory(disable_radix_cache)
arg_groups.fields.mm
    flags: Mm(enable_prefix_mm_cache enable_mm_global_cache allowed_media_domains mm_process_config)
arg_groups.fields.model
    flags: Model(model_path revision load_format download_dir quantization is_embedding
        model_loader_extra_config weight_cache_mode)
arg_groups.fields.observability
    flags: Observability(log_level_http enable_metrics)
arg_groups.fields.parallel
    flags: Parallel(tp_size pp_size dp_size attn_dp_size attn_cp_size nnodes)
arg_groups.fields.schedule
    flags: Schedule(max_queued_requests)
arg_groups.fields.serving
    flags: Serving(host port served_model_name tokenizer_worker_num grpc_mode smg_grpc_mode api_key
        ssl_certfile ssl_keyfile ssl_keyfile_password ssl_ca_certs enable_ssl_refresh
        enable_tokenizer_batch_encode return_input_ids)
configs.load_config
    checkpoint: LoadConfig(load_format download_dir model_loader_extra_config)
    checkpoint: LoadFormat(AUTO DUMMY MISTRAL NPCACHE PT SHARDED_STATE)
    encoder/model/loading: LoadConfig(load_format model_loader_extra_config)
configs.model_config
    seams/server_args: ModelConfig(joint_head_config)
constrained.grammar_manager
    seams/prefix: GrammarManager(grammar_queue)
disaggregation.common.conn
    seams/bootstrap: CommonKVBootstrapServer(app)
disaggregation.encoder.preprocessor
    encoder/model/preparing: EncoderPreprocessResult(mm_inputs grid_thw token_counts)
    encoder/model/engine: EncoderPreprocessor(io_executor preproc_executor)
    encoder/model/preparing: EncoderPreprocessor(vision_config image_processor video_processor
        audio_processor)
disaggregation.encoder.server
    encoder/model/engine: EncoderProfiler(profiler)
    encoder/model/engine: MMEncoder(model model_config model_type preprocessor device gpu_id
        _embedding_dtype _embedding_dims profiler)
distributed.device_communicators.mooncake_transfer_engine
    seams/receiving and encoder/server: MooncakeTransferEngine(hostname engine)
managers.load_snapshot
    seams/prefix: LoadSnapshot(num_waiting_reqs num_total_tokens num_active_tokens)
managers.io_struct
    seams/adaptive: GenerateReqInput(image_data stream background)
    seams/adaptive: TokenizedGenerateReqInput(mm_inputs)
    seams/early: TokenizedGenerateReqInput(session_params session_id input_embeds token_type_ids
        positional_embed_overrides multi_item_delimiter_indices token_indices_to_pool
        return_hidden_states return_routed_experts return_indexer_topk lora_id stream
        return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask
        require_reasoning custom_logit_processor time_stats bootstrap_host bootstrap_room)
    seams/embeddings: EmbeddingReqInput(rid is_single batch_size image_data video_data audio_data
        background)
    seams/embeddings: TokenizedEmbeddingReqInput(rid input_ids input_text mm_inputs sampling_params
        priority lora_id http_worker_ipc time_stats)
    seams/prefix: PdRoleSwitchReqInput(new_role)
    seams/scheduler: AbortReq(rid abort_all)
    seams/scheduler: BatchTokenizedGenerateReqInput(batch)
    seams/scheduler: TokenizedGenerateReqInput(rid input_ids input_text mm_inputs
        need_wait_for_mm_inputs encoder_urls)
    seams/tokenizer: GenerateReqInput(rid is_single batch_size parallel_sample_num
        need_wait_for_mm_inputs encoder_urls image_data video_data audio_data bootstrap_host
        bootstrap_port bootstrap_room stream extra_key cache_salt mm_content_hashes)
managers.schedule_batch
    families/proof: MultimodalDataItem(offsets padding_values padding_sequence)
    language/assembly: MultimodalDataItem(modality precomputed_embeddings)
    language/assembly: MultimodalProcessorOutput(mm_items input_ids)
    language/parts: Req(already_computed cached_tokens cached_tokens_device cached_tokens_host
        cached_tokens_storage _cache_breakdown_computed finished_reason retracted_stain
        skip_radix_cache_insert)
    modality: Modality(IMAGE VIDEO AUDIO)
    seams/adaptive: MultimodalDataItem(offsets)
    seams/identities: MultimodalDataItem(modality set_identity)
    seams/identities: MultimodalProcessorOutput(mm_items padded_input_ids)
    seams/prefix: Req(finished rid session positional_embed_overrides origin_input_ids output_ids
        prefix_len multimodal_inputs is_prefill_only)
    seams/prefix: ScheduleBatch(reqs batch_is_full)
managers.schedule_policy
    seams/prefix: AddReqResult(CONTINUE NO_TOKEN)
    seams/prefix: PrefillAdder(can_run_list)
managers.scheduler
    seams/early: Scheduler(is_generation page_size)
    seams/idle: Scheduler(idle_sleeper _prefill_decode_interval_remaining)
    seams/prefix: Scheduler(tree_cache waiting_queue disagg_prefill_bootstrap_queue chunked_req
        running_batch disagg_prefill_inflight_queue beam_coordinator grammar_manager
        prefill_decode_interval prefill_decode_interval_min_bs)
    seams/scheduler: Scheduler(mm_receiver idle_sleeper model_config session_controller)
managers.scheduler_components.idle_sleeper
    seams/scheduler: IdleSleeper(poller)
managers.scheduler_components.request_receiver
    seams/scheduler: SchedulerRequestReceiver(mm_receiver)
managers.tokenizer_manager
    seams/bootstrap: TokenizerManager(bootstrap_server mm_processor context_len)
    seams/tokenizer: ReqState(obj)
    seams/tokenizer: TokenizerManager(mm_receiver mm_processor context_len rid_to_state)
mem_cache.base_prefix_cache
    seams/prefix: MatchPrefixParams(key req)
    seams/prefix: MatchResult(device_prefix_len last_device_node)
model_executor.model_runner
    seams/vision_weights: ModelRunner(model model_config server_args is_draft_worker)
model_loader.loader
    checkpoint: ShardedStateLoader(pattern)
sampling.sampling_params
    language/manifest: SamplingParams(custom_params)
session.session_controller
    seams/scheduler: Session(streaming)
multimodal.processors.base_processor
    encoder/model/engine: BaseMultimodalProcessor(io_executor)
    seams/prompt: BaseMultimodalProcessor(mm_tokens _tokenizer)
    seams/prompt: MultimodalSpecialTokens(image_token image_token_regex)
plugins.hook_registry
    seams/hooks: HookRegistry(_hooks)
    seams/hooks: HookSource(plugin_name)
    seams/hooks: HookType(REPLACE)
runtime_context
    seams/receiving: ParallelContext(tp_rank dp_rank pp_rank attn_tp_rank attn_cp_rank
        attn_dp_rank attn_tp_size attn_dp_enabled)
utils.common
    language/planner: ImageData(url detail content_hash)
utils.video_decoder
    encoder/model/preparing: VideoDecoderWrapper(frame_shape avg_fps)
""")


def _calls(table: str) -> dict[tuple[str, str, str], list[str]]:
    found: dict[tuple[str, str, str], list[str]] = {}
    calls: list[str] = []
    for line in table.splitlines():
        if line.startswith(" " * 8):
            calls[-1] += f" {line.strip()}"
        elif line.startswith(" "):
            calls.append(line.strip())
        elif line and not line.startswith("#"):
            ours, _, target = line.partition(": ")
            module, _, path = target.partition(" ")
            calls = found[ours, module, path] = []
    return found


# How SGLang calls us, as its source says it, and in what order: our module, and a module and a
# function or class of SGLang's.
CALLS = _calls("""
seams/tokenizer: managers.tokenizer_manager TokenizerManager
    self.mm_receiver = create_mm_receiver( self.server_args, dtype=self.model_config.dtype,
        hf_config=self.model_config.hf_config, encode_urls=self.encoder_urls,
    self._release_req_states_on_failure(request_states) raise
    if dispatch_ready is not None:
    state = self.rid_to_state[obj.rid] return self._stream_one_response(
    await self._handle_abort_finish_reason( out, state, is_stream )
    dispatch_ready = self.mm_receiver.send_encode_request( obj, time_stats_json=time_stats_json,
        on_dispatch_error=
seams/prefix: managers.scheduler Scheduler._get_new_batch_prefill_raw
    req.init_next_round_input(self.tree_cache)
    res = adder.add_one_req( req,
    if res != AddReqResult.CONTINUE:
seams/prefix: managers.schedule_policy PrefillAdder.add_one_req
    self._commit_prefill_admission(req, admission, mamba_gap_reserve)
seams/prefix: managers.mm_schedule get_embedding_chunk
    elif extend_start_index > end: start_index += end - start + 1
    embedding_chunk = embedding[start_index:end_index]
seams/tokenizer: managers.tokenizer_manager TokenizerManager._tokenize_one_request
    or get_disagg().encoder_transfer_backend == "zmq_to_tokenizer"
    mm_inputs = await self.mm_receiver.recv_mm_data( request_obj=obj,
        mm_processor=self.mm_processor, prompt=mm_processor_input,
        need_wait_for_mm_inputs=obj.need_wait_for_mm_inputs, )
    if mm_inputs and mm_inputs.input_ids is not None: input_ids = mm_inputs.input_ids
seams/adaptive: managers.tokenizer_manager TokenizerManager.generate_request
    self._init_req_state(obj, request)
    try: if get_disagg().language_only: self._handle_epd_disaggregation_encode_request(obj)
    tokenized_obj = await self._tokenize_one_request(obj)
seams/adaptive: managers.tokenizer_manager TokenizerManager._handle_batch_output
    if state.time_stats.first_token_time == 0.0:
seams/adaptive: managers.tokenizer_manager TokenizerManager._handle_epd_disaggregation_encode_request
    if get_disagg().enable_adaptive_dispatch_to_encoder: should_dispatch =
        self._should_dispatch_to_encoder(obj)
    if should_dispatch: obj.need_wait_for_mm_inputs = True
    in [ "zmq_to_scheduler", "mooncake", ]:
    else: obj.need_wait_for_mm_inputs = False
# The fields that SGLang reads of requests for embeddings, too, which have none.
seams/embeddings: managers.tokenizer_manager TokenizerManager._tokenize_one_request
    need_wait_for_mm_inputs=obj.need_wait_for_mm_inputs,
    and not obj.need_wait_for_mm_inputs
    return self._create_tokenized_object(
seams/embeddings: managers.scheduler Scheduler._handle_embedding_request
    image_inputs = self._get_multimodal_inputs(recv_req.mm_inputs)
seams/embeddings: managers.tokenizer_manager TokenizerManager._batch_tokenize_and_process
    self._create_tokenized_object( req, req.text, input_ids_list[i], None, None, token_type_ids )
seams/adaptive: managers.tokenizer_manager TokenizerManager._tokenize_one_request
    if mm_inputs is None: if get_disagg().language_only:
    in ["zmq_to_scheduler", "mooncake"] and not obj.need_wait_for_mm_inputs ): #
seams/adaptive: managers.tokenizer_manager TokenizerManager._handle_batch_request
    tokenized_obj = await self._tokenize_one_request(tmp_obj)
    *(self._tokenize_one_request(obj) for obj in objs)
seams/staging: managers.mm_schedule _get_precomputed_embedding
    get_embedding_chunk( item.precomputed_embeddings, prefix_length[i], extend_len, item.offsets,
        )[0]
    (t.device for t in precomputed_embeddings if t.is_cuda)
    else torch.concat(precomputed_embeddings)
# Embeddings are looked at in the first pipeline stage only, which has made its own request of
# what it sends on.
seams/stages: managers.mm_utils prepare_mm_inputs
    language_model.pp_group.is_first_rank:
seams/stages: managers.scheduler_pp_mixin SchedulerPPMixin.event_loop_pp
    recv_reqs = self.ingest_requests()
    self.send_req_work = self._pp_send_pyobj_to_next_stage( recv_reqs,
seams/stages: managers.scheduler_pp_mixin SchedulerPPMixin.event_loop_pp_disagg_prefill
    recv_reqs = self.ingest_requests()
    self.send_req_work = self._pp_send_pyobj_to_next_stage( recv_reqs,
seams/staging: managers.mm_utils embed_mm_inputs
    embedding, mask, input_ids = get_embedding_and_mask(
    multimodal_model.separate_deepstack_embeds(embedding)
seams/staging: managers.scheduler Scheduler.run_batch
    with self.forward_stream_ctx: self.forward_stream.wait_stream(self.schedule_stream)
seams/staging: mem_cache.kv_cache_configurator KVCacheConfigurator
    rest_memory = available_gpu_memory - slack_gb - mm_reservation_gb
seams/staging: model_executor.model_runner_components.kv_pool_runtime compute_post_capture_kv_resize
    int(max(0.0, free_gb - headroom_gb - mm_reservation_gb) * (1 << 30))
seams/adaptive: utils.common load_image
    if isinstance(image_file, Image.Image):
encoder/model/preparing: disaggregation.encoder.preprocessor EncoderPreprocessor._load_mm_processor
    _audio_proc = AutoProcessor.from_pretrained(
    self.audio_processor = _audio_proc
encoder/model/preparing: disaggregation.encoder.preprocessor EncoderPreprocessor
    mm_process_config.get("vision_config", {})
    image_config = self.vision_config.get("image", {})
encoder/model/preparing: multimodal.processors.base_processor BaseMultimodalProcessor
    self.image_config = mm_process_config.get("image", {})
    self.video_config = mm_process_config.get("video", {})
    self.audio_config = mm_process_config.get("audio", {})
families/adapter: multimodal.processors.base_processor BaseMultimodalProcessor._temporary_fast_processor_cuda_pool
    with torch.cuda.use_mem_pool(pool, device=device):
encoder/model/preparing: multimodal.processors.qwen_vl _get_processor_video_config
    if key not in QWEN_VIDEO_PREPROCESS_CONFIG_KEYS
seams/bootstrap: disaggregation.common.conn CommonKVBootstrapServer.__init__
    self.app = web.Application()
    self._setup_routes()
    self.thread = threading.Thread(target=self._run_server, daemon=True) self.run()
seams/requests: managers.tokenizer_manager TokenizerManager.init_disaggregation
    self.bootstrap_server = ( start_disagg_service() if start_pd_bootstrap_service else None )
    self.mm_receiver = create_mm_receiver(
seams/roles: entrypoints.http_server _setup_and_run_http_server
    app_path = envs.SGLANG_HTTP_SERVER_APP_PATH.get()
    uvicorn.run(app_path, **uvicorn_options)
seams/roles: managers.multi_tokenizer_mixin TokenizerWorker.__init__
    start_pd_bootstrap_service=False
seams/bootstrap: managers.tokenizer_manager TokenizerManager.init_disaggregation
    from sglang.srt.disaggregation.encoder.receiver import ( EncoderBootstrapServer, )
    self.encoder_bootstrap_server = EncoderBootstrapServer( host=get_serving().host,
        port=get_disagg().encoder_bootstrap_port, urls=self.encoder_urls, ) self.mm_receiver =
        create_mm_receiver(
# Whose token ids schedulers take for those of the text.
seams/scheduler: managers.tokenizer_manager TokenizerManager._validate_one_request
    if self.allow_auto_truncate:
    del input_ids[_max_req_len:]
seams/scheduler: managers.tokenizer_manager TokenizerManager._tokenize_texts
    encoded = self.tokenizer(tokenizer_input, **tokenizer_kwargs)
seams/tokenizer: managers.tokenizer_manager TokenizerManager._tokenize_one_request
    if ( self.mm_processor and contains_mm_input and getattr( self.mm_processor,
        "generates_input_ids_from_raw_prompt", False, ) ): input_ids = None
seams/decode: managers.tokenizer_manager TokenizerManager._tokenize_one_request
    mm_processor_input = ( input_ids if self.mm_processor.prefer_tokenized_input and input_ids is
        not None else (input_text or input_ids) )
    mm_inputs = await self.mm_processor.process_mm_data_async( image_data=obj.image_data,
        audio_data=obj.audio_data, input_text=mm_processor_input, request_obj=obj,
        max_req_input_len=self.max_req_input_len, )
    input_ids = mm_inputs.input_ids
seams/decode: entrypoints.openai.serving_base OpenAIServingBase.handle_request
    except HTTPException as e: return self.create_error_response( message=e.detail,
        err_type=str(e.status_code), status_code=e.status_code )
    except ValueError as e:
seams/tracing: managers.tokenizer_manager TokenizerManager._handle_batch_output
    span_attrs = ( self.convert_to_span_attrs(state, recv_obj, i) if
        state.time_stats.trace_ctx.tracing_enable else None )
    state.time_stats.set_finished_time( ts=first_output_time, span_attrs=span_attrs )
seams/tracing: observability.req_time_stats APIServerReqTimeStats.set_created_time
    self.trace_ctx.trace_req_start(convert_time_to_realtime_ns(ts))
seams/tracing: observability.trace process_tracing_init
    id_generator=TraceCustomIdGenerator()
seams/tracing: observability.req_time_stats APIServerReqTimeStats.set_finished_time
    attrs = dict(span_attrs) if span_attrs else {}
    self.trace_ctx.trace_req_finish( convert_time_to_realtime_ns(ts), attrs=attrs )
seams/identities: managers.scheduler Scheduler._try_apply_padded_mm_input_ids
    if padded_input_ids is None or recv_req.input_ids is None: return False
seams/identities: multimodal.processors.qwen_vl QwenVLImageProcessor.compose_image_artifacts
    item.set_hash(artifact.feature_hash)
    padded_input_ids=padded_input_ids,
seams/decode: managers.schedule_batch MultimodalDataItem.set_pad_value
    if self.pad_value is not None: return
seams/prefix: managers.scheduler_components.batch_result_processor SchedulerBatchResultProcessor
    if req.multimodal_inputs is not None and req.session is None:
        req.multimodal_inputs.release_features()
seams/prefix: disaggregation.prefill SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue
    elif poll == KVPoll.Success:
    release_kv_cache(req, self.tree_cache, checkpoint=True)
    return done_reqs
seams/scheduler: managers.scheduler Scheduler
    self.mm_receiver = create_mm_receiver( self.server_args, dtype=self.model_config.dtype,
        hf_config=self.model_config.hf_config, scheduler=self, )
    self.mm_receiver.abort_waiting_requests(recv_req)
seams/scheduler: managers.scheduler_components.request_receiver SchedulerRequestReceiver._apply_mm_receiver
    get_parallel().pp_rank == 0
    in ["zmq_to_scheduler", "mooncake"]
    recv_reqs, abort_reqs = self.mm_receiver.process_waiting_requests(recv_reqs)
    for req, error_msg, error_code in abort_reqs:
    isinstance(error_code, HTTPStatus)
seams/scheduler: managers.scheduler_components.request_receiver SchedulerRequestReceiver._pull_raw_reqs
    if get_parallel().attn_tp_rank == 0 and get_parallel().attn_cp_rank == 0: recv_reqs = []
    else: recv_reqs = None
seams/scheduler: managers.scheduler Scheduler.process_input_requests
    for recv_req in recv_reqs:
    output = self._request_dispatcher(recv_req)
seams/scheduler: managers.scheduler_components.metrics_reporter
    len(self.scheduler.mm_receiver.waiting_list)
language/assembly and seams/prompt: multimodal.processors.base_processor BaseMultimodalProcessor.get_mm_data
    kwargs.get("img_grid_thw", None)
    kwargs.get("video_grid_thw", None)
    kwargs.get("audio_feature_lens", None)
    input_ids, offsets, modality_list = self.build_input_ids( prompt, img_grid_thw=img_grid_thw,
        video_grid_thw=video_grid_thw, audio_seq_lens=audio_feature_lens, )
families/family: multimodal.processors.base_processor BaseMultimodalProcessor
    prefer_tokenized_input = False
    self._tokenizer = _tokenizer_of(self._processor)
    self._tokenizer_auto_adds_specials = len(self._tokenizer.encode(
    bos = getattr(tokenizer, "bos_token", None)
    if bos and input_text.startswith(bos): kwargs.setdefault("add_special_tokens", False)
families/adapter: multimodal.processors.base_processor BaseMultimodalProcessor._load_single_item
    img, _ = load_image(data, cls.gpu_image_decode)
    if cls.smart_rgb_conversion: return smart_to_rgb(img)
families/adapter: utils.common _load_image
    if is_jpeg_with_cuda(image_bytes, gpu_image_decode):
seams/prompt: multimodal.processors.minimax_m3_vl MiniMaxM3VLProcessor.get_mm_data
    input_ids=input_ids, mm_items=self._precomputed_media_items(
    im_start_id=self.IM_START_TOKEN_ID, im_end_id=self.IM_END_TOKEN_ID,
        im_token_id=self.IM_TOKEN_ID, video_token_id=self.VIDEO_TOKEN_ID, )
families/family: multimodal.processors.llava LlavaMultimodalProcessor
    self.inner = self._get_sgl_processor_cls(vision_type)(
families/family: multimodal.processors.glm4v Glm4vImageProcessor
    self.IMAGE_START_TOKEN = "<|begin_of_image|>"
    self.IMAGE_END_TOKEN = "<|end_of_image|>"
    self.VIDEO_START_TOKEN = "<|begin_of_video|>"
    self.VIDEO_END_TOKEN = "<|end_of_video|>"
families/family: multimodal.processors.internvl InternVLProcessor
    IMAGE_PLACEHOLDER_TOKEN = "<image>"
    VIDEO_PLACEHOLDER_TOKEN = "<video>"
    requested_frames = int( kwargs.get("video_num_frames", self.DEFAULT_VIDEO_NUM_FRAMES) )
    num_frames = self._resolve_video_num_frames( requested=requested_frames,
        num_videos=len(base_output.videos), text_len=self._token_len(base_output.input_text or
        prompt), image_tile_cnt=int(sum(num_patches_list)) if num_patches_list else 0, )
    img_ph = "<<<__IMG_PLACEHOLDER__>>>"
    input_text_mid = input_text_mid.replace(self.IMG_CONTEXT, img_ph)
    input_text_updated = input_text_updated.replace(img_ph, image_tokens, 1)
    input_ids_tensor = self.tokenizer(input_text_updated, return_tensors="pt")[
families/films: utils.common load_video
    if isinstance(video_file, (list, tuple, torch.Tensor, np.ndarray)): return video_file
families/films: multimodal.processors.base_processor BaseMultimodalProcessor._load_single_item
    load_video(data, use_gpu=cls.video_preprocessing_device != "cpu")
encoder/model/loading: disaggregation.encoder.server MMEncoder.__init__
    self.model = load_model( model_config=self.model_config, load_config=self.load_config,
        device_config=self.device_config, )
families/reading: model_loader.loader DefaultModelLoader.load_model
    model = _initialize_model( model_config, self.load_config, quant_config, )
families/reading: model_loader.loader DefaultModelLoader.load_weights_only
    model.load_weights(weights)
families/reading: model_loader.loader ShardedStateLoader.load_model
    state_dict = self._filter_subtensors(model.state_dict())
    state_dict[key].shape
families/reading: model_executor.model_runner_components.load_model_utils build_load_config
    load_format=load_format or get_model().load_format,
encoder/model/engine: arg_groups.serving_hook handle_multimodal_feature_transport
    if cfg.encoder_only and requested_transport in ("cuda_ipc", "cuda_vmm"):
    encoder outputs.", requested_transport, ) requested_transport = "cpu"
encoder/model/graphs: models.qwen3_vl Qwen3VLMoeVisionModel
    self.graph_runners = graph_runners_dict[self.device.type](self)
encoder/model/graphs: models.qwen2_5_vl Qwen2_5_VisionTransformer
    self.cuda_graph_runner = ViTCudaGraphRunner(self)
encoder/model/graphs: models.internvl InternVisionEncoder
    self.cuda_graph_runner = InternViTCudaGraphRunner(self)
encoder/model/graphs: multimodal.vit_cuda_graph_runner ViTCudaGraphRunner
    with self._capture_context(), torch.cuda.graph(graph):
    out = self.block_output[graph_key]
encoder/model/graphs: multimodal.kimi_k3_vit_cuda_graph_runner KimiK3ViTCudaGraphRunner.__init__
    self.capacity = capacity
encoder/model/loading: utils.common make_layers
    assert not pp_size or num_hidden_layers >= pp_size
# Requests have a place before the receiver is made, which `attach` looks for.
seams/tokenizer: managers.tokenizer_manager TokenizerManager.__init__
    self.init_running_status()
    self.init_disaggregation(
seams/tokenizer: managers.tokenizer_manager TokenizerManager.init_running_status
    self.rid_to_state
# What waits is held back before the broadcast, and sorted out after it by every rank.
seams/scheduler: managers.scheduler_components.request_receiver SchedulerRequestReceiver.recv_requests
    recv_reqs = self._pull_raw_reqs()
    recv_reqs = self._broadcast_reqs_across_ranks(recv_reqs, local_reqs)
    recv_reqs = self._apply_mm_receiver(recv_reqs)
    return recv_reqs
transfer/mooncake: distributed.device_communicators.mooncake_transfer_engine maybe_init_shared_mooncake_transfer_engine
    get_disagg().encoder_only and get_disagg().encoder_transfer_backend == "mooncake"
    get_disagg().language_only and get_disagg().encoder_transfer_backend == "mooncake"
# Schedulers' places are counted in replicas or in attention groups.
seams/receiving: runtime_context num_dp_ranks_of
    one of the two is one
# Without that flag one batch holds the one kind or the other.
seams/adaptive: managers.mm_utils prepare_mm_inputs
    enable_adaptive_dispatch_to_encoder: # Split by precomputed
# What an HTTP request says of encoders is heard.
seams/adaptive: entrypoints.openai.serving_chat OpenAIServingChat
    tokenizer_manager.generate_request( adapted_request, raw_request )
seams/adaptive: entrypoints.http_server serve_generate_request
    generate_request( obj, request )
    generate_request( obj, request )
""")  # noqa: E501 - names are as long as SGLang has them


@pytest.fixture
def find(sglang: Callable[[str], ModuleType]) -> Find:
    def find(seam: str, name: str) -> Any:
        module, _, path = name.partition(":")
        sglang("utils")  # imports everything, without its warnings
        found: Any = importlib.import_module(f"sglang.srt.{module}")
        for part in path.split(".") if path else ():
            if not hasattr(found, part):
                pytest.fail(f"{seam} leans on sglang.srt.{module}.{path}, which is gone")
            found = getattr(found, part)
        return found

    return find


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("target", SIGNATURES, ids=lambda target: f"{target[0]}-{target[2]}")
def test_a_function_takes_what_it_took(find, target):
    seam, module, path = target
    function = find(seam, f"{module}:{path}")
    is_async, expected = SIGNATURES[target].startswith("async "), SIGNATURES[target]
    names = list(inspect.signature(function).parameters)
    assert names == expected.removeprefix("async ").split(), (
        f"{seam} leans on sglang.srt.{module}.{path}, whose parameters are now {names}"
    )
    found = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    assert found == is_async, (
        f"{seam} leans on sglang.srt.{module}.{path} being {'' if is_async else 'not '}async"
    )


def test_each_hook_has_its_target_here():
    known = {f"sglang.srt.{module}.{path}" for _, module, path in SIGNATURES}
    assert {hook.target for hook in HOOKS} <= known


def test_the_modules_that_lean_on_sglang_are_where_the_contract_says():
    leaning = [*SIGNATURES, *ATTRIBUTES, *CALLS]
    ours = {name for target in leaning for name in target[0].split(" and ")}
    for name in ours - {"flags"}:  # of all of them
        assert (PACKAGE / f"{name}.py").is_file() or (PACKAGE / name).is_dir(), name


def attributes(cls: type) -> set[str]:
    """What objects of `cls` have: declared, inherited, or set by its own methods."""
    own = {name for base in cls.__mro__ for name in (*vars(base), *_annotations(base))}
    assigned = re.findall(r"\bself\.(\w+)\s*(?::[^=\n]+)?(?:=|\+=)[^=]", inspect.getsource(cls))
    return own | set(assigned)


def _annotations(cls: type) -> dict[str, Any]:
    return vars(cls).get("__annotations__", {})


@pytest.mark.parametrize("target", ATTRIBUTES, ids=lambda target: f"{target[0]}-{target[2]}")
def test_an_object_has_what_it_had(find, target):
    seam, module, path = target
    missing = set(ATTRIBUTES[target].split()) - attributes(find(seam, f"{module}:{path}"))
    assert not missing, (
        f"{seam} leans on sglang.srt.{module}.{path} having {', '.join(sorted(missing))}"
    )


@pytest.mark.parametrize("target", CALLS, ids=lambda target: f"{target[0]}-{target[1]}")
def test_we_are_called_as_we_were(find, target):
    seam, module, path = target
    source = one_line(inspect.getsource(find(seam, f"{module}:{path}")))
    for call in CALLS[target]:
        _, found, source = source.partition(call)
        assert found, f"{seam} is no longer called as `{call}`, in this order, in {module}"


def test_what_is_created_elsewhere_is_created_there_by_name(sglang):
    """`create_mm_receiver` is imported by name; the registry must find these two."""
    created = sglang("disaggregation.encoder.receiver").create_mm_receiver
    for module in ("managers.scheduler", "managers.tokenizer_manager"):
        assert sglang(module).create_mm_receiver is created


def test_sglangs_own_list_of_models_is_the_one_we_know(sglang):
    check = sglang("arg_groups.pd_disaggregation_hook").handle_encoder_disaggregation
    listed = {
        name
        for constant in check.__code__.co_consts
        for name in (constant if isinstance(constant, tuple | frozenset) else ())
        if isinstance(name, str) and name.endswith(("Generation", "CausalLM"))
    }
    assert listed == IN_TREE
    message = server_args._NOT_LISTED.format("{model_arch}")
    assert f'f"{message} "' in inspect.getsource(check)


def test_layouts_carry_all_that_sglangs_encoder_sends(sglang):
    """Beside an embedding it sends what a function says, all of which `Preparer` sends; and a
    second embedding, of the sound in MiMo-V2's videos, which are refused."""
    receiver = sglang("disaggregation.encoder.receiver")
    beside = sglang("disaggregation.encoder.server")._build_mm_aux_data
    read, sent = set(receiver._GENERAL_IMAGE_META_ATTRS), set()
    for model_type in ("qwen3_vl", "kimi_k3", "mimo_v2"):
        read |= {*receiver.video_meta_attrs_for(model_type)}
        sent |= beside({}, model_type).keys()
    assert read == sent
    of_sound = {name for name in read if name.startswith("video_audio_")}
    assert of_sound > {*receiver._VIDEO_META_TENSOR_ATTRS}
    assert read - of_sound == {"video_timestamps", "second_per_grid_ts", "original_image_sizes"}


def test_sglangs_encoder_drops_transparency_which_one_server_of_kimi_k3_shows(sglang):
    encoder = sglang("disaggregation.encoder.preprocessor").EncoderPreprocessor
    load = inspect.signature(encoder._load_single_item)
    assert load.parameters["discard_alpha_channel"].default is True
    assert "discard_alpha" not in inspect.getsource(encoder._submit_data_loading_tasks)
    # Imported, it would look for an accelerator's kernels.
    one_server = (
        Path(inspect.getfile(encoder)).parents[2] / "multimodal" / "processors" / "kimi_k3.py"
    )
    assert "discard_alpha_channel=False" in one_server.read_text()


def test_the_prompts_of_a_batch_do_not_carry_what_a_user_wrote_into_it(sglang):
    module = sglang("managers.io_struct")
    batch = module.GenerateReqInput(
        text=["a", "b"],
        image_data=["1", "2"],
        need_wait_for_mm_inputs=True,
        encoder_urls=["forged"],
    )
    batch.normalize_batch_and_arguments()
    assert batch[0].need_wait_for_mm_inputs is None
    assert batch[0].encoder_urls is None
    assert batch[0] is batch[0], "what is set on a prompt of a batch stays set"


def test_an_identity_is_a_key_long(sglang):
    item = sglang("managers.schedule_batch").MultimodalDataItem(
        modality=sglang("managers.schedule_batch").Modality.IMAGE
    )
    item.set_identity(bytes(range(32)))
    assert item.hash == int.from_bytes(bytes(range(8)), "big")
    with pytest.raises(ValueError, match="32 bytes"):
        item.set_identity(bytes(31))


def test_a_request_asks_no_more_of_the_processing_of_its_media(sglang):
    """What is asked of an item is in its key; what is asked here is not."""
    fields = sglang("managers.io_struct").GenerateReqInput.__dataclass_fields__
    marks = ("image", "video", "audio", "mm_", "patch", "processor")
    of_media = {name for name in fields if any(mark in name for mark in marks)}
    harmless = {
        *("image_data", "video_data", "audio_data", "modalities", "need_wait_for_mm_inputs"),
        "custom_logit_processor",
        # Set by SGLang after the items have been named, or compared with the media.
        *("mm_hashes", "mm_content_hashes"),
    }
    assert of_media - harmless == set(REQUEST_OPTIONS)


def test_an_item_that_is_named_anew_is_in_the_prompt_by_its_new_name(sglang):
    batch = sglang("managers.schedule_batch")
    item = batch.MultimodalDataItem(modality=batch.Modality.IMAGE, offsets=[(1, 3)])
    item.set_hash(7)
    output = batch.MultimodalProcessorOutput(input_ids=[5, 9, 9, 9, 6], mm_items=[item])
    output.padded_input_ids = output.build_padded_input_ids(output.input_ids, output.mm_items)
    name_items(output, {"IMAGE": [bytes(range(32))]})
    inputs = batch.MultimodalInputs.from_processor_output(output)
    assert inputs.padded_input_ids is None
    assert inputs.mm_items[0].identity == bytes(range(32))
    assert len(set(inputs.mm_items[0].padding_values())) == 4
    inputs.release_features()


def test_an_idle_scheduler_waits_on_a_poller(sglang):
    sleeper = sglang("managers.scheduler_components.idle_sleeper").IdleSleeper(sockets=[])
    assert callable(sleeper.poller.register)


def test_every_transfer_backends_bootstrap_server_has_our_routes(sglang):
    """None sets up routes of its own, so the hook on the base class reaches them all."""
    base = sglang("disaggregation.common.conn").CommonKVBootstrapServer
    for backend in ("mooncake", "nixl"):
        module = importlib.import_module(f"sglang.srt.disaggregation.{backend}.conn")
        for name, cls in vars(module).items():
            if name.endswith("BootstrapServer"):
                assert issubclass(cls, base)
                assert cls._setup_routes is base._setup_routes


def test_an_item_without_features_becomes_a_schedulers_item(sglang):
    """A decode server's items: laid out and identified, with nothing to embed."""
    batch = sglang("managers.schedule_batch")
    item = batch.MultimodalDataItem(modality=batch.Modality.IMAGE, offsets=[(1, 3)])
    item.set_identity(bytes(range(32)))
    output = batch.MultimodalProcessorOutput(input_ids=[5, 9, 9, 9, 6], mm_items=[item])
    inputs = batch.MultimodalInputs.from_processor_output(output)
    assert inputs.mm_items[0].pad_value == item.pad_value
    assert inputs.compute_mm_token_counts() == (3, 0, 0)
    inputs.release_features()


def test_what_was_typed_is_plain_and_makes_the_same_arguments_again(sglang):
    """A worker of the encoder resolves the flags itself, from what crosses to it."""
    cls = sglang("server_args").ServerArgs
    assert issubclass(cls, msgspec.Struct)
    typed = msgspec.structs.asdict(cls(model_path="dummy", tp_size=2))
    assert set(typed) >= {
        "dp_size",
        "tp_size",
        "nccl_port",
        "encoder_transfer_backend",
        "encoder_register_urls",
        "random_seed",
    }
    packed = msgspec.msgpack.encode(typed)
    again = cls(**msgspec.msgpack.decode(packed))
    assert msgspec.msgpack.encode(msgspec.structs.asdict(again)) == packed


_MODULE = """
def plain(a, b=1, *more, c, **rest): ...

async def waits(a): ...

async def yields(a):
    yield a

class Own:
    def __init__(self, a): ...

    @classmethod
    def made(cls, a, *, b): ...

    async def asked(self, a): ...
"""


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("plain", "a b more c rest"),
        ("waits", "async a"),
        ("yields", "async a"),
        ("Own", "a"),
        ("Own.made", "a b"),
        ("Own.asked", "async self a"),
    ],
)
def test_the_check_without_imports_knows_all_kinds_of_definitions(
    tmp_path, monkeypatch, path, parameters
):
    (tmp_path / "module.py").write_text(_MODULE)
    monkeypatch.setattr(contract, "SIGNATURES", {("ours", "module", path): parameters})
    assert violations(tmp_path) == []
    monkeypatch.setattr(contract, "SIGNATURES", {("ours", "module", path): "other"})
    assert violations(tmp_path) == [
        f"ours leans on sglang.srt.module.{path}(other), which takes ({parameters})"
    ]


def test_the_check_without_imports_sees_what_the_tests_above_see(tmp_path):
    assert violations() == []
    srt = tmp_path / "srt"
    srt.mkdir()
    (srt / "runtime_context.py").write_text("def publish(server_args): ...\n")
    found = violations(srt)
    assert len(found) == len(SIGNATURES)
    (moved,) = [one for one in found if ".publish" in one]
    assert "seams/roles" in moved
    assert "hf_config ranks), which takes (server_args)" in moved
    assert any("create_mm_receiver is gone" in one for one in found)
