"""A server with an EPD role ends where a hook does not hold; it never runs SGLang's own EPD.

Each starts as users start it, on SGLang as it is installed but for what the test changes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.topology import checkpoint
from sglang_epd.cli.processes import ServerError, ServerProcess, free_port

pytestmark = pytest.mark.servers

# Half of it on a machine that does nothing else; most is importing SGLang.
LIMIT_S = 120.0
ENCODER = ("--encoder-only",)
LANGUAGE = ("--language-only", "--encoder-urls", "http://127.0.0.1:9")
ENDED = r"exited with status [1-9]|was killed by signal"
WAY_BACK = "SGLANG_EPD=off to use SGLang's own EPD"


@dataclass
class Installed:
    """SGLang in a folder of its own: links to the installed one, and what was changed."""

    site: Path

    def __post_init__(self) -> None:
        spec = importlib.util.find_spec("sglang")
        assert spec is not None and spec.submodule_search_locations
        self.original = Path(spec.submodule_search_locations[0])

    def change(self, file: str, old: str, new: str, moved_to: str = "") -> None:
        """Replace text in a file below `sglang`, and give it another name if there is one."""
        here = self.site / "sglang"
        for folder in [Path(), *reversed(Path(file).parents)]:
            self._open(here / folder, self.original / folder)
        path = here / file
        text = path.read_text()
        assert old in text
        path.unlink()
        path.with_name(moved_to or path.name).write_text(text.replace(old, new))

    def add(self, name: str, text: str) -> None:
        path = self.site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    @staticmethod
    def _open(folder: Path, original: Path) -> None:
        """Have a folder of links in place of a link to a folder."""
        if folder.is_dir() and not folder.is_symlink():
            return
        folder.unlink(missing_ok=True)
        folder.mkdir(parents=True)
        for entry in original.iterdir():
            if entry.name != "__pycache__":  # written by who runs this
                (folder / entry.name).symlink_to(entry)


@pytest.fixture
def sglang(tmp_path: Path) -> Installed:
    return Installed(tmp_path / "site")


@pytest.fixture
def output_of(sglang: Installed, tmp_path: Path) -> Callable[..., str]:
    """What a server writes that has to end by itself, and not well."""

    def run(*flags: str) -> str:
        port, log = free_port(), tmp_path / "log"
        command = [sys.executable, "-m", "sglang.launch_server", *flags]
        command += ["--model-path", checkpoint("tiny-qwen2_5-vl"), "--port", str(port)]
        env = {**os.environ, "PYTHONPATH": str(sglang.site)}
        url = f"http://127.0.0.1:{port}/health"
        server = ServerProcess("server", command, log_path=log, ready_url=url, env=env)
        with server, pytest.raises(ServerError, match=ENDED):
            server.wait_ready(LIMIT_S)
        told = log.read_text()
        assert WAY_BACK in told
        return told

    return run


def test_an_encoder_whose_target_was_renamed(sglang, output_of):
    sglang.change("srt/disaggregation/encoder/http_server.py", "def launch_server", "def launch")
    sglang.change(
        "launch_server.py",
        "http_server import launch_server",
        "http_server import launch as launch_server",
    )
    told = output_of(*ENCODER)
    assert "sglang-epd ends this server, which has an EPD role" in told
    assert "for SGLang 0.5.23, does not fit the installed 0.5.23" in told
    assert "sglang.srt.disaggregation.encoder.http_server.launch_server, and" in told


@pytest.mark.extended  # as where it has another name
def test_a_language_server_whose_target_is_in_another_module(sglang, output_of):
    folder, name = "srt/managers", "scheduler_components.request_receiver"
    sglang.change(f"{folder}/scheduler.py", name, "scheduler_components.intake")
    sglang.change(
        f"{folder}/scheduler_components/request_receiver.py", "class", "class", "intake.py"
    )
    told = output_of(*LANGUAGE)
    assert f"sglang.srt.managers.{name}.SchedulerRequestReceiver._pull_raw_reqs, and" in told


def test_another_version(sglang, output_of):
    sglang.add(
        "sglang-0.5.24.dist-info/METADATA", "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.24\n"
    )
    told = output_of(*LANGUAGE)
    assert "for SGLang 0.5.23, does not fit the installed 0.5.24: the versions differ. " in told
    assert f"pip install sglang==0.5.23, or set {WAY_BACK}" in told


@pytest.mark.extended
def test_a_role_from_a_file_where_the_flags_are_resolved_elsewhere(sglang, output_of, tmp_path):
    """Neither the command line nor the hook on the flags says so; the last guard does."""
    for file in ("pd_disaggregation_hook", "pipeline", "resolution_hooks"):
        name = "handle_encoder_disaggregation"
        sglang.change(f"srt/arg_groups/{file}.py", name, "resolve_encoder_disaggregation")
    (tmp_path / "server.yaml").write_text("encoder-only: &role true\n")
    told = output_of("--config", str(tmp_path / "server.yaml"))
    assert "sglang_epd/seams/roles.py" in told  # of the traceback
    assert "pd_disaggregation_hook.handle_encoder_disaggregation, and" in told


@pytest.mark.extended
def test_a_scheduler_in_which_another_plugin_has_overtaken(sglang, output_of):
    """In the processes that the launcher starts alone, so that the launcher cannot see it."""
    sglang.add(
        "rival-1.dist-info/entry_points.txt", "[sglang.srt.plugins]\nrival = rival:register\n"
    )
    sglang.add("rival-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: rival\nVersion: 1\n")
    sglang.add(
        "rival.py",
        "import multiprocessing\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "TARGET = 'sglang.srt.disaggregation.encoder.receiver.create_mm_receiver'\n"
        "def register():\n"
        "    if multiprocessing.parent_process() is not None:\n"
        "        HookRegistry.register(TARGET, lambda *_, **__: None, HookType.REPLACE)\n",
    )
    told = output_of(*LANGUAGE)
    assert "receiver.create_mm_receiver, which is hooked, was replaced by rival. Set" in told
