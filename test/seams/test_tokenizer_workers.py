from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_epd.errors import ConfigError
from sglang_epd.seams import tokenizer_workers

VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
NAME = "sglang_epd.seams.tokenizer_workers:app"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)


def test_workers_begin_here():
    tokenizer_workers.announce()
    tokenizer_workers.announce()
    assert os.environ[VARIABLE] == NAME


def test_another_application_is_not_silently_replaced(monkeypatch):
    monkeypatch.setenv(VARIABLE, "mine:app")
    with pytest.raises(ConfigError, match="mine:app"):
        tokenizer_workers.announce()
    assert os.environ[VARIABLE] == "mine:app"


def test_it_has_nothing_else():
    with pytest.raises(AttributeError):
        _ = tokenizer_workers.application


@pytest.mark.servers  # imports what such a worker does
def test_the_application_is_sglangs_with_the_plugins_loaded_before():
    """As the HTTP server asks for it, in a process that has loaded nothing yet."""
    code = (
        "import sys\n"
        "from uvicorn.importer import import_from_string\n"
        f"app = import_from_string({NAME!r})\n"
        "from sglang.srt import plugins\n"
        "from sglang.srt.entrypoints import http_server\n"
        "from sglang.srt.disaggregation.encoder import receiver\n"
        "assert app is http_server.app and plugins._plugins_loaded\n"
        "assert receiver.EncoderBootstrapServer.__name__ == 'BootstrapPlace'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
