"""The suite of a made-up project: what fails once, what fails twice, and what does not end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[2] / "scripts" / "suite.py"
FAST = """
def test_fast():
    pass
"""
FAST_FAILS = """
def test_fast_fails():
    assert False
"""
FAST_FAILS_ONCE = """
def test_fast_fails_once():
    with open("fast", "a+") as file:
        file.write("x")
        assert file.tell() > 1
"""
SERVER = """
import os, signal, pytest
pytestmark = pytest.mark.servers

def tried(name):
    with open(name, "a+") as file:
        file.write("x")
        file.seek(0)
        return len(file.read())

def test_server():
    pass
"""
FAILS_ONCE = """
@pytest.mark.parametrize("what", ["a [b]"])
def test_fails_once(what):
    print("said before the failure")
    assert tried("once") > 1
"""
TEARDOWN_FAILS_ONCE = """
@pytest.fixture
def leaving():
    yield
    assert tried("teardown") > 1

def test_teardown(leaving):
    pass
"""
FAILS_TWICE = """
def test_fails_twice():
    assert tried("twice") > 2
"""
SKIPPED_AGAIN = """
def test_skips():
    if tried("skips") > 1:
        pytest.skip("cannot be told")
    assert False
"""
CRASHES_AGAIN = """
def test_crashes():
    if tried("crashes") > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert False
"""
SIGNAL = """
def test_signal():
    os.kill(os.getpid(), signal.{})
"""
FAST_SIGNAL = "import os, signal\n" + SIGNAL
ONCE = "test_servers.py::test_fails_once[a [b]]"


class Suite:
    """A project whose suite is run.

    Args:
        fast: source of its fast tests.
        servers: of its tests marked `servers`.
    """

    def __init__(self, folder: Path, fast: str, servers: str) -> None:
        (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    servers: slow\n    extra: x\n")
        (folder / "test_fast.py").write_text(fast)
        (folder / "test_servers.py").write_text(servers)
        self._folder = folder

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # Without workers and other plug-ins, for the time that they take.
        command = [sys.executable, str(SUITE), "-p", "xdist", "-n", "0", *arguments]
        return subprocess.run(
            command,
            cwd=self._folder,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def tries(self, name: str) -> int:
        return len((self._folder / name).read_text())


def last(done: subprocess.CompletedProcess[str]) -> str:
    """The closing line, without its time."""
    return re.sub(r"^=+ | in [\d.]+s =+$", "", done.stdout.splitlines()[-1])


def told(done: subprocess.CompletedProcess[str], word: str) -> list[str]:
    return re.findall(rf"^{word} (.*)$", done.stdout.rpartition("all steps")[2], re.MULTILINE)


def test_all_is_well(tmp_path: Path) -> None:
    done = Suite(tmp_path, FAST, SERVER).run("-n", "2")
    assert (done.returncode, last(done)) == (0, "2 passed"), done.stdout + done.stderr


def test_what_fails_once_is_flaky_and_no_failure(tmp_path: Path) -> None:
    suite = Suite(tmp_path, FAST + FAST_FAILS_ONCE, SERVER + FAILS_ONCE + TEARDOWN_FAILS_ONCE)
    done = suite.run()
    assert (done.returncode, last(done)) == (0, "2 passed, 3 flaky"), done.stdout
    fast = "test_fast.py::test_fast_fails_once"
    assert told(done, "FLAKY") == [fast, ONCE, "test_servers.py::test_teardown"]
    assert not told(done, "FAILED")
    log = done.stdout.partition(f"failed once: {ONCE}")[2]
    assert "said before the failure" in log and "assert tried(" in log
    assert suite.tries("once") == suite.tries("teardown") == 2


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    suite = Suite(tmp_path, FAST + FAST_FAILS, SERVER + FAILS_ONCE + FAILS_TWICE + SKIPPED_AGAIN)
    done = suite.run()
    assert (done.returncode, last(done)) == (1, "3 failed, 2 passed, 1 flaky"), done.stdout
    assert told(done, "FLAKY") == [ONCE]
    failed = ["test_fast.py::test_fast_fails", "test_servers.py::test_fails_twice"]
    assert told(done, "FAILED") == [*failed, "test_servers.py::test_skips"]
    assert suite.tries("twice") == 2


@pytest.mark.servers  # each case starts pytest once or twice
@pytest.mark.parametrize(
    ("fast", "servers", "said"),
    [
        (FAST, SERVER + FAILS_ONCE + SIGNAL.format("SIGSEGV"), "tests with servers: pytest.* -11"),
        (FAST_SIGNAL.format("SIGINT"), SERVER, "fast tests: pytest.* 2"),
        (FAST, "", "tests with servers: pytest.* 5"),
    ],
)
def test_a_step_that_does_not_end_by_itself_fails(
    tmp_path: Path, fast: str, servers: str, said: str
) -> None:
    done = Suite(tmp_path, fast, servers).run()
    assert done.returncode == 1 and "1 error" in last(done), done.stdout
    (error,) = told(done, "ERROR")
    assert re.fullmatch(said, error)
    # Not run again, since nobody knows what else would have failed.
    assert not (tmp_path / "once").exists() or (tmp_path / "once").read_text() == "x"


def test_a_crash_of_the_second_try_fails(tmp_path: Path) -> None:
    done = Suite(tmp_path, FAST, SERVER + FAILS_ONCE + CRASHES_AGAIN).run()
    assert (done.returncode, last(done)) == (1, "2 failed, 2 passed"), done.stdout
    assert told(done, "FAILED") == [ONCE, "test_servers.py::test_crashes"]


def test_what_all_tests_do_is_no_chance(tmp_path: Path) -> None:
    many = "\n@pytest.mark.parametrize('n', range(61))\ndef test_n(n): assert tried(str(n)) > 1\n"
    done = Suite(tmp_path, FAST, SERVER + many).run()
    assert (done.returncode, last(done)) == (1, "61 failed, 2 passed"), done.stdout


def test_marks_choose_among_the_tests_of_both_steps(tmp_path: Path) -> None:
    extra = "\n@pytest.mark.extra\ndef test_extra():\n    assert False\n"
    done = Suite(tmp_path, "import pytest" + FAST + extra, SERVER + extra).run(
        "--marks", "not extra"
    )
    assert (done.returncode, last(done)) == (0, "2 passed"), done.stdout
