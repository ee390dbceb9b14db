from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest

from sglang_epd.errors import ConfigError
from sglang_epd.seams import rundir, server_args

SERVED = {
    "encoder_only": False,
    "language_only": True,
    "encoder_transfer_backend": "zmq_to_scheduler",
    "enable_prefix_mm_cache": False,
    "tp_size": 1,
    "attn_dp_size": 1,
    "mm_enable_dp_encoder": False,
    "load_format": "auto",
    "pp_size": 1,
    "dp_size": 1,
    "nnodes": 1,
    "tokenizer_worker_num": 1,
    "grpc_mode": False,
    "smg_grpc_mode": False,
    "use_ray": False,
    "enable_adaptive_dispatch_to_encoder": False,
    "enable_ssl_refresh": False,
    "ssl_certfile": None,
    "enable_mm_global_cache": False,
    "is_embedding": False,
    "enable_tokenizer_batch_encode": False,
    "return_input_ids": False,
    "encoder_urls": ["http://encoder:30000"],
    "device": "cpu",
    "mm_feature_transport": None,
    "enable_broadcast_mm_inputs_process": False,
}
TOWER = SimpleNamespace(vision_config=SimpleNamespace(num_heads=16))
GEMMA = "Gemma3ForConditionalGeneration"
ENCODER = {"encoder_only": True, "language_only": False}


@pytest.fixture
def check(sglang, monkeypatch):
    overrides = sglang("arg_groups.overrides")
    monkeypatch.setattr(overrides, "resolving_view", lambda args: args)

    # What it writes is undone.
    monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "")
    monkeypatch.delenv("SGLANG_HTTP_SERVER_APP_PATH")

    def run(model=TOWER, joint_head=None, **changes) -> None:
        config = SimpleNamespace(hf_config=model, joint_head_config=joint_head)
        monkeypatch.setattr(overrides, "model_config_of", lambda _: config)
        server_args.check(SimpleNamespace(**{**SERVED, **changes}))

    return run


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"encoder_transfer_backend": "auto", "encoder_urls": []},
        {"encoder_transfer_backend": "zmq_to_tokenizer"},
        {"encoder_transfer_backend": "mooncake"},
        {"tp_size": 4},
        {"pp_size": 2},
        {"nnodes": 2, "tp_size": 4, "encoder_transfer_backend": "mooncake"},
        {"pp_size": 2, "encoder_transfer_backend": "zmq_to_tokenizer"},
        {"attn_dp_size": 2, "tp_size": 2},
        {"attn_dp_size": 2, "tp_size": 2, "pp_size": 2},
        # A stage a host.
        {"attn_dp_size": 2, "tp_size": 2, "pp_size": 2, "nnodes": 2},
        {"nnodes": 2, "attn_dp_size": 2, "encoder_transfer_backend": "zmq_to_tokenizer"},
        {"is_embedding": True},
        # A generation with media is refused by SGLang, each by itself.
        {"enable_tokenizer_batch_encode": True},
        {"return_input_ids": True, "encoder_transfer_backend": "zmq_to_tokenizer"},
        {**ENCODER, "return_input_ids": True},
        {"dp_size": 2},
        {"tokenizer_worker_num": 2, "encoder_transfer_backend": "mooncake"},
        {"tokenizer_worker_num": 2, "encoder_transfer_backend": "zmq_to_tokenizer"},
        {"tp_size": 2, "dp_size": 2, "encoder_transfer_backend": "mooncake"},
        {**ENCODER, "tp_size": 2},
        {**ENCODER, "dp_size": 3},
        {**ENCODER, "tp_size": 4, "dp_size": 2, "encoder_transfer_backend": "mooncake"},
        # Whole images are dealt to the ranks.
        {**ENCODER, "tp_size": 3, "mm_enable_dp_encoder": True},
        {**ENCODER, "tokenizer_worker_num": 4},
        # As in SGLang's own, which has one stage and no attention of a language model.
        {**ENCODER, "pp_size": 2, "attn_dp_size": 2, "tp_size": 2},
        {**ENCODER, "encoder_transfer_backend": "mooncake"},
        {**ENCODER, "enable_prefix_mm_cache": True},
        {**ENCODER, "enable_mm_global_cache": True},
        {**ENCODER, "grpc_mode": True},
        {**ENCODER, "smg_grpc_mode": True},
        {**ENCODER, "ssl_certfile": "a"},
        {**ENCODER, "ssl_certfile": "a", "enable_ssl_refresh": True},
    ],
    ids=str,
)
def test_the_flags_that_are_served_pass(check, changes):
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nnodes": 2, "attn_dp_size": 2}, "--nnodes 2 with --attn-dp-size"),
        (
            {"nnodes": 4, "pp_size": 2, "attn_dp_size": 2, "tp_size": 4},
            "--nnodes 4 with --attn-dp-size",
        ),
        ({**ENCODER, "tp_size": 3}, "--tp-size 3 with --encoder-only: the 16 attention heads"),
        ({**ENCODER, "nnodes": 2}, "--nnodes 2 with --encoder-only"),
        ({**ENCODER, "grpc_mode": True, "ssl_certfile": "a"}, "--ssl-certfile with --encoder-only"),
        ({"smg_grpc_mode": True}, "--grpc-mode with --language-only"),
        ({"use_ray": True}, "--use-ray with --language-only"),
        ({"encoder_urls": ["encoder:30000"]}, "'encoder:30000'"),
        ({"encoder_urls": ["grpc://encoder:30000"]}, "SGLANG_ENCODER_MM_RECEIVER_MODE=http"),
        (
            {"is_embedding": True, "enable_tokenizer_batch_encode": True},
            "--enable-tokenizer-batch-encode with --language-only and an embedding model",
        ),
        ({"return_input_ids": True}, "--return-input-ids with --language-only"),
        ({"load_format": "remote_instance"}, "--load-format remote_instance"),
        ({**ENCODER, "load_format": "bitsandbytes"}, "--load-format bitsandbytes"),
    ],
)
def test_what_is_not_served_is_refused_by_name(check, changes, named):
    with pytest.raises(ConfigError) as raised:
        check(**changes)
    assert named in str(raised.value)


@pytest.mark.parametrize("role", [{}, ENCODER], ids=["language", "encoder"])
def test_a_checkpoint_whose_own_route_fetches_media_is_refused(check, role):
    with pytest.raises(ConfigError, match="/v1/systemone fetches media"):
        check(joint_head={}, **role)


def test_a_tokenizer_in_rust_asks_no_encoders(check, monkeypatch):
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    check(**ENCODER)
    with pytest.raises(ConfigError, match="SGLANG_RUST_SERVER with --language-only"):
        check()


@pytest.mark.parametrize(
    ("server", "mode", "refused"),
    [
        ({}, "http", None),
        ({"encoder_urls": ["https://encoder"]}, "http", None),
        ({"encoder_urls": ["grpc://encoder:1"]}, "http", "'grpc://encoder:1' is no http or https"),
        ({"encoder_urls": ["grpc://encoder:1", "grpc://[::1]:1/"]}, "grpc", None),
        ({"encoder_urls": []}, "grpc", None),
        ({"encoder_urls": ["grpc://encoder:1", "http://a:1"]}, "grpc", "'http://a:1' is no grpc"),
        ({"encoder_urls": ["grpc://encoder"]}, "grpc", "'grpc://encoder' is not grpc://host:port"),
        ({"encoder_urls": ["grpcs://encoder:1"]}, "grpc", "'grpcs://encoder:1' is no grpc URL"),
        ({}, "carrier", "SGLANG_ENCODER_MM_RECEIVER_MODE=carrier is neither http nor grpc"),
        # It is not an encoder's to read; the environment is often one for all servers.
        (ENCODER, "grpc", None),
    ],
)
def test_encoders_urls_are_of_sglangs_mode(check, monkeypatch, server, mode, refused):
    monkeypatch.setenv("SGLANG_ENCODER_MM_RECEIVER_MODE", mode)
    if refused is None:
        check(**server)
    else:
        with pytest.raises(ConfigError, match=re.escape(refused)):
            check(**server)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"vision_config": {"num_attention_heads": 16}}, "16 attention heads of vision_config"),
        ({"audio_config": {"encoder_attention_heads": 20}}, "20 attention heads of audio_config"),
        (
            {"thinker_config": {"vision_config": {"num_heads": 7}}, "vision_config": None},
            "7 attention heads of vision_config",
        ),
        ({"vision_config": {"num_heads": 6}, "audio_config": {"num_heads": 6}}, None),
        ({"vision_config": {"num_heads": 25, "num_dummy_heads": 2}}, None),
        ({"vision_config": {}}, None),
        ({}, None),
    ],
    ids=str,
)
def test_every_towers_heads_are_asked_for(check, model, named):
    def config(plain):
        if isinstance(plain, dict):
            return SimpleNamespace(**{name: config(value) for name, value in plain.items()})
        return plain

    if named is None:
        check(config(model), **ENCODER, tp_size=3)
    else:
        with pytest.raises(ConfigError, match=named):
            check(config(model), **ENCODER, tp_size=3)


def test_without_an_epd_flag_everything_passes(check):
    check(
        encoder_only=False,
        language_only=False,
        encoder_transfer_backend="mooncake",
        tp_size=8,
        encoder_urls=["x"],
    )


@pytest.mark.parametrize(("workers", "theirs"), [(1, False), (2, True)])
def test_tokenizer_workers_of_language_servers_have_the_plugin(check, workers, theirs):
    check(language_only=True, tokenizer_worker_num=workers)
    assert ("SGLANG_HTTP_SERVER_APP_PATH" in os.environ) == theirs


@pytest.mark.parametrize(
    ("architecture", "served"),
    [
        ("Qwen2_5_VLForConditionalGeneration", True),
        ("KimiK3ForConditionalGeneration", True),
        ("Glm5NextForConditionalGeneration", False),
        ("Dots3NoteForCausalLM", False),
    ],
)
def test_listed_models_that_are_laid_out_otherwise_send_all_images(check, architecture, served):
    model = SimpleNamespace(architectures=[architecture], **vars(TOWER))
    if served:
        check(model, enable_adaptive_dispatch_to_encoder=True)
    else:
        with pytest.raises(ConfigError, match=f"is not served with {architecture}"):
            check(model, enable_adaptive_dispatch_to_encoder=True)


@pytest.fixture
def resolve(sglang, monkeypatch):
    """Resolve flags of a model that is not on SGLang's list."""
    overrides = sglang("arg_groups.overrides")
    monkeypatch.setattr(overrides, "resolving_view", lambda args: args)

    def run(refusal: str, *, multimodal: bool = True, model: str = GEMMA, **changes) -> None:
        hf_config = SimpleNamespace(architectures=[model], **vars(TOWER))
        config = SimpleNamespace(
            hf_config=hf_config, is_multimodal=multimodal, joint_head_config=None
        )
        monkeypatch.setattr(overrides, "model_config_of", lambda _: config)

        def original(_args):
            if refusal:
                raise ValueError(refusal)

        flags = SimpleNamespace(**{**SERVED, "enable_multimodal": None, **changes})
        server_args.resolve(original, flags)

    return run


def not_listed(model: str) -> str:
    return (
        f"Model type {model} is not supported for encoder disaggregation. "
        "Supported architectures: Qwen2VL, and so on."
    )


NOT_LISTED = not_listed(GEMMA)


@pytest.mark.parametrize("role", [{}, ENCODER], ids=["language", "encoder"])
def test_models_that_sglang_does_not_list_are_served(resolve, role):
    resolve(NOT_LISTED, **role)
    resolve("", **role)


@pytest.mark.parametrize(
    ("typed", "transport"),
    [
        ({"language_only": True}, "cpu"),
        ({"language_only": True, "device": "cpu"}, "cuda_ipc"),
        ({"language_only": True, "mm_feature_transport": "cuda_vmm"}, "cuda_vmm"),
        ({"language_only": True, "enable_adaptive_dispatch_to_encoder": True}, "cuda_ipc"),
        ({"encoder_only": True}, "cuda_ipc"),
    ],
    ids=["language", "CPU", "typed", "adaptive", "encoder"],
)
def test_language_servers_have_no_pool_for_features(sglang, typed, transport):
    overrides = sglang("arg_groups.overrides")
    record = sglang("server_args").ServerArgs(model_path="a", **{"device": "cuda", **typed})
    if record.mm_feature_transport is None:  # as SGLang does for Qwen3-VL
        overrides.declare_resolution(record, "model", mm_feature_transport="cuda_ipc")
    server_args._keep_no_features(record)
    assert overrides.resolving_view(record).mm_feature_transport == transport


@pytest.mark.parametrize("role", ["language_only", "encoder_only"])
def test_ranks_of_language_servers_send_each_other_no_inputs(sglang, caplog, role):
    overrides = sglang("arg_groups.overrides")
    flags = {role: True, "enable_broadcast_mm_inputs_process": True}
    record = sglang("server_args").ServerArgs(model_path="a", **flags)
    server_args._broadcast_no_inputs(record)
    left = overrides.resolving_view(record).enable_broadcast_mm_inputs_process
    assert left is (role == "encoder_only")
    assert len(caplog.messages) == (role == "language_only")


def test_each_server_of_a_process_has_a_run_of_its_own(resolve, monkeypatch):
    """Else the second would wait for the folder of the first."""
    for name in ("SGLANG_EPD_RUN_ID", "SGLANG_EPD_RUN_SECRET"):
        monkeypatch.setenv(name, "")
    paths = set()
    for _ in range(2):
        resolve("")
        paths.add(rundir.control_path())
    assert len(paths) == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"multimodal": False}, "--language-only: Gemma3ForConditionalGeneration has no encoder"),
        ({"multimodal": False, **ENCODER}, "--encoder-only: .*--enable-multimodal may be missing"),
        (
            {"enable_adaptive_dispatch_to_encoder": True},
            "--enable-adaptive-dispatch-to-encoder is not served with Gemma3",
        ),
        # Ours, after theirs.
        ({"nnodes": 2, "attn_dp_size": 2}, "--nnodes 2 with --attn-dp-size"),
    ],
    ids=str,
)
def test_but_not_with_all_flags(resolve, changes, named):
    with pytest.raises(ConfigError, match=named):
        resolve(NOT_LISTED, **changes)


@pytest.mark.parametrize("role", [{}, ENCODER], ids=["language", "encoder"])
@pytest.mark.parametrize("model", ["CLIPModel", "EmbeddingGemma2Model"])
def test_models_of_embeddings_that_cannot_be_split_are_refused_by_name(resolve, model, role):
    with pytest.raises(ConfigError, match=rf"-only: {model} has no language model.*one server"):
        resolve(not_listed(model), model=model, is_embedding=True, **role)


def test_what_sglang_refuses_for_another_reason_stays_refused(resolve):
    with pytest.raises(ValueError, match="Cannot set --encoder-only and --language-only"):
        resolve("Cannot set --encoder-only and --language-only together")
    with pytest.raises(ValueError, match="Model type Other"):
        resolve("Model type Other is not supported for encoder disaggregation.")
