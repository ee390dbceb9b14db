"""The functions of SGLang that this package leans on, and whether they are as they were.

`test/seams/test_contract.py` compares them by importing SGLang; `violations` reads its
source instead, in a second, so that `sglang-epd doctor`, and the launcher of a server with
an EPD role (`hooks.require`), can tell before anything starts.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

_PINNED = re.compile(r"(sglang(?:-router)?)==([^ ;]+)")
_SRT = "sglang.srt."
# A name may be handed on by so many modules.
_MOST_IMPORTS = 5

# (our module, module below sglang.srt, function or Class.method): its parameters.
# "async" in front marks a coroutine function, or an asynchronous generator.
SIGNATURES: dict[tuple[str, str, str], str] = {
    ("plugin", "arg_groups.pd_disaggregation_hook", "handle_encoder_disaggregation"): (
        "server_args"
    ),
    ("plugin", "disaggregation.encoder.http_server", "launch_server"): "server_args",
    ("plugin", "disaggregation.encoder.receiver", "create_mm_receiver"): (
        "server_args dtype hf_config scheduler transport_mode encode_urls"
    ),
    (
        "plugin",
        "managers.scheduler_components.request_receiver",
        "SchedulerRequestReceiver._pull_raw_reqs",
    ): "self",
    ("plugin", "model_executor.model_runner", "ModelRunner.load_model"): "self",
    (
        "families/adapter",
        "multimodal.processors.base_processor",
        "BaseMultimodalProcessor.process_mm_data_async",
    ): "async self image_data audio_data input_text request_obj kwargs",
    (
        "families/adapter",
        "multimodal.processors.base_processor",
        "BaseMultimodalProcessor.compute_mrope_positions",
    ): "self input_ids mm_items",
    (
        "families/family",
        "multimodal.processors.internvl",
        "InternVLProcessor._ensure_placeholders_before_assistant",
    ): "self prompt placeholder want",
    (
        "families/family",
        "multimodal.processors.internvl",
        "InternVLProcessor._resolve_video_num_frames",
    ): "self requested num_videos text_len image_tile_cnt",
    ("families/family", "multimodal.processors.internvl", "InternVLProcessor._token_len"): (
        "self text"
    ),
    ("families/films", "utils.video_decoder", "VideoDecoderWrapper.__getitem__"): "self idx",
    ("families/films", "utils.video_decoder", "VideoDecoderWrapper.get_frames_at"): "self indices",
    ("families/films", "utils.video_decoder", "VideoDecoderWrapper.get_frames_as_tensor"): (
        "self indices"
    ),
    ("families/films", "utils.common", "load_video"): "video_file use_gpu",
    ("families/films", "utils.video_decoder", "VideoDecoderWrapper.close"): "self",
    (
        "encoder/model/preparing",
        "disaggregation.encoder.preprocessor",
        "EncoderPreprocessor._load_single_item",
    ): "self data modality frame_count_limit discard_alpha_channel",
    ("decoding/sound", "utils.common", "load_audio"): "audio_file sr mono",
    (
        "encoder/model/loading",
        "model_loader",
        "get_model",
    ): "model_config load_config device_config",
    (
        "checkpoint and families/reading",
        "model_loader.loader",
        "DefaultModelLoader._prepare_weights",
    ): "self model_name_or_path revision fall_back_to_pt allow_patterns_overrides",
    ("families/reading", "model_loader.loader", "DefaultModelLoader._get_all_weights"): (
        "self model_config model"
    ),
    (
        "seams/roles and encoder/server",
        "runtime_context",
        "publish",
    ): "server_args role hf_config ranks",
    ("seams/server_args", "arg_groups.overrides", "resolving_view"): "server_args",
    ("seams/tokenizer", "managers.tokenizer_manager", "TokenizerManager.generate_request"): (
        "async self obj request"
    ),
    ("seams/tokenizer", "managers.tokenizer_manager", "TokenizerManager.auto_create_handle_loop"): (
        "self"
    ),
    ("seams/tokenizer", "managers.tokenizer_manager", "TokenizerManager.abort_request"): (
        "self rid abort_all"
    ),
    (
        "seams/tokenizer",
        "managers.tokenizer_manager",
        "TokenizerManager._release_req_states_on_failure",
    ): "self request_states",
    (
        "seams/tokenizer",
        "managers.tokenizer_manager",
        "TokenizerManager._handle_abort_finish_reason",
    ): "async self out state is_stream",
    ("seams/tokenizer", "managers.tokenizer_manager", "TokenizerManager._wait_one_response"): (
        "self obj request"
    ),
    ("seams/tracing", "managers.tokenizer_manager", "TokenizerManager.convert_to_span_attrs"): (
        "self state recv_obj i"
    ),
    (
        "seams/tracing",
        "observability.req_time_stats",
        "APIServerReqTimeStats.set_created_time",
    ): "self ts",
    ("seams/tracing", "observability.trace", "TraceCustomIdGenerator.generate_trace_id"): "self",
    ("seams/prefix", "managers.scheduler", "Scheduler._add_request_to_queue"): (
        "self req is_retracted"
    ),
    ("seams/prefix", "managers.scheduler", "Scheduler.flush_cache"): "self empty_cache",
    ("seams/prefix", "managers.scheduler", "Scheduler._release_aborted_request"): "self req",
    (
        "seams/prefix",
        "disaggregation.prefill",
        "SchedulerDisaggregationPrefillMixin.release_aborted_prefill_waiting_req",
    ): "self req",
    ("seams/prefix", "managers.schedule_policy", "PrefillAdder.add_one_req"): (
        "self req has_chunked_req truncation_align_size"
    ),
    ("seams/prefix", "managers.schedule_batch", "ScheduleBatch.check_decode_mem"): (
        "self selected_indices"
    ),
    ("seams/prefix", "managers.schedule_batch", "Req._compute_max_prefix_len"): "self input_len",
    ("seams/prefix", "mem_cache.common", "_req_radix_key"): (
        "tree_cache req token_ids max_prefix_len"
    ),
    ("seams/prefix", "mem_cache.unified_radix_cache", "UnifiedRadixCache.match_prefix"): (
        "self params"
    ),
    ("seams/prefix", "mem_cache.unified_radix_cache", "UnifiedRadixCache.unlock"): "self lock",
    ("seams/prefix", "managers.schedule_batch", "MultimodalInputs.release_features"): "self",
    (
        "seams/prefix",
        "disaggregation.prefill",
        "SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue",
    ): "self rids_to_check",
    ("seams/staging", "managers.mm_schedule", "get_embedding_chunk"): (
        "embedding extend_prefix_len extend_seq_len items_offset"
    ),
    ("seams/staging", "mem_cache.kv_cache_configurator", "mm_runtime_reservation_gb"): (
        "is_multimodal mm_feature_transport"
    ),
    ("seams/large_bodies", "entrypoints.http_server", "ORJSONRequest.json"): "async self",
    ("seams/large_bodies", "entrypoints.http_server", "get_global_state"): "",
    ("seams/adaptive", "managers.tokenizer_manager", "TokenizerManager._init_req_state"): (
        "self obj request"
    ),
    (
        "seams/adaptive",
        "managers.tokenizer_manager",
        "TokenizerManager._should_dispatch_to_encoder",
    ): "self obj",
    (
        "seams/adaptive",
        "managers.tokenizer_manager",
        "TokenizerManager._handle_epd_disaggregation_encode_request",
    ): "self obj",
    ("seams/adaptive", "managers.tokenizer_manager", "TokenizerManager._tokenize_one_request"): (
        "async self obj"
    ),
    ("seams/bootstrap", "disaggregation.common.conn", "CommonKVBootstrapServer._setup_routes"): (
        "self"
    ),
    ("seams/requests", "managers.tokenizer_manager", "TokenizerManager.init_disaggregation"): (
        "self start_pd_bootstrap_service"
    ),
    (
        "seams/decode",
        "multimodal.processors.qwen_vl",
        "QwenVLImageProcessor.process_mm_data_async",
    ): ("async self image_data input_text request_obj args kwargs"),
    ("seams/tokenizer", "managers.io_struct", "GenerateReqInput.contains_mm_input"): "self",
    ("seams/tokenizer", "managers.io_struct", "GenerateReqInput.__getitem__"): "self i",
    ("families/adapter", "disaggregation.encoder.receiver", "MMReceiverBase._init_mm_processor"): (
        "self server_args hf_config model_config"
    ),
    ("seams/scheduler", "disaggregation.encoder.receiver", "MMReceiverBase.create_req"): (
        "self recv_req"
    ),
    ("seams/scheduler", "disaggregation.encoder.receiver", "_select_mm_processor_prompt"): (
        "recv_req mm_processor"
    ),
    ("seams/receiving", "utils.network", "get_local_ip_auto"): "fallback",
    (
        "transfer/mooncake",
        "distributed.device_communicators.mooncake_transfer_engine",
        "get_mooncake_transfer_engine",
    ): "",
    (
        "seams/prompt",
        "multimodal.processors.base_processor",
        "BaseMultimodalProcessor.build_input_ids",
    ): "self prompt img_grid_thw video_grid_thw audio_seq_lens",
    (
        "seams/prompt",
        "multimodal.processors.qwen_vl",
        "QwenVLImageProcessor.build_input_ids_with_timestamps",
    ): "self prompt embeddings img_grid_thw video_grid_thw video_timestamps",
    (
        "language/assembly",
        "multimodal.processors.base_processor",
        "BaseMultimodalProcessor.get_validated_mm_data",
    ): "self prompt embeddings kwargs",
    ("language/assembly", "managers.schedule_batch", "MultimodalDataItem.set_identity"): (
        "self identity"
    ),
    ("encoder/model/engine", "disaggregation.encoder.server", "MMEncoder.__init__"): (
        "self server_args schedule_path dist_init_method rank gpu_id"
    ),
    ("encoder/model/preparing", "disaggregation.encoder.server", "MMEncoder.supports_modality"): (
        "self modality"
    ),
    (
        "encoder/model/preparing",
        "disaggregation.encoder.server",
        "MMEncoder._build_model_mm_items",
    ): ("self mm_feature preprocess_result indices modality"),
    (
        "encoder/model/preparing",
        "disaggregation.encoder.server",
        "_get_mm_feature",
    ): "mm_inputs modality",
    ("encoder/model/preparing", "disaggregation.encoder.preprocessor", "_convert"): "data",
    (
        "encoder/model/preparing",
        "disaggregation.encoder.preprocessor",
        "EncoderPreprocessor.process_mm_items",
    ): "async self mm_items modality",
    ("encoder/model/preparing", "multimodal.processors.qwen_vl", "smart_nframes"): (
        "ele total_frames video_fps"
    ),
    ("encoder/model/preparing", "utils.video_decoder", "VideoDecoderWrapper.__init__"): (
        "self source device num_decode_threads"
    ),
    (
        "encoder/model/engine",
        "server_args",
        "PortArgs.init_new",
    ): "server_args dp_rank worker_ports",
    ("encoder/model/engine", "utils.network", "NetworkAddress.to_tcp"): "self",
    ("encoder/towers", "plugins", "load_plugins"): "",
    ("encoder/towers", "server_args", "ServerArgs.resolve_once"): "self",
    ("encoder/towers and seams/server_args", "arg_groups.overrides", "model_config_of"): (
        "server_args"
    ),
    ("encoder/towers", "utils.common", "maybe_reindex_device_id"): "gpu_id",
    (
        "transfer/mooncake",
        "distributed.device_communicators.mooncake_transfer_engine",
        "maybe_init_shared_mooncake_transfer_engine",
    ): "gpu_id",
    ("encoder/server", "utils", "configure_logger"): "server_args prefix",
    ("encoder/server", "utils.network", "get_local_ip_auto"): "fallback",
    ("encoder/server", "utils.network", "NetworkAddress.to_url"): "self scheme",
    ("seams/bootstrap", "disaggregation.encoder.receiver", "EncoderBootstrapServer"): (
        "host port urls health_check_interval health_check_timeout evicted_ttl"
    ),
    ("seams/bootstrap", "disaggregation.encoder.receiver", "EncoderBootstrapServer.list_urls"): (
        "self"
    ),
    ("seams/bootstrap", "disaggregation.encoder.receiver", "EncoderBootstrapServer.close"): "self",
    **{
        ("encoder and seams", "runtime_context", name): ""
        for name in (
            "get_device",
            "get_disagg",
            "get_exec",
            "get_memory",
            "get_mm",
            "get_model",
            "get_observability",
            "get_parallel",
            "get_serving",
        )
    },
}


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
        srt: the folder of `sglang.srt`; the installed one's when None.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
    """
    source = _Source(srt or _installed())
    found = []
    for (ours, module, path), expected in SIGNATURES.items():
        name = f"sglang.srt.{module}.{path}"
        function = source.function(module, path)
        if function is None:
            found.append(f"{ours} leans on {name}, and {path} is gone")
            continue
        parameters = " ".join(_parameters(function, path))
        if isinstance(function, ast.AsyncFunctionDef):
            parameters = f"async {parameters}"
        if parameters != expected:
            found.append(f"{ours} leans on {name}({expected}), which takes ({parameters})")
    return found


def _installed() -> Path:
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed")
    return Path(found.submodule_search_locations[0]) / "srt"


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> list[str]:
    every = function.args
    names = [one.arg for one in (*every.posonlyargs, *every.args)]
    names += [every.vararg.arg] if every.vararg else []
    names += [one.arg for one in every.kwonlyargs]
    names += [every.kwarg.arg] if every.kwarg else []
    marks = {one.id for one in function.decorator_list if isinstance(one, ast.Name)}
    # A class is called without its first parameter, and so is a class method.
    made = function.name == "__init__" and "__init__" not in path
    return names[1:] if made or "classmethod" in marks else names


class _Source:
    """SGLang's modules as syntax trees; follows imports by name, and base classes."""

    def __init__(self, srt: Path) -> None:
        self._srt = srt
        self._tree = functools.cache(self._parse)

    def function(self, module: str, path: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The definition of a function, a method, or a class's constructor."""
        name, _, method = path.partition(".")
        found = self._definition(module, name)
        if found is None:
            return None
        where, node = found
        if isinstance(node, ast.ClassDef):
            return self._method(where, node, method or "__init__")
        return node if not method else None

    def _parse(self, module: str) -> ast.Module | None:
        place = self._srt.joinpath(*module.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        return None

    def _definition(
        self, module: str, name: str, depth: int = 0
    ) -> tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] | None:
        tree = self._tree(module)
        if tree is None or depth > _MOST_IMPORTS:
            return None
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in tree.body:
            if isinstance(node, kinds) and node.name == name:
                return module, node
        for imported in ast.walk(tree):
            source = (imported.module or "") if isinstance(imported, ast.ImportFrom) else ""
            if not isinstance(imported, ast.ImportFrom) or not source.startswith(_SRT):
                continue
            below = source.removeprefix(_SRT)
            for alias in imported.names:
                if alias.name == "*" or name == (alias.asname or alias.name):
                    wanted = name if alias.name == "*" else alias.name
                    if found := self._definition(below, wanted, depth + 1):
                        return found
        return None

    def _method(
        self, module: str, node: ast.ClassDef, method: str
    ) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name == method:
                return inner
        for base in node.bases:
            if isinstance(base, ast.Name) and (found := self._definition(module, base.id)):
                where, parent = found
                if isinstance(parent, ast.ClassDef) and parent is not node:
                    inherited = self._method(where, parent, method)
                    if inherited is not None:
                        return inherited
        return None
