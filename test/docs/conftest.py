from __future__ import annotations

import argparse

import pytest

from packages import sglang_module


@pytest.fixture(scope="session")
def launcher() -> argparse.ArgumentParser:
    """SGLang's own parser of a server's flags."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    sglang_module("server_args").ServerArgs.add_cli_args(parser)
    return parser
