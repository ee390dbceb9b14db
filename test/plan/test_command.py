"""`sglang-epd plan` as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plan.machines import KIND, PROFILE
from sglang_epd.cli.main import app
from sglang_epd.errors import ConfigError


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "machine.json").write_text(json.dumps(PROFILE))
    (tmp_path / "asked.json").write_text(json.dumps({"name": "w", "kinds": [KIND]}))
    machine, asked = str(tmp_path / "machine.json"), str(tmp_path / "asked.json")
    return ["plan", "--profile", machine, "--workload", asked, "--requests", "200"]


def test_a_plan_says_what_it_takes_and_what_breaks(files, tmp_path):
    plots = tmp_path / "plots"
    typed = [*files, "--rate", "12", "--shape", "E+PD", "--shape", "EPD", "--plots", str(plots)]
    shown = CliRunner().invoke(app, typed, catch_exceptions=False)
    assert shown.exit_code == 0
    assert "meets the SLO" in shown.stdout and "gives way first" in shown.stdout
    assert {path.name for path in plots.iterdir()} == {"steps.svg", "rates.svg"}
    answers = json.loads(CliRunner().invoke(app, [*typed, "--json"]).stdout)
    assert [one["shape"] for one in answers] == sorted(
        ("E+PD", "EPD"), key=lambda shape: next(a["gpus"] for a in answers if a["shape"] == shape)
    )
    assert all(one["meets_slo"] and one["tried"] for one in answers)


def test_figures_of_several_cells_are_those_of_all(files):
    typed = [*files, "--rate", "24", "--shape", "EPD", "--json"]
    one, both = (
        json.loads(CliRunner().invoke(app, more, catch_exceptions=False).stdout)[0]
        for more in ([*typed[:-1], "--rate", "12", "--json"], [*typed, "--cells", "2"])
    )
    for name in ("requests_per_s", "output_tokens_per_s", "gpus", "most_requests_per_s"):
        assert both[name] == pytest.approx(2 * one[name], abs=1e-3), name


def test_a_topology_is_simulated_as_it_is(files):
    typed = [*files, "--rate", "5", "--topology", "1E1PD", "--topology", "2EPD", "--json"]
    answers = json.loads(CliRunner().invoke(app, typed, catch_exceptions=False).stdout)
    assert [one["topology"] for one in answers] == ["1E1PD", "2EPD"]
    # Two minutes of it, though 200 requests would be less.
    assert all(one["outcomes"] == {"done": 600} for one in answers)


def test_the_quantile_that_is_bounded_is_shown(files):
    typed = [*files, "--rate", "5", "--topology", "1E1PD", "--quantile", "0.9"]
    shown = CliRunner().invoke(app, typed, catch_exceptions=False).stdout
    assert "p90" in shown and "p99" not in shown
    never = [*files, "--rate", "5", "--shape", "EPD", "--quantile", "0.9", "--ttft-s", "0.01"]
    shown = CliRunner().invoke(app, never, catch_exceptions=False).stdout
    assert "p90" in shown and "p99" not in shown


def test_what_cannot_be_planned_is_said_beside_what_can(files):
    shown = CliRunner().invoke(app, [*files, "--rate", "5", "--ttft-s", "0.01"])
    assert shown.exit_code == 0 and shown.stdout.count("no plan") == 4


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--rate", "-1"], "positive rate"),
        (["--rate", "inf"], "positive rate"),
        (["--rate", "nan", "--shape", "EPD"], "positive rate"),
        (["--rate", "inf", "--topology", "1EPD"], "no rate"),
        (["--rate", "nan", "--topology", "1EPD"], "no rate"),
        (["--rate", "5", "--topology", "0EPD"], "is no topology"),
        (["--rate", "5", "--topology", "1EPD", "--shape", "EPD"], "give one"),
        (["--rate", "5", "--quantile", "2"], "quantile"),
        (["--rate", "5", "--ttft-s", "inf"], "a finite number"),
        (["--rate", "5", "--tpot-s", "inf", "--topology", "1EPD"], "a finite number"),
        (["--rate", "5", "--policy", "best"], "not a policy"),
        (["--rate", "5", "--cells", "0"], "at least one cell"),
    ],
)
def test_what_is_wrong_is_said(files, typed, says):
    with pytest.raises(ConfigError, match=says):
        CliRunner().invoke(app, [*files, *typed], catch_exceptions=False)


def test_an_unknown_profile_names_those_there_are(files):
    files[2] = "b200"
    with pytest.raises(ConfigError, match="h20-qwen3-vl-235b"):
        CliRunner().invoke(app, [*files, "--rate", "5"], catch_exceptions=False)


@pytest.mark.parametrize(("missing", "options"), [("simpy", []), ("matplotlib", ["--plots", "p"])])
def test_what_to_install_is_said_without_the_extra(files, monkeypatch, missing, options):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf'needs {missing}: pip install "\.\[plan\]"'):
        CliRunner().invoke(app, [*files, "--rate", "5", *options], catch_exceptions=False)
