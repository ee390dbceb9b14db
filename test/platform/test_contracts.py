"""What this platform replaces in SGLang is still there, under the names it was written for.

Reads SGLang's sources: importing the modules costs seconds each and more memory than
the rest of these tests.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from sglang_epd.platform import adapters, emulation, prefix_attention, seams


def source(module: str) -> str:
    spec = importlib.util.find_spec("torch")  # beside sglang; finding sglang imports it
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parents[1] / (module.replace(".", "/") + ".py")).read_text()


def class_of(module: str, name: str) -> ast.ClassDef:
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    pytest.fail(f"{module} has no class {name}")


def method(cls: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == name)


def test_the_vision_backend_takes_the_arguments_that_we_pass_on():
    forward = method(
        class_of("sglang.srt.layers.attention.vision", "VisionSdpaAttention"), "forward"
    )
    names = [argument.arg for argument in forward.args.args]
    assert names == ["self", "q", "k", "v", "bsz", "cu_seqlens", "attention_mask"]
    assert forward.args.kwarg is not None


@pytest.mark.parametrize("name", ["on_idle", "maybe_sleep_on_idle", "is_fully_idle"])
def test_the_scheduler_has_the_idle_methods(name):
    assert method(class_of("sglang.srt.managers.scheduler", "Scheduler"), name)


def test_the_sender_has_the_switch():
    sender = class_of("sglang.srt.disaggregation.mooncake.conn", "MooncakeKVSender")
    assert "supports_host_tensor_indices = True" in ast.unparse(sender)


def test_frames_are_pinned_only_where_the_switches_say_so():
    decoder = source("sglang.srt.utils.video_decoder")
    assert decoder.count("pin_memory()") == decoder.count("_is_cpu_engine():") + 1
    assert '_BACKEND = "torchcodec"' in decoder, "encoder/model/preparing asks for it"
    assert "return output if _is_cpu_engine() else output.pin_memory()" in decoder
    assert "if _cuda_backend_enabled is not None:\n        return" in decoder
    preprocessing = source("sglang.srt.multimodal.processors.qwen_vl")
    assert preprocessing.count("pin_memory()") == 1
    assert 'if not is_cpu() and video.device.type == "cpu":' in preprocessing
    assert preprocessing.count("is_cpu()") == 2, "the other, of kernels, is asked on import"


def test_float8_kernels_look_their_sizes_up_by_the_device_name():
    kernels = source("sglang.kernels.ops.gemm.fp8_kernel")
    assert "get_device_name()." in kernels
    assert "    get_device_name,\n" in kernels, "imported by name"


def test_a_backend_that_has_no_handler_takes_tritons():
    """Which computes a prompt with keys and values of each head."""
    handlers = source("sglang.srt.models.deepseek_common.attention_backend_handler")
    assert 'return cls._handlers.get(backend_name, cls._handlers.get("triton"))' in handlers
    assert 'register("torch_native"' not in handlers
    methods = source("sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods")
    assert "    MLA = auto()" in methods


def test_batches_of_data_parallel_attention_are_made_by_names_that_are_looked_up():
    attention = source("sglang.srt.layers.dp_attention")
    assert "memcpy_func = memcpy_cpu if _is_cpu else memcpy_triton" in attention
    assert "    memcpy_func(dst, src, dim, offset, sz, offset_src)" in attention
    assert attention.count("memcpy_triton") == 3, "two of its import, and the choice"
    batches = source("sglang.srt.model_executor.forward_batch_info")
    assert "self.use_pin_memory = not _is_cpu" in batches
    length = "model_runner.attn_backend.get_cpu_graph_seq_len_fill_value()\n            if _is_cpu"
    assert length in batches
    assert len(re.findall(r"\b_is_cpu\b", batches)) == 3, "its assignment, and the two above"
    groups = source("sglang.srt.distributed.parallel_state")
    for collective in ("reduce_scatter", "all_gather_into"):
        assert re.search(
            rf"if _is_cpu:\n *#.*\n *self\._{collective}_tensor\(output, input\)", groups
        )
    assert len(re.findall(r"\b_is_cpu\b", groups)) == 4, "one more, where memory is freed"
    module = "sglang.srt.layers.attention"
    base = class_of(f"{module}.base_attn_backend", "AttentionBackend")
    native = class_of(f"{module}.torch_native_backend", "TorchNativeAttnBackend")
    for backend in (base, native):
        assert "get_cpu_graph_seq_len_fill_value" not in ast.unparse(backend)


def test_attention_behind_a_prefix_is_asked_for_as_we_take_it():
    backend = class_of("sglang.srt.layers.attention.torch_native_backend", "TorchNativeAttnBackend")
    theirs = method(backend, "_run_sdpa_forward_extend").args
    with open(prefix_attention.__file__) as file:
        ours = next(
            node
            for node in ast.walk(ast.parse(file.read()))
            if isinstance(node, ast.FunctionDef) and node.name == "extend"
        ).args
    assert [one.arg for one in ours.args] == [one.arg for one in theirs.args]
    assert list(map(ast.unparse, ours.defaults)) == list(map(ast.unparse, theirs.defaults))


def test_a_module_that_moved_does_not_go_unnoticed(monkeypatch, caplog):
    changes = {**seams._CHANGES, "sglang.srt.managers.moved": print}
    monkeypatch.setattr(seams, "_CHANGES", changes)
    monkeypatch.setattr(seams, "_asked", set())
    asked = []
    monkeypatch.setattr(seams, "when_imported", lambda name, _change: asked.append(name))
    seams.install()
    assert asked == list(changes)
    assert [record.getMessage() for record in caplog.records] == [
        "The CPU platform changes sglang.srt.managers.moved, which this SGLang does not have"
    ]


def test_every_batch_passes_where_an_emulated_accelerator_is_hooked():
    scheduler = class_of("sglang.srt.managers.scheduler", "Scheduler")
    run = method(scheduler, "run_batch")
    assert [one.arg for one in run.args.args] == ["self", "batch", "pp_proxy_tensors"]
    assert "self.internal_state.get_internal_state(recv_req)" in ast.unparse(
        method(scheduler, "get_internal_state")
    )
    for loop in ("event_loop_normal", "event_loop_overlap"):
        body = ast.unparse(method(scheduler, loop))
        assert body.count("self.run_batch(") == 1 and "forward_batch" not in body
    assert method(class_of("sglang.srt.model_executor.model_runner", "ModelRunner"), "load_model")


def test_results_are_waited_for_by_their_event_alone():
    """`PassDone` has what is called of it."""
    asked = set()
    for module in (
        "sglang.srt.managers.scheduler_components.batch_result_processor",
        "sglang.srt.managers.utils",
        "sglang.srt.disaggregation.prefill",
    ):
        for node in ast.walk(ast.parse(source(module))):
            if isinstance(node, ast.Attribute) and "copy_done" in ast.unparse(node.value):
                asked.add(node.attr)
    assert asked == {"synchronize", "record", "query"}
    assert all(hasattr(emulation.PassDone, name) for name in asked)


def test_towers_are_run_by_the_methods_that_are_priced():
    assert 'f"get_{modality_id}_feature"' in source("sglang.srt.managers.mm_utils")
    encoder = source("sglang.srt.disaggregation.encoder.server")
    assert 'getattr(target, f"get_{modality_str}_feature")' in encoder
    assert 'target = self.model.thinker if hasattr(self.model, "thinker")' in " ".join(
        encoder.split()
    )


def test_speculation_has_no_part_that_runs_on_this_platform():
    """docs/compatibility.md says what stops it."""
    drafts = source("sglang.srt.speculative.draft_utils")
    assert '"triton": self._create_triton_decode_backend' in drafts
    assert "torch_native" not in drafts
    assert "EAGLE is not supported in decode attention backend {backend_type}" in drafts
    tree = source("sglang.kernels.ops.speculative.reconstruct_tree")
    kernels = "from sgl_kernel.speculative import reconstruct_indices_from_tree_mask"
    assert f"elif not _is_xpu:\n    {kernels}" in tree


def test_the_host_cache_is_pinned_and_copied_by_names_that_are_looked_up():
    common = source("sglang.srt.mem_cache.pool_host.common")
    assert "        _cuda_host_register(buffer, registration_granularity_bytes)" in common
    arguments = ["src_layers=", "dst_layers=", "src_indices=", "dst_indices=", "page_size="]
    for kind in ("mha", "mla"):
        pool = ast.parse(source(f"sglang.srt.mem_cache.pool_host.{kind}"))
        copies = [
            call
            for call in ast.walk(pool)
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "transfer_kv_direct"
        ]
        assert len(copies) >= 2
        assert all([f"{one.arg}=" for one in call.keywords] == arguments for call in copies)
    flags = source("sglang.srt.arg_groups.fields.memory")
    assert "hicache_io_backend:" in flags
    assert "hicache_mem_layout:" in flags


def test_adapters_have_tables_in_pinned_memory():
    """All of which are made within the methods that are wrapped."""
    layers = source("sglang.srt.lora.layers")
    assert layers.count("pin_memory=True") == 5
    assert layers.count(".pin_memory()") == 1
    batches = class_of("sglang.srt.lora.backend.torch_backend", "TorchNativeLoRABackend")
    assert "pin_memory" in ast.unparse(method(batches, "prepare_lora_batch"))
    assert ast.unparse(batches).count("pin_memory") == ast.unparse(
        method(batches, "prepare_lora_batch")
    ).count("pin_memory")
    manager = class_of("sglang.srt.lora.lora_manager", "LoRAManager")
    for name in adapters.PINNING:
        assert method(manager, name)
    assert "get_lora_layer(" in ast.unparse(method(manager, "set_lora_module"))
    assert "self.set_lora_module(" in ast.unparse(method(manager, "init_lora_modules"))
    flags = source("sglang.srt.arg_groups.fields.lora")
    assert '] = "csgmv"' in flags, "the default"
