from __future__ import annotations

import asyncio
import io
import json
import logging
import sys

import pytest

from sglang_epd import logs

logger = logging.getLogger("sglang_epd.test_logs")


@pytest.fixture(autouse=True)
def as_before():
    ours = logging.getLogger("sglang_epd")
    kept, propagates, level = list(ours.handlers), ours.propagate, ours.level
    ours.setLevel(logging.INFO)
    yield
    ours.handlers, ours.propagate = kept, propagates
    ours.setLevel(level)


@pytest.fixture
def written(monkeypatch):
    """What is on stderr in JSON from now on."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    logs.install("json", "encoder")
    return lambda: [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_is_one_object(written):
    with logs.about("r1", 2):
        logger.warning("Trying %d items\nelsewhere", 3)
    logger.info("Ready")
    first, second = written()
    assert first.pop("time").startswith("20")
    assert first == {
        "level": "WARNING",
        "logger": "sglang_epd.test_logs",
        "message": "Trying 3 items\nelsewhere",
        "role": "encoder",
        "request": "r1",
        "item": 2,
    }
    assert "request" not in second
    assert not logging.getLogger("sglang_epd").propagate, "and not once more as text"


def test_an_exception_is_part_of_its_line(written):
    try:
        raise ValueError("odd")
    except ValueError:
        logger.exception("Failed")
    (line,) = written()
    assert line["error"].endswith("ValueError: odd")


def test_others_loggers_are_left_alone(written, caplog):
    logging.getLogger("sglang.srt").warning("theirs")
    assert [record.getMessage() for record in caplog.records] == ["theirs"]
    assert not written()


def test_text_has_the_request_behind_the_message(caplog):
    logs.install("text", "language")
    logs.install("text", "language")
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


def test_an_id_begins_no_line_of_its_own(written):
    with logs.about("x\n[2026] forged \x1b[31m" + "y" * 1000):
        logger.info("one")
    (line,) = written()
    assert line["request"].startswith("x?[2026] forged ?[31m")
    assert len(line["request"]) == 64


async def test_tasks_that_are_begun_meanwhile_are_about_it_too(caplog):
    logs.install("text", "language")

    async def work() -> None:
        logger.info("working")

    with logs.about("r1"):
        task = asyncio.create_task(work())
    with logs.about("r2"):
        await task
    assert [record.getMessage() for record in caplog.records] == ["working [request r1]"]


def test_a_line_that_cannot_be_formatted_raises_nothing(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logs.install("text", "language")
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
    logs.install("text", "language")
    yield out.getvalue
    root.removeHandler(handler)


FORGED = "x\n[ERROR] forged\r[ERROR] forged\x1b[2J\u2028[ERROR] forged"


def test_what_a_user_chose_begins_no_line_wherever_it_is_said(text):
    logger.warning("Could not encode %s: %s", FORGED, ValueError(FORGED))
    logging.getLogger("sglang_epd.another.module").info(f"No word of {FORGED}")
    with logs.about(FORGED):
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
