from __future__ import annotations

import asyncio
import io
import logging

import pytest

from sglang_epd import logs

logger = logging.getLogger("sglang_epd.test_logs")


@pytest.fixture(autouse=True)
def as_before():
    ours = logging.getLogger("sglang_epd")
    kept, level = list(ours.handlers), ours.level
    ours.setLevel(logging.INFO)
    logs.install()
    yield
    ours.handlers = kept
    ours.setLevel(level)


def test_a_line_has_its_request_behind_the_message(caplog):
    logs.install()
    with logs.about("r1"):
        logger.info("%d of them", 3)
        logger.info("Cancelled r1")
        with logs.about("r2", 0):
            logger.info("inside")
    logger.info("nobody's")
    assert [record.getMessage() for record in caplog.records] == [
        "3 of them [request r1]",
        "Cancelled r1",
        "inside [request r2 item 0]",
        "nobody's",
    ]


async def test_tasks_that_are_begun_meanwhile_are_about_it_too(caplog):
    async def work() -> None:
        logger.info("working")

    with logs.about("r1"):
        task = asyncio.create_task(work())
    with logs.about("r2"):
        await task
    assert [record.getMessage() for record in caplog.records] == ["working [request r1]"]


def test_a_line_that_cannot_be_formatted_raises_nothing(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    record = logger.makeRecord(logger.name, logging.INFO, "", 0, "%d of %d", ("one",), None)
    with logs.about("r1"):
        for handler in logging.getLogger("sglang_epd").handlers:
            handler.handle(record)
    assert record.msg == "%d of %d"


@pytest.fixture
def text():
    """What SGLang's handler writes, in its format."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    yield out.getvalue
    root.removeHandler(handler)


FORGED = "x\n[ERROR] forged\r[ERROR] forged\x1b[2J\u2028[ERROR] forged"


def test_what_a_user_chose_begins_no_line_wherever_it_is_said(text):
    logger.warning("Could not encode %s: %s", FORGED, ValueError(FORGED))
    logging.getLogger("sglang_epd.another.module").info(f"No word of {FORGED}")
    with logs.about(FORGED + "y" * 100_000):
        logger.info("one")
    logger.warning("Gone: %s", "y" * 100_000)
    lines = text().split("\n")
    assert [line[:8] for line in lines] == ["[WARNING", "[INFO] N", "[INFO] o", "[WARNING", ""]
    assert not any(mark in text() for mark in "\r\x1b\u2028")
    assert len(text()) < 20_000


def test_an_errors_message_forges_no_line_in_a_traceback(text):
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("Could not encode %s", FORGED)
    first, *rest = text().rstrip("\n").split("\n")
    assert first.startswith("[ERROR] Could not encode x?[ERROR]")
    assert rest[0].startswith("  Traceback")
    assert any("ValueError: x" in line for line in rest)
    assert all(line.startswith("  ") for line in rest)
    assert not any(mark in text() for mark in "\r\x1b\u2028")
