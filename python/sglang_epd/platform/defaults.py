"""Server arguments that differ on a CPU, wherever the user has not set them, and how the
servers on one machine share its cores.

SGLang hands over a view: reading from it gives what resolution has decided so far,
assigning to it records this platform's decision. `_raw_input` holds what
the user typed, which tells a choice from an earlier default.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

from sglang_epd.emulated import accelerator

MAX_KV_BYTES = 2 << 30
MAX_TOKENS = 65536
MIN_TOKENS = 4096
FREE_MEMORY_SHARE = 8
MAX_RUNNING_REQUESTS = 128
# LoRA backends whose kernels are Triton's; the first is the default of SGLang's flag, which
# has no value for "not typed".
_TRITONS = ("csgmv", "triton", "triton_v2")
_CPUINFO = Path("/proc/cpuinfo")
_RDMA_DEVICES = Path("/sys/class/infiniband")


def apply_defaults(server_args: Any) -> None:
    """Set every default of the platform; a no-op where the user asked for another device."""
    if server_args.device != "cpu":
        return
    asked = server_args._raw_input
    if asked["attention_backend"] is None:
        # By now resolved to `intel_amx`, which needs a CPU build of sglang-kernel.
        server_args.attention_backend = "torch_native"
    if asked["sampling_backend"] is None:
        server_args.sampling_backend = "pytorch"
    emulated = accelerator()
    if emulated is None:
        # There is no device to overlap with: the CPU that would schedule ahead is the one
        # that computes.
        server_args.disable_overlap_schedule = True
    elif asked["chunked_prefill_size"] is None:
        server_args.chunked_prefill_size = emulated.profile.language.chunk_tokens
    # Else every idle scheduler takes a core from those at work.
    server_args.sleep_on_idle = True
    model_config = _model_config(server_args)
    server_args.lora_backend = lora_backend(server_args.lora_backend)
    if asked["dtype"] == "auto":
        dtype = choose_dtype(_checkpoint_dtype(model_config), native_bfloat16=cpu_has_bfloat16())
        server_args.dtype = str(dtype).removeprefix("torch.")
        # The configuration was built, and is kept, with what "auto" means on a GPU.
        model_config.dtype = dtype
    if asked["max_running_requests"] is None:
        # SGLang's floor of 2048 gives each a row of `context_length` token numbers:
        # 1 GiB at 128k.
        server_args.max_running_requests = MAX_RUNNING_REQUESTS
    if asked["max_total_tokens"] is None:
        server_args.max_total_tokens = kv_tokens(_free_bytes(), _kv_bytes_per_token(model_config))
    # Of the host cache: the other ways are kernels (`host_cache`).
    server_args.hicache_io_backend = "direct"
    server_args.hicache_mem_layout = "layer_first"
    choose_transport()
    choose_retraction_backup(server_args)
    if not server_args.encoder_only:
        # SGLang's encoder asks for no binding, and its workers do better unbound: one that
        # is busy may use the cores of one that is not.
        ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
        choose_binding(ranks=ranks)


def lora_backend(typed: str) -> str:
    """The one that multiplies with adapters: Triton has no kernels for a CPU."""
    return "torch_native" if typed in _TRITONS else typed


def kv_tokens(free_bytes: int, bytes_per_token: int) -> int:
    """Tokens of KV cache for one server.

    On a CPU the cache is ordinary memory that several servers share with everything
    else, and torch touches every page of it at start. An eighth of what is free and
    2 GiB at most lets a prefill, a decode and a language server start together on
    24 GiB with room for their weights. The bound on tokens is for small models: more
    than a CPU can prefill in a sitting is of no use. SGLang lowers the figure further
    if its own profile finds less, so the minimum cannot overcommit.

    Args:
        free_bytes: of memory, now.
        bytes_per_token: of keys and values, in all layers.
    """
    affordable = min(free_bytes // FREE_MEMORY_SHARE, MAX_KV_BYTES) // bytes_per_token
    return max(MIN_TOKENS, min(affordable, MAX_TOKENS))


def choose_dtype(checkpoint: torch.dtype, *, native_bfloat16: bool) -> torch.dtype:
    """bfloat16 if the checkpoint has it and the CPU multiplies in it, else float32.

    Emulated bfloat16 is about twice as slow as float32, native up to five times as
    fast. float16 has no fast kernels on a CPU, and float32 loses nothing.
    """
    if checkpoint == torch.bfloat16 and native_bfloat16:
        return torch.bfloat16
    return torch.float32


def cpu_has_bfloat16() -> bool:
    """AVX512-BF16 or AMX on x86, the BF16 extension on Arm."""
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return True
    try:
        cpuinfo = _CPUINFO.read_text(errors="replace")
    except OSError:
        return False
    return any(
        line.startswith("Features") and "bf16" in line.split() for line in cpuinfo.splitlines()
    )


def choose_transport() -> None:
    """Make Mooncake use TCP where this host has no RDMA device.

    SGLang and Mooncake read both variables from the environment, when an engine starts
    and in processes that inherit them; one set by the user stays. `MC_FORCE_TCP` is what
    `--disaggregation-transfer-backend mooncake_tcp` sets, so that name and the default,
    `mooncake`, mean the same here.
    """
    if not has_rdma_device():
        os.environ.setdefault("MC_FORCE_TCP", "1")
        os.environ.setdefault("MOONCAKE_PROTOCOL", "tcp")


def has_rdma_device() -> bool:
    try:
        return any(_RDMA_DEVICES.iterdir())
    except OSError:
        return False


def choose_retraction_backup(server_args: Any) -> None:
    """Keep retracted KV in plain tensors: the default host pool is pinned memory."""
    if (
        server_args.disaggregation_mode == "decode"
        and server_args.disaggregation_decode_retraction_backup is None
    ):
        server_args.disaggregation_decode_retraction_backup = "cpu_tensor"


def _model_config(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(object.__getattribute__(server_args, "_cfg"))


def _free_bytes() -> int:
    """Memory available to this process, within its control group's limit."""
    from sglang.srt.utils.common import get_free_cpu_memory

    return get_free_cpu_memory()


def _checkpoint_dtype(model_config: Any) -> torch.dtype:
    """The dtype that the checkpoint declares; float32 if it declares none."""
    text = model_config.hf_text_config
    declared = getattr(text, "dtype", None) or getattr(model_config.hf_config, "dtype", None)
    if isinstance(declared, str):
        declared = getattr(torch, declared.removeprefix("torch."), None)
    return declared if isinstance(declared, torch.dtype) else torch.float32


def _kv_bytes_per_token(model_config: Any) -> int:
    """Bytes of keys and values per token over all layers and ranks.

    Too high for architectures that store a latent in place of keys and values.
    """
    row = model_config.get_total_num_kv_heads() * (model_config.head_dim + model_config.v_head_dim)
    return model_config.num_hidden_layers * row * model_config.dtype.itemsize


def wait_passively() -> None:
    """Let OpenMP threads sleep while they wait for each other, instead of spinning.

    libgomp spins at every barrier as if the machine were its own. With more busy
    threads than cores, and a second server or a client is enough, each barrier burns
    the slice of the thread it waits for: eight layers of 1024 patches took 450 ms
    beside one busy process on two cores, and 70 ms with the policy, which costs nothing
    when alone. Processes started from here read the policy from the environment. This
    one loaded libgomp before, so libgomp gets the policy by a call: it spins briefly when it
    manages more threads than there are cores, and a parked thread that has run one
    parallel operation keeps its own team counted.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if torch.get_num_threads() > 1:
        threading.Thread(target=_park, name="libgomp-oversubscription", daemon=True).start()


def _park() -> None:
    torch.zeros(1 << 20).add_(1)  # large enough to run in parallel
    threading.Event().wait()


def choose_binding(*, ranks: int) -> None:
    """Give each rank a share of the cores where there is not a NUMA node for each.

    SGLang refuses to start such ranks unless `SGLANG_CPU_OMP_THREADS_BIND` names the
    cores of each. A single rank is left unbound: several servers share a small machine,
    and the kernel places their threads better than a guess.
    """
    if ranks <= 1 or "SGLANG_CPU_OMP_THREADS_BIND" in os.environ:
        return
    from sglang.srt.utils.common import get_cpu_ids_by_node

    if ranks > len(get_cpu_ids_by_node()):
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = binding(sorted(os.sched_getaffinity(0)), ranks)


def binding(cores: list[int], ranks: int) -> str:
    """Core lists of the ranks, `0,1|2,3`; shared in turn if there are fewer cores than ranks.

    >>> binding([0, 1, 2, 3], 2)
    '0,1|2,3'
    """
    share = max(1, len(cores) // ranks)
    lists = [
        [cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(ranks)
    ]
    return "|".join(",".join(map(str, cores_of_rank)) for cores_of_rank in lists)
