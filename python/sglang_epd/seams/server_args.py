"""Refuses combinations of flags that this package does not serve, and sets one that SGLang would
set otherwise.

Leans on `arg_groups.pd_disaggregation_hook.handle_encoder_disaggregation`, which
SGLang calls while it resolves the flags: once for each server, in its launcher, before it
resolves `--mm-feature-transport`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from sglang_epd.errors import ConfigError
from sglang_epd.families import family_of
from sglang_epd.namespace import TOWER_CONFIGS
from sglang_epd.seams import hooks, roles, rundir
from sglang_epd.wire.urls import ENCODERS, HTTP

logger = logging.getLogger(__name__)

# The families' names for the number of a tower's attention heads.
_HEADS = ("num_heads", "num_attention_heads", "encoder_attention_heads")
_RIVAL = "set SGLANG_EPD=off to use SGLang's own EPD"
# Of encoders' URLs, by SGLang's mode.
_SCHEMES = {"http": HTTP, "grpc": ("grpc",)}
# Models of embeddings that put no rows into the prompt of a language model: CLIP runs one tower of
# its two for each request, EmbeddingGemma 2 lets every token see every other.
_WHOLE = frozenset({"CLIPModel", "EmbeddingGemma2Model"})
# `--load-format` of loaders that read each tensor of the checkpoint, or of another server's model.
_OF_WHOLE_MODELS = frozenset({"bitsandbytes", "remote_instance"})
_NOT_LISTED = "Model type {} is not supported for encoder disaggregation."


def resolve(original: Any, server_args: Any) -> None:
    """Around `handle_encoder_disaggregation`: SGLang's resolution of the flags, for models
    that are not on its list too, and then ours. The server has a run of its own afterwards.

    Raises:
        ConfigError: a flag that this version does not honour, or not for this model; or this
            package does not fit SGLang.
        ValueError: SGLang's own.
    """
    if not roles.served(server_args):
        original(server_args)
        return
    hooks.require()
    from sglang.srt.arg_groups.overrides import model_config_of

    try:
        original(server_args)
    except ValueError as error:
        architecture = model_config_of(server_args).hf_config.architectures[0]
        # The last of its checks but one that is of a model on the list.
        if not str(error).startswith(_NOT_LISTED.format(architecture)):
            raise
        _check_family(server_args, architecture)
    check(server_args)
    _keep_no_features(server_args)
    _broadcast_no_inputs(server_args)
    rundir.draw_run_id()


def _keep_no_features(server_args: Any) -> None:
    """On a language server, take no memory of the device for features, which encoders make.
    SGLang takes 1 GiB or more on some GPUs."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    args = resolving_view(server_args)
    whole = args.enable_adaptive_dispatch_to_encoder or not args.language_only
    if args.device == "cuda" and not whole and server_args.mm_feature_transport is None:
        declare_resolution(server_args, "sglang-epd", mm_feature_transport="cpu")


def _broadcast_no_inputs(server_args: Any) -> None:
    """On a language server every rank has the inputs of a request, laid out and marked for itself;
    a pickled copy of another rank's would have lost the marks."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    args = resolving_view(server_args)
    if args.language_only and args.enable_broadcast_mm_inputs_process:
        logger.warning("--enable-broadcast-mm-inputs-process is off on a --language-only server")
        declare_resolution(server_args, "sglang-epd", enable_broadcast_mm_inputs_process=False)


def check(server_args: Any) -> None:
    """Refuse, at start-up and by name, flags that would fail or be ignored later.

    Raises:
        ConfigError: a flag that this version does not honour.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    args = resolving_view(server_args)
    if args.encoder_only or args.language_only:
        config = model_config_of(server_args)
        if config.joint_head_config is not None:
            raise ConfigError(
                "a checkpoint with joint_head_config.json is not served: its route /v1/systemone "
                "fetches media on the language server"
            )
        for refusal in _refusals(args, config.hf_config):
            raise ConfigError(refusal)
    if args.tokenizer_worker_num > 1 and args.language_only:
        roles.announce_workers()


def _refusals(args: Any, hf_config: Any) -> Iterator[str]:
    if args.enable_adaptive_dispatch_to_encoder:
        architecture = hf_config.architectures[0]
        if family_of(architecture) is not None:
            yield f"--enable-adaptive-dispatch-to-encoder is not served with {architecture}"
    if args.load_format in _OF_WHOLE_MODELS:
        yield (
            f"--load-format {args.load_format} is not served: it loads whole models, and neither "
            "server has one"
        )
    yield from _of_encoders(args, hf_config) if args.encoder_only else _of_language_servers(args)


def _of_encoders(args: Any, hf_config: Any) -> Iterator[str]:
    """Flags that SGLang's own encoder honours, and ours does not."""
    if args.nnodes > 1:
        yield f"--nnodes {args.nnodes} with --encoder-only is not in this version; {_RIVAL}"
    if (args.grpc_mode or args.smg_grpc_mode) and args.ssl_certfile:
        yield f"--ssl-certfile with --encoder-only and --grpc-mode is not served; {_RIVAL}"
    if args.tp_size > 1 and not args.mm_enable_dp_encoder:
        yield from _undivided_heads(hf_config, args.tp_size)


def _of_language_servers(args: Any) -> Iterator[str]:
    from sglang.srt.environ import envs

    mode = envs.SGLANG_ENCODER_MM_RECEIVER_MODE.get()
    schemes = _SCHEMES.get(mode)
    if schemes is None:
        yield f"SGLANG_ENCODER_MM_RECEIVER_MODE={mode} is neither http nor grpc"
    for url in args.encoder_urls:
        if not url.startswith(tuple(f"{scheme}://" for scheme in schemes or ENCODERS)):
            yield (
                f"--encoder-urls: {url!r} is no {' or '.join(schemes or ENCODERS)} URL, with "
                f"SGLANG_ENCODER_MM_RECEIVER_MODE={mode}"
            )
        elif url.startswith("grpc://") and not re.fullmatch(r"grpc://[^/?#@]+:\d+/?", url):
            yield f"--encoder-urls: {url!r} is not grpc://host:port"
    if envs.SGLANG_RUST_SERVER.get():
        yield (
            "SGLANG_RUST_SERVER with --language-only: its tokenizer, which is in Rust, asks no "
            "encoders; a server that does all may have it"
        )
    if args.grpc_mode or args.smg_grpc_mode:
        yield f"--grpc-mode with --language-only is not served; {_RIVAL}"
    if args.use_ray:
        yield (
            "--use-ray with --language-only is not served: SGLang loads no plug-ins in the actors "
            f"in which Ray runs schedulers; {_RIVAL}"
        )
    to_tokenizer = args.encoder_transfer_backend == "zmq_to_tokenizer"
    # Hosts take whole stages where there are enough of them.
    if args.attn_dp_size > 1 and args.nnodes > args.pp_size and not to_tokenizer:
        yield (
            f"--nnodes {args.nnodes} with --attn-dp-size and embeddings that go to the "
            "schedulers is not in this version, but for a stage a host; "
            "--encoder-transfer-backend zmq_to_tokenizer sends them with the requests; "
            f"or {_RIVAL}"
        )
    if args.return_input_ids and not to_tokenizer:
        yield (
            "--return-input-ids with --language-only: schedulers lay prompts with media out, so "
            "their token ids are not known where answers are made; "
            "--encoder-transfer-backend zmq_to_tokenizer has them"
        )
    if args.is_embedding and args.enable_tokenizer_batch_encode:
        yield (
            "--enable-tokenizer-batch-encode with --language-only and an embedding model: SGLang "
            "would embed the texts of a batch without their media"
        )


def _undivided_heads(hf_config: Any, ranks: int) -> Iterator[str]:
    """A tower's attention is split by heads, so they have to divide."""
    holder = getattr(hf_config, "thinker_config", None) or hf_config
    for tower in TOWER_CONFIGS:
        config = getattr(holder, tower, None)
        heads = next(filter(None, (getattr(config, name, None) for name in _HEADS)), None)
        if heads is None:
            continue
        # Some towers are filled up with heads of zeros.
        heads += getattr(config, "num_dummy_heads", 0)
        if heads % ranks:
            yield (
                f"--tp-size {ranks} with --encoder-only: the {heads} attention heads of "
                f"{tower} do not divide by it"
            )


def _check_family(server_args: Any, architecture: str) -> None:
    """Refuse, before anything is loaded, models outside SGLang's list that cannot be split;
    `families.proof` says the rest."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    args = resolving_view(server_args)
    flag = "--encoder-only" if args.encoder_only else "--language-only"
    config = model_config_of(server_args)
    if not config.is_multimodal:
        hint = "" if args.enable_multimodal else "; --enable-multimodal may be missing"
        raise ConfigError(f"{flag}: {architecture} has no encoder to be apart{hint}")
    if architecture in _WHOLE:
        raise ConfigError(
            f"{flag}: {architecture} has no language model that could run without its encoder; "
            "one server serves it"
        )
