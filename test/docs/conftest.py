from __future__ import annotations

import argparse
import gc
import importlib
import warnings

import pytest


@pytest.fixture(scope="session")
def launcher() -> argparse.ArgumentParser:
    """SGLang's own parser of a server's flags."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server_args = importlib.import_module("sglang.srt.server_args")
    gc.collect()
    gc.freeze()  # as after the collection of tests
    parser = argparse.ArgumentParser(exit_on_error=False)
    server_args.ServerArgs.add_cli_args(parser)
    return parser
