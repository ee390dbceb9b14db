"""Defaults are set where the user chose nothing, and only there."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_epd.emulated import EmulatedAccelerator
from sglang_epd.platform import defaults
from sglang_epd.profile import load_profile

UNSET = {
    "attention_backend": None,
    "sampling_backend": None,
    "dtype": "auto",
    "max_running_requests": None,
    "max_total_tokens": None,
    "chunked_prefill_size": None,
}


@pytest.fixture
def model_config(monkeypatch):
    config = SimpleNamespace(
        hf_text_config=SimpleNamespace(dtype=torch.bfloat16),
        hf_config=SimpleNamespace(),
        dtype=torch.bfloat16,
        head_dim=128,
        v_head_dim=128,
        num_hidden_layers=36,
        get_total_num_kv_heads=lambda: 2,
    )
    monkeypatch.setattr(defaults, "_model_config", lambda server_args: config)
    monkeypatch.setattr(defaults, "cpu_has_bfloat16", lambda: False)
    monkeypatch.setattr(defaults, "_free_bytes", lambda: 16 << 30)
    return config


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    # Set first, so that what a test leaves behind is removed again.
    for name in ("MC_FORCE_TCP", "MOONCAKE_PROTOCOL", "SGLANG_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(defaults, "has_rdma_device", lambda: False)


def arguments(**chosen: Any) -> SimpleNamespace:
    fields = {
        "device": "cpu",
        "disable_overlap_schedule": False,
        "sleep_on_idle": False,
        "lora_backend": "csgmv",
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "encoder_only": False,
        "disaggregation_mode": "null",
        "disaggregation_decode_retraction_backup": None,
        **UNSET,
        **chosen,
    }
    raw = {name: chosen.get(name, value) for name, value in UNSET.items()}
    return SimpleNamespace(**fields, _raw_input=raw)


def test_everything_is_chosen_for_a_user_who_chose_nothing(model_config):
    args = arguments()
    args.attention_backend = "intel_amx"  # what SGLang resolved before us
    defaults.apply_defaults(args)
    assert args.attention_backend == "torch_native"
    assert args.sampling_backend == "pytorch"
    assert args.disable_overlap_schedule
    assert args.sleep_on_idle
    assert args.dtype == "float32"
    assert model_config.dtype == torch.float32
    assert args.max_running_requests == defaults.MAX_RUNNING_REQUESTS
    assert defaults.MIN_TOKENS <= args.max_total_tokens <= defaults.MAX_TOKENS


def test_an_emulated_accelerator_schedules_as_one_does(model_config, monkeypatch):
    emulated = EmulatedAccelerator(load_profile("a100-qwen3-vl-4b"))
    monkeypatch.setattr(defaults, "accelerator", lambda: emulated)
    args, chosen = arguments(), arguments(chunked_prefill_size=64)
    for one in (args, chosen):
        defaults.apply_defaults(one)
        assert not one.disable_overlap_schedule
    assert (args.chunked_prefill_size, chosen.chunked_prefill_size) == (2048, 64)


def test_what_the_user_chose_stays(model_config):
    chosen = {
        "attention_backend": "flex_attention",
        "sampling_backend": "custom",
        "dtype": "float16",
        "max_running_requests": 3,
        "max_total_tokens": 999,
    }
    args = arguments(**chosen)
    defaults.apply_defaults(args)
    assert {name: getattr(args, name) for name in chosen} == chosen
    assert model_config.dtype == torch.bfloat16


def test_another_device_is_left_alone(model_config):
    args = arguments(device="cuda")
    before = dict(vars(args))
    defaults.apply_defaults(args)
    assert vars(args) == before


@pytest.mark.parametrize(
    ("checkpoint", "native", "expected"),
    [
        (torch.float32, True, torch.float32),
        (torch.float32, False, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),
        (torch.float16, False, torch.float32),
    ],
)
def test_dtype(checkpoint, native, expected):
    assert defaults.choose_dtype(checkpoint, native_bfloat16=native) == expected


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (torch.bfloat16, torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (None, torch.float32),
        ("nonsense", torch.float32),
    ],
)
def test_checkpoint_dtype(model_config, declared, expected):
    model_config.hf_text_config.dtype = declared
    assert defaults._checkpoint_dtype(model_config) == expected


def test_kv_budget_leaves_room_for_other_servers():
    gib = 1 << 30
    per_token = 36 * 2 * 256 * 4  # Qwen2.5-VL-3B in float32: 72 KiB
    assert defaults.kv_tokens(24 * gib, per_token) * per_token <= 2 * gib
    assert defaults.kv_tokens(8 * gib, per_token) * per_token <= gib
    assert defaults.kv_tokens(24 * gib, 64) == defaults.MAX_TOKENS
    assert defaults.kv_tokens(0, per_token) == defaults.MIN_TOKENS


def test_kv_bytes_per_token(model_config):
    assert defaults._kv_bytes_per_token(model_config) == 36 * 2 * 256 * 2


def test_prefill_and_decode_go_over_tcp(model_config):
    args = arguments(disaggregation_mode="decode")
    defaults.apply_defaults(args)
    assert os.environ["MC_FORCE_TCP"] == "1"
    assert os.environ["MOONCAKE_PROTOCOL"] == "tcp"
    assert args.disaggregation_decode_retraction_backup == "cpu_tensor"


def test_a_chosen_protocol_and_backup_stay(model_config, monkeypatch):
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "efa")
    args = arguments(disaggregation_mode="decode", disaggregation_decode_retraction_backup="none")
    defaults.apply_defaults(args)
    assert os.environ["MOONCAKE_PROTOCOL"] == "efa"
    assert args.disaggregation_decode_retraction_backup == "none"


def test_no_tcp_where_there_is_rdma(model_config, monkeypatch):
    monkeypatch.setattr(defaults, "has_rdma_device", lambda: True)
    defaults.apply_defaults(arguments(disaggregation_mode="prefill"))
    assert "MC_FORCE_TCP" not in os.environ


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([0, 1], 2, "0|1"),
        ([4, 5, 6], 2, "4|5"),
        ([0, 1], 3, "0|1|0"),
    ],
)
def test_each_rank_has_cores_of_its_own(cores, ranks, expected):
    assert defaults.binding(cores, ranks) == expected


def test_one_rank_is_not_bound(model_config):
    defaults.choose_binding(ranks=1)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ


def test_an_encoders_workers_are_not_bound(model_config):
    defaults.apply_defaults(arguments(encoder_only=True, tp_size=64))
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ
