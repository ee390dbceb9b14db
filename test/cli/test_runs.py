from __future__ import annotations

import json
import os
import stat

import pytest

from sglang_epd.cli import runs
from sglang_epd.errors import ConfigError


def test_a_run_is_found_while_it_lives(tmp_path):
    run = runs.Run(tmp_path)
    assert runs.find(tmp_path) == []  # nothing is told yet
    run.write({"started_at": 1.0, "servers": []})
    assert runs.find(tmp_path) == [{"started_at": 1.0, "servers": []}]
    assert run.folder.name == str(os.getpid())
    assert stat.S_IMODE((run.folder / "state.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(run.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.temporary.stat().st_mode) == 0o700
    (run.temporary / "tmp1").touch()
    run.close(keep=False)
    assert runs.find(tmp_path) == []
    assert not run.folder.exists()
    assert not run.temporary.exists()


def test_a_run_that_was_killed_is_not_found_and_its_logs_are_kept_for_a_while(
    tmp_path, tmp_path_factory
):
    temporaries = []
    for pid in range(1, 9):
        left = tmp_path / str(pid)
        left.mkdir()
        (left / "lock").touch()
        (left / "state.json").write_text(json.dumps({"started_at": pid}))
        temporary = tmp_path_factory.mktemp("temporary")
        temporaries.append(temporary)
        (left / "tmp").symlink_to(temporary)
        os.utime(left, (pid, pid))
    assert runs.find(tmp_path) == []
    runs.Run(tmp_path).close(keep=False)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["4", "5", "6", "7", "8"]
    assert not any(folder.exists() for folder in temporaries)


def test_a_run_whose_logs_are_kept_leaves_no_temporary_files(tmp_path):
    run = runs.Run(tmp_path)
    (run.temporary / "tmp1").touch()
    (run.folder / "encoder.log").write_text("why")
    run.close(keep=True)
    assert not run.temporary.exists()
    assert [one.name for one in run.folder.iterdir() if one.name != "lock"] == ["encoder.log"]


def test_the_folder_is_this_users_own(tmp_path):
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = runs.root(env)
    assert folder == tmp_path / "sglang-epd"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="remove it"):
        runs.root(env)
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="remove it"):
        runs.root(env)
