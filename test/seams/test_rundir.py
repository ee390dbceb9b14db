from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

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


def test_each_launcher_has_a_run_of_its_own():
    rundir.draw_run_id()
    first = rundir.control_path()
    rundir.draw_run_id()
    assert rundir.control_path() != first
    assert first.name == "control"


def test_a_child_uses_its_launchers_run(monkeypatch):
    rundir.draw_run_id()
    path, secret = rundir.control_path(), rundir.secret()
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    rundir.draw_run_id()
    assert (rundir.control_path(), rundir.secret()) == (path, secret)


def test_a_launcher_that_is_itself_a_child_process_has_a_run_too(monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    rundir.draw_run_id()
    assert rundir.control_path()


def test_two_runs_cannot_be_guessed_from_each_other():
    ids = set()
    for _ in range(20):
        rundir.draw_run_id()
        ids.add(os.environ[VARIABLE])
    assert len(ids) == 20
    assert all(len(run_id.split("-")[-1]) == 12 for run_id in ids)


def test_each_run_has_a_secret_that_its_folder_does_not_tell():
    secrets = set()
    for _ in range(20):
        rundir.draw_run_id()
        assert len(rundir.secret()) == 32
        assert rundir.secret().hex() not in str(rundir.control_path())
        secrets.add(rundir.secret())
    assert len(secrets) == 20


def test_the_path_is_short_enough_for_a_unix_socket():
    rundir.draw_run_id()
    assert len(os.fsencode(rundir.control_path())) < 108


def test_the_folder_is_made_by_nobody_who_only_asks_for_it():
    rundir.draw_run_id()
    assert not rundir.control_path().parent.exists()


def test_the_folder_is_removed_at_exit(tmp_path):
    code = (
        "from sglang_epd.seams import rundir\n"
        "rundir.draw_run_id()\n"
        "path = rundir.control_path()\n"
        "path.parent.mkdir()\n"
        "path.touch()\n"
        "print(path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.stdout.strip().startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())
