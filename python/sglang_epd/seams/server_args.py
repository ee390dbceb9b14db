"""What the flags ask for, and which combinations this package does not serve.

Leans on `arg_groups.pd_disaggregation_hook.handle_encoder_disaggregation`, which
SGLang calls while it resolves the flags.
"""

from __future__ import annotations

from typing import Any

from sglang_epd.errors import ConfigError

_RIVAL = "set SGLANG_EPD=off to use SGLang's own EPD"


def check(_result: None, server_args: Any) -> None:
    """Refuse, at start-up and by name, what would fail or be ignored later.

    Raises:
        ConfigError: a flag that this version does not honour.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    args = resolving_view(server_args)
    if not (args.encoder_only or args.language_only):
        return
    limits = {"--pp-size": args.pp_size, "--nnodes": args.nnodes}
    if args.encoder_only:
        limits |= {"--tp-size": args.tp_size, "--dp-size": args.dp_size}
    if args.language_only:
        limits["--tokenizer-worker-num"] = args.tokenizer_worker_num
    for flag, value in limits.items():
        if value and value > 1:
            side = "--encoder-only" if args.encoder_only else "--language-only"
            raise ConfigError(f"{flag} {value} with {side} is not in this version; {_RIVAL}")
    if args.encoder_only and (args.grpc_mode or args.smg_grpc_mode):
        raise ConfigError(f"--grpc-mode with --encoder-only is not served by sglang-epd; {_RIVAL}")
    for url in args.encoder_urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--encoder-urls: {url!r} is not an http:// or https:// URL")
