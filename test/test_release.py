"""The release: an sdist, the wheel that is built from it, and what an install of that has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from packages import folder_of

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def tracked() -> list[str]:
    given = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(given, cwd=ROOT, text=True, timeout=60).split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel, of what git has or would have."""
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    # The backend of requirements.lock; nothing is fetched.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, clone]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel, and this one's packages for what it requires."""
    folder = tmp_path_factory.mktemp("clean")
    base = sys._base_executable  # type: ignore[attr-defined]
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    (packages,) = folder.glob("lib/python3*/site-packages")
    others = folder_of("sglang").parent
    (packages / "others.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")
    python = folder / "bin" / "python"
    given = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    (wheel,) = built.glob("*.whl")
    subprocess.run([*given, "--quiet", wheel], check=True, timeout=200)
    return folder / "bin"


def told(bin_: Path, *words: str, **env: str) -> str:
    # Away from the clone, whose packages Python would find first.
    command, given = [str(bin_ / words[0]), *words[1:]], os.environ | env
    return subprocess.check_output(command, text=True, timeout=200, cwd=bin_, env=given)


def test_the_wheel_has_the_packages_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    kinds = (".py", "py.typed", ".json")
    mine = [name.removeprefix("python/") for name in tracked() if name.startswith("python/")]
    assert sorted(names) == sorted(name for name in mine if name.endswith(kinds))
    assert {"sglang_epd/py.typed", "sglang_epd_plan/py.typed"} < set(names)
    assert any(name.startswith("sglang_epd/profiles/") for name in names)
    assert sorted(mine) == sorted(names), "a file of the packages is not installed"


def test_the_sdist_has_what_a_build_needs(built: Path) -> None:
    """The wheel was built of it, so all that is missing would be missing there."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2].partition("/")[0] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "python"}
    assert wanted <= names <= wanted | {"", "PKG-INFO", "setup.cfg", "MANIFEST.in"}


def test_the_commands_run_where_it_is_installed(installed: Path) -> None:
    assert told(installed, "sglang-epd", "--version").split() == ["sglang-epd", VERSION]
    assert "plan" in told(installed, "sglang-epd", "--help")
    # A command of the second package, and a profile that comes with the first.
    profile = "h100-qwen2_5-vl-7b"
    code = f"from sglang_epd.profile import load_profile as load; print(load({profile!r}))"
    assert "pixels" in told(installed, "python", "-c", code)
    assert "--workload" in told(installed, "sglang-epd", "plan", "--help")


def test_sglang_finds_the_plug_ins_where_it_is_installed(installed: Path) -> None:
    """By SGLang's own search of its groups; a plug-in that fails to load is left out there."""
    code = """
import json, sglang_epd
from sglang.srt import plugins as sglang
groups = sglang.GENERAL_PLUGINS_GROUP, sglang.PLATFORM_PLUGINS_GROUP
found = {group: sorted(sglang.load_plugins_by_group(group)) for group in groups}
print(json.dumps([sglang_epd.__file__, found]))
"""
    # As a user names them; other packages have plug-ins, too.
    named = "sglang_epd,sglang_epd_cpu"
    shown = told(installed, "python", "-c", code, SGLANG_PLUGINS=named)
    place, found = json.loads(shown.splitlines()[-1])
    assert Path(place).is_relative_to(installed.parent)
    assert found == {
        "sglang.srt.plugins": ["sglang_epd", "sglang_epd_cpu"],
        "sglang.srt.platforms": ["sglang_epd_cpu"],
    }


def test_the_metadata_are_the_projects(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"sglang_epd-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    assert {"License-Expression: Apache-2.0", "Requires-Dist: sglang==0.5.23"} <= set(lines)
    assert "Requires-Python: <3.13,>=3.11" in lines
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")}
    assert {"mooncake", "mooncake-cpu", "plan", "tracing"} <= extras
