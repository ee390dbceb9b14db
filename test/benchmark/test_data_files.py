"""Arms and workloads as files: what is there is valid, and nonsense is refused by name."""

from pathlib import Path

import pytest
from comparison.arms import Arm, Place, Running
from comparison.files import read, read_all
from comparison.workloads import Workload

from sglang_epd.errors import ConfigError

ARM = """
name = "one"
title = "One"
family = "sglang-epd"
[[servers]]
role = "encoder"
[[servers]]
role = "language"
"""
WORKLOAD = """
name = "one"
title = "One"
images = { least = 1, most = 2 }
[small]
text_tokens = 8
answer_tokens = 4
rates = [0, 1]
sizes = [{ width = 56, height = 56 }]
[paper]
text_tokens = 8
answer_tokens = 4
rates = [1]
sizes = [{ width = 56, height = 56 }]
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "one.toml"
    path.write_text(text)
    return path


def test_the_projects_own_are_valid(benchmark_folder: Path) -> None:
    arms = read_all(benchmark_folder / "arms", Arm)
    assert {arm.family for arm in arms} == {"colocated", "in-tree", "sglang-epd"}
    workloads = read_all(benchmark_folder / "workloads", Workload)
    assert {"images", "interference", "repeats", "turns", "video"} <= {w.name for w in workloads}
    # On GPUs each part has its own; cores all share, but for the arms of a core each.
    for arm in arms:
        shares = Place(cores=[0, 1], gpus=[0, 1, 2]).deal(arm)
        cores = {tuple(share.cores) for share in shares}
        assert cores == {(0, 1)} or arm.name.endswith(("-core", "-cores"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('title = "One"', 'title = "One"\ncolour = "red"'), "unknown field `colour`"),
        (('role = "encoder"', 'role = "encoder"\nprot = 1'), "unknown field `prot`"),
        (('role = "encoder"', 'role = "decoder"'), "Invalid enum value 'decoder'"),
        (('role = "encoder"', 'role = "encoder"\ncount = 9'), "<= 5"),
        (('role = "encoder"', 'role = "encoder"\ncount = 5'), "6 servers"),
        (('role = "encoder"', 'role = "encoder"\ncores = -1'), ">= 0"),
        (('role = "encoder"', 'role = "encoder"\nflags = "--a \'"'), "No closing quotation"),
        (('[[servers]]\nrole = "encoder"\n', ""), "language needs encoder"),
        (('role = "language"', 'role = "encoder"'), "the last server"),
        (('role = "encoder"\n[[servers]]\nrole = "language"', 'role = "router"'), "no servers"),
        (('name = "one"', 'name = "two"'), "its name is 'two'"),
        (("[[servers]]", "[[servers"), "line"),
    ],
)
def test_an_arm_that_is_none_is_refused(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=r"one\.toml: ") as refused:
        read(_file(tmp_path, ARM.replace(*change)), Arm)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("rates = [0, 1]", "rates = []"), "length >= 1"),
        (("rates = [0, 1]", "rates = [-1]"), ">= 0"),
        (("rates = [0, 1]", "rates = [nan]"), "not a finite number"),
        (("rates = [0, 1]", "rates = [1]\ngoodput = { low = 1, high = 2 }"), "rate 0"),
        (("rates = [0, 1]", "rates = [0]\ngoodput = { low = 2, high = 2 }"), "not below"),
        (("least = 1, most = 2", "least = 3, most = 2"), "more than most"),
        (("least = 1, most = 2", "least = 1, most = 2, mean = 3.0"), "mean of 3.0"),
        (("width = 56", "width = 1"), ">= 28"),
        (("images = { least = 1, most = 2 }", ""), "images or, in each scale, a clip"),
        (("answer_tokens = 4\nrates = [0, 1]", "rates = [0, 1]"), "answer_tokens"),
        (('title = "One"', 'title = "One"\nevery = 0'), ">= 1"),
    ],
)
def test_a_workload_that_is_none_is_refused(
    tmp_path: Path, change: tuple[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=r"one\.toml: ") as refused:
        read(_file(tmp_path, WORKLOAD.replace(*change, 1)), Workload)
    assert says in str(refused.value)


def test_files_that_are_no_text_or_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"one\.toml"):
        read(tmp_path / "one.toml", Arm)
    with pytest.raises(ConfigError, match=r"one\.toml"):
        read(tmp_path / "nowhere" / "one.toml", Arm)
    with pytest.raises(ConfigError, match="two: none of"):
        read_all(tmp_path, Arm, ["two"])


def test_an_arm_may_not_ask_for_more_than_there_is(tmp_path: Path) -> None:
    arm = read(_file(tmp_path, ARM.replace('"encoder"', '"encoder"\ncores = 2')), Arm)
    encoder, language = Place(cores=[4, 5, 6]).deal(arm)
    assert (encoder.cores, language.cores) == ([4, 5], [6])
    with pytest.raises(ValueError, match="one: cores: 2 are wanted by some servers, of 2"):
        Place(cores=[4, 5]).deal(arm)


def test_commands_pin_servers_and_tell_them_of_each_other(tmp_path: Path) -> None:
    arm = read(_file(tmp_path, ARM.replace('"encoder"', '"encoder"\ncount = 2')), Arm)
    running = Running(arm, "a model", "--dtype float32", Place(cores=[0, 1]), tmp_path)
    language = running.servers[-1].command
    assert language[:3] == ["taskset", "--cpu-list", "0,1"]
    first = language.index("--encoder-urls")
    assert language[first + 1 : first + 3] == running.urls("encoder")
    assert running.url.rpartition(":")[2] in language
    assert all("'a model' --dtype float32" in command for command in running.commands)


def test_a_router_is_told_of_prefill_and_decode(benchmark_folder: Path, tmp_path: Path) -> None:
    arm = read(benchmark_folder / "arms" / "epd-e-p-d.toml", Arm)
    running = Running(arm, "model", "", Place(cores=[0], gpus=[3, 4, 5]), tmp_path)
    (prefill,), (decode,) = running.urls("prefill"), running.urls("decode")
    router = running.servers[-1].command
    assert router[router.index("--prefill") + 1] == prefill
    assert router[router.index("--decode") + 1] == decode
    server = running.servers[1].command
    bootstrap = server[server.index("--disaggregation-bootstrap-port") + 1]
    assert router[router.index("--prefill") + 2] == bootstrap
    shown = [command.split()[0] for command in running.commands]
    assert shown[:3] == [f"CUDA_VISIBLE_DEVICES={card}" for card in (3, 4, 5)]
