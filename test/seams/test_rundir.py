from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sglang_epd.seams import rundir

VARIABLE = "SGLANG_EPD_RUN_ID"
SECRET = "SGLANG_EPD_RUN_SECRET"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    # `setenv` first, so that what a test writes is undone too.
    for name in (VARIABLE, SECRET):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def folder():
    """A folder that is short enough for a socket in it, which pytest's own may not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def test_each_launcher_has_a_run_of_its_own():
    rundir.draw_run_id()
    first = rundir.control_path()
    rundir.draw_run_id()
    assert rundir.control_path() != first
    assert first.name == "control"


def test_a_child_uses_its_launchers_run():
    rundir.draw_run_id()
    code = "from sglang_epd.seams import rundir; print(rundir.control_path())"
    told = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert told.strip() == str(rundir.control_path())


def test_runs_cannot_be_guessed_nor_their_secrets_read_off_a_folder():
    ids, secrets = set(), set()
    for _ in range(20):
        rundir.draw_run_id()
        ids.add(os.environ[VARIABLE])
        secrets.add(rundir.secret())
        assert rundir.secret().hex() not in str(rundir.control_path())
    assert len(ids) == len(secrets) == 20
    assert all(len(run_id.split("-")[-1]) == 12 for run_id in ids)
    assert {len(secret) for secret in secrets} == {32}


@pytest.mark.parametrize("name", ["", "l" * 60, "ü" * 40, "l" * 200], ids=len)
def test_the_path_is_short_enough_for_a_unix_socket(folder, name):
    folder = folder / name
    folder.mkdir(exist_ok=True)
    bind = (
        "import socket",
        "path = rundir.control_path()",
        "path.parent.mkdir()",
        "socket.socket(socket.AF_UNIX).bind(bytes(path))",
        "print(path)",
    )
    path = in_process(folder, *bind).strip()
    in_folder = folder / Path(*Path(path).parts[-2:])
    # Elsewhere only where it has to be.
    assert (Path(path) == in_folder) == (len(os.fsencode(in_folder)) <= 107)
    assert not Path(path).exists()


def test_the_folder_is_made_by_nobody_who_only_asks_for_it():
    rundir.draw_run_id()
    assert not rundir.control_path().parent.exists()


def in_process(folder: Path, *lines: str) -> str:
    """What a process prints that draws a run id in this folder; it must not hang."""
    code = "\n".join(("from sglang_epd.seams import rundir", "rundir.draw_run_id()", *lines))
    env = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60, env=env)


def test_the_folder_is_removed_at_exit(folder):
    lines = ("path = rundir.control_path()", "path.parent.mkdir()", "path.touch()", "print(path)")
    assert in_process(folder, *lines).startswith(str(folder))
    assert not list(folder.iterdir())


def left(folder: Path, name: str) -> Path:
    """What looks like the folder of a server that was killed."""
    made = folder / f"sglang-epd-{os.getuid()}-{name}"
    made.mkdir()
    return made


def claim_there(folder: Path) -> None:
    """What a server does that starts."""
    made = in_process(folder, "rundir.claim()", "print(rundir.control_path().parent.is_dir())")
    assert made.strip() == "True"


def test_a_claim_removes_what_a_killed_server_left_and_nothing_that_is_held(folder, monkeypatch):
    (left(folder, "killed") / "lock").touch()
    left(folder, "not-claimed-yet")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    rundir.draw_run_id()
    held = rundir.claim()
    try:
        claim_there(folder)
        names = {path.name.split("-", 3)[-1] for path in folder.iterdir()}
        assert names == {rundir.control_path().parent.name.split("-", 3)[-1], "not-claimed-yet"}
    finally:
        os.close(held)


def test_a_pipe_in_place_of_a_lock_blocks_no_start(folder):
    os.mkfifo(left(folder, "pipe") / "lock")
    claim_there(folder)


def test_a_lock_that_leads_elsewhere_is_left_alone(folder):
    elsewhere = folder / "elsewhere"
    os.mkfifo(elsewhere)
    made = left(folder, "link")
    (made / "lock").symlink_to(elsewhere)
    claim_there(folder)
    assert made.is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_left_alone(folder):
    made = left(folder, "theirs")
    (made / "lock").touch()
    os.chown(made, 12345, 12345)
    claim_there(folder)
    assert made.is_dir()


def test_a_worker_that_receives_has_a_folder_of_its_own_and_its_servers_secret():
    rundir.draw_run_id()
    ours, shared = rundir.control_path(), rundir.secret()
    lines = ("rundir.draw_folder()", "print(rundir.control_path(), rundir.secret().hex())")
    code = "\n".join(("from sglang_epd.seams import rundir", *lines))
    told = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split()
    assert told[0] != str(ours)
    assert told[1] == shared.hex()
