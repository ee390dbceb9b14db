from __future__ import annotations

import argparse
import gc
import importlib
import sys
import warnings
from pathlib import Path

import pytest

# Modules of scripts/, which are not part of the package.
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


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
