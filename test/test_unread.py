from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from sglang_epd import config
from sglang_epd.unread import UNREAD, announce

# Read, one way or another: by SGLang's code, by this package, or refused at start-up.
READ = {
    "SGLANG_ENCODER_DISPATCH_MIN_ITEMS",
    "SGLANG_ENCODER_IMAGE_PROCESSOR_USE_GPU",
    "SGLANG_ENCODER_MM_LOAD_WORKERS",
    "SGLANG_ENCODER_MM_RECEIVER_MODE",
    "SGLANG_ENCODER_PREPROC_WORKERS",
    "SGLANG_ENCODER_RECV_TIMEOUT",
    "SGLANG_VLM_CACHE_SIZE_MB",
}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for table in UNREAD.values():
        for name in table:
            monkeypatch.delenv(name, raising=False)


def test_what_is_set_is_named_in_one_line_with_what_takes_its_place(caplog, monkeypatch):
    monkeypatch.setenv("SGLANG_ENCODER_MAX_BATCH_SIZE", "16")
    monkeypatch.setenv("SGLANG_ENCODER_SEND_TIMEOUT", "")
    monkeypatch.setenv("SGLANG_ENCODER_HTTP_TIMEOUT", "99")  # a language server's
    announce("encoder", {"--extra-metric-labels": {"team": "a"}})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == (
        "Set, but not read by sglang-epd: SGLANG_ENCODER_MAX_BATCH_SIZE (instead: "
        "SGLANG_EPD_ENCODER_BATCH_ITEMS and SGLANG_EPD_ENCODER_BATCH_PATCHES); "
        "SGLANG_ENCODER_SEND_TIMEOUT (instead: SGLANG_EPD_GRANT_TIMEOUT_S on language servers); "
        "--extra-metric-labels (instead: nothing: encoders' series have their own labels only)"
    )


@pytest.mark.parametrize("server", UNREAD)
def test_where_nothing_is_set_nothing_is_said(caplog, server):
    announce(server, {"--extra-metric-labels": None, "--trust-mm-content-hashes": False})
    assert not caplog.records


def test_every_variable_of_sglangs_epd_is_read_or_named():
    """Of its encoder's and receiver's source, and the section of its declarations."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations
    sglang_folder = Path(found.submodule_search_locations[0])
    declared = (sglang_folder / "srt/environ.py").read_text()
    section = declared.partition("# Encoder pipeline and disaggregation")[2].partition("# =====")
    rest = section[2].partition("    # =====")[0]
    names = set(re.findall(r"^    (SGLANG_\w+) = ", rest, re.M))
    for path in (sglang_folder / "srt/disaggregation/encoder").glob("*.py"):
        names |= set(re.findall(r"\bSGLANG_(?:ENCODER|EMBEDDING|VLM)_\w+", path.read_text()))
    named = {name for table in UNREAD.values() for name in table if name.startswith("SGLANG_")}
    assert len(names) > 15
    assert names == named | READ
    assert not named & READ


def test_the_settings_that_take_their_place_exist():
    known = config.variables().keys()
    told = " ".join(text for table in UNREAD.values() for text in table.values())
    named = set(re.findall(r"SGLANG_EPD_\w+", told))
    assert named
    assert named <= known


def test_the_page_on_migration_has_them_all():
    page = (Path(__file__).parents[1] / "docs/migration.md").read_text()
    missing = {name for table in UNREAD.values() for name in table if f"`{name}`" not in page}
    assert not missing
    assert not {name for name in READ if f"`{name}`" not in page}
