from __future__ import annotations

import os

from sglang_epd.cli import logs
from sglang_epd.cli.logs import LogFollower, phase_of


def test_whole_lines_are_read_as_they_come(tmp_path):
    path = tmp_path / "log"
    follower = LogFollower(path)
    assert follower.lines() == []
    with path.open("wb", buffering=0) as log:
        log.write(b"one\ntw")
        assert follower.lines() == ["one"]
        assert follower.lines() == []
        log.write(b"o\r\n\xff\nend")
        assert follower.lines() == ["two", "\ufffd"]
    assert follower.finish() == ["end"]


def test_a_new_file_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "log"
    path.write_text("a long first life\n")
    follower = LogFollower(path)
    assert follower.finish() == ["a long first life"]
    path.rename(tmp_path / "log.previous")
    path.write_text("second\n")
    assert follower.lines() == ["second"]
    assert follower.finish() == []


def test_a_long_file_begins_anew_and_its_writer_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_MAX_LOG_BYTES", 10)
    path = tmp_path / "log"
    follower = LogFollower(path)
    with path.open("ab", buffering=0) as log:
        log.write(b"a line\n")
        assert follower.lines() == ["a line"]
        follower.shorten()
        log.write(b"another line\n")
        assert follower.lines() == ["another line"], "of the same file"
        follower.shorten()
        log.write(b"the third\n")
    assert follower.lines() == ["the third"]
    assert path.read_bytes() == b"the third\n"
    assert logs.earlier(path).read_bytes() == b"a line\nanother line\n"


def test_a_removed_file_is_shortened_too(tmp_path, monkeypatch):
    """Its server writes on."""
    monkeypatch.setattr(logs, "_MAX_LOG_BYTES", 10)
    path = tmp_path / "log"
    follower = LogFollower(path)
    with path.open("ab", buffering=0) as log:
        log.write(b"a line that is long\n")
        assert follower.lines() == ["a line that is long"]
        path.unlink()
        follower.shorten()
        assert os.fstat(log.fileno()).st_size == 0
    assert logs.earlier(path).read_bytes() == b"a line that is long\n"


def test_a_file_is_read_before_it_is_shortened(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_MAX_LOG_BYTES", 10)
    monkeypatch.setattr(logs, "_CHUNK_BYTES", 8)
    path = tmp_path / "log"
    follower = LogFollower(path)
    path.write_bytes(b"first\nsecond\n")
    assert follower.lines() == ["first"]
    follower.shorten()
    assert follower.lines() == ["second"]
    follower.shorten()
    assert path.read_bytes() == b""


def test_a_line_without_an_end_takes_bounded_memory(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * (3 << 20))
    follower = LogFollower(path)
    pieces = follower.finish()
    assert sum(map(len, pieces)) == 3 << 20
    assert len(pieces) >= 3


def test_phases_of_start_up():
    assert phase_of("[2026-01-01] server_args=ServerArgs(...)") == "configured"
    assert phase_of("Load weight end. elapsed=1.2 s") == "weights loaded"
    assert phase_of("decode batch") == ""
