"""Prints what `checkpoint.served` finds for servers of some flags: one process, which imports
SGLang once and is forked for each of them.

    checkpoints_of_servers.py '[["--model-path", "acme/tiny-vl"], …]'

A line of JSON for each: its namespace, configurations and weight files, or the error.
"""

from __future__ import annotations

import json
import os
import sys

from sglang_epd.errors import ConfigError


def found(flags: list[str]) -> dict[str, object]:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    from sglang_epd.checkpoint import processing, served
    from sglang_epd.namespace import namespace

    server_args = prepare_server_args(flags)
    server_args.resolve_once()
    publish(server_args, role="encoder")
    try:
        checkpoint = served()
        config = model_config_of(server_args).hf_config
        identity = namespace(config, checkpoint, "float32", processing())
    except ConfigError as error:
        return {"error": error.message}
    weights = checkpoint.weights
    return {
        "namespace": identity,
        "configs": sorted(checkpoint.configs),
        "weights": None if weights is None else sorted(path.name for path in weights),
        "folders": sorted({str(path.parent) for path in weights or ()}),
    }


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.model_loader.loader  # noqa: F401

    for flags in json.loads(sys.argv[1]):
        sys.stdout.flush()
        if os.fork() == 0:
            print(json.dumps(found(flags)), flush=True)
            os._exit(0)
        assert os.wait()[1] == 0, flags


if __name__ == "__main__":
    main()
