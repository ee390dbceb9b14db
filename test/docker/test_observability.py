"""Dashboard and alert rules ask for nothing that no server tells."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser
import pytest
import yaml

import reference
from docker.conftest import DOCKER

OBSERVABILITY = DOCKER / "observability"
# What Prometheus adds to every sample, and what makes a histogram.
ADDED = {"instance", "job", "role", "le"}


@dataclass(frozen=True)
class Query:
    where: str
    text: str


def dashboard() -> dict[str, Any]:
    return json.loads((OBSERVABILITY / "grafana" / "dashboards" / "sglang-epd.json").read_text())


def rules() -> list[dict[str, Any]]:
    told = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())
    return [rule for group in told["groups"] for rule in group["rules"]]


def queries() -> Iterator[Query]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["expr"].replace("$__rate_interval", "1m"))
    for rule in rules():
        yield Query(rule["alert"], rule["expr"])


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector", "args"):
        inner = getattr(node, name, None)
        for one in inner if isinstance(inner, list) else [inner]:
            if type(one).__module__ == type(node).__module__:
                yield from selectors(one)


def grouped(node: Any) -> Iterator[str]:
    """The labels that a query keeps or joins by."""
    modifier = getattr(node, "modifier", None)
    for owner in (modifier, getattr(modifier, "matching", None)):
        yield from getattr(owner, "labels", None) or ()
    for name in ("expr", "lhs", "rhs", "args"):
        inner = getattr(node, name, None)
        for one in inner if isinstance(inner, list) else [inner]:
            if type(one).__module__ == type(node).__module__:
                yield from grouped(one)


@pytest.fixture(scope="module")
def ours() -> dict[str, set[str]]:
    """Our metrics by the names that they can be asked for under, and their labels."""
    return {
        name: set(metric._labelnames)
        for found in reference.metrics().values()
        for metric in found
        for name in reference.samples_of(metric)
    }


@pytest.mark.parametrize("query", [*queries()], ids=lambda query: query.where)
def test_every_name_in_every_query_exists(query, ours, sglang_metrics):
    parsed = promql_parser.parse(query.text)
    found = list(selectors(parsed))
    assert found
    labels = set(ADDED)
    for selector in found:
        assert selector.name in {*ours, *sglang_metrics, "up"}, selector.name
        labels |= ours.get(selector.name, set())
        asked = {matcher.name for matcher in selector.matchers.matchers} - {"instance", "job"}
        bounds = {"le"} if selector.name.endswith("_bucket") else set()
        assert asked <= ours.get(selector.name, set()) | bounds, selector.name
    assert set(grouped(parsed)) <= labels


def test_every_panel_shows_the_servers_that_are_chosen():
    (chosen,) = dashboard()["templating"]["list"]
    assert (chosen["name"], chosen["allValue"]) == ("instance", ".*")
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            parsed = promql_parser.parse(target["expr"].replace("$__rate_interval", "1m"))
            for one in selectors(parsed):
                told = [(matcher.name, matcher.value) for matcher in one.matchers.matchers]
                assert ("instance", "$instance") in told, panel["title"]


def test_the_selectors_are_found_wherever_they_stand():
    text = 'histogram_quantile(0.9, sum by (le) (rate(a{x="1"}[5m]))) / b unless on (c) d > 2'
    parsed = promql_parser.parse(text)
    assert sorted(one.name for one in selectors(parsed)) == ["a", "b", "d"]
    assert set(grouped(parsed)) == {"le", "c"}


def test_every_kind_of_server_is_looked_at(ours):
    asked = {one.name for query in queries() for one in selectors(promql_parser.parse(query.text))}
    for family in ("dispatch", "encoder", "receiver", "decode"):
        assert any(name.startswith(f"sglang:epd_{family}_") for name in asked & ours.keys())


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_and_what_to_do(rule):
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 20
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}


def test_the_dashboard_has_no_panel_twice_and_none_over_another():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


_STALLS = """
rule_files: [{alerts}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'sglang:epd_{of}_loop_lag_seconds_count{{instance="stalls"{more}}}'
        values: '0+600x9 6000+600x10'
      - series: 'sglang:epd_{of}_loop_lag_seconds_bucket{{instance="stalls"{more},le="1.0"}}'
        values: '0+600x9 5995+599x10'
      - series: 'sglang:epd_{of}_loop_lag_seconds_count{{instance="fine"{more}}}'
        values: '0+600x20'
      - series: 'sglang:epd_{of}_loop_lag_seconds_bucket{{instance="fine"{more},le="1.0"}}'
        values: '0+600x20'
    promql_expr_test:
      - expr: count by (instance) (ALERTS{{alertname="EpdLoopStandsStill"}})
        eval_time: 15m
        exp_samples: [{{labels: '{{instance="stalls"}}', value: 1}}]
      - expr: count by (instance) (ALERTS{{alertname="EpdLoopStandsStill"}})
        eval_time: 8m
        exp_samples: []
"""


_FAILED = """
rule_files: [{alerts}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'sglang:epd_dispatch_failures_total{{instance="encoder",reason="DeadlineError"}}'
        values: '0x5 1x20'
      - series: 'sglang:epd_receiver_expired_requests_total{{instance="ledger"}}'
        values: '0x5 1x20'
      - series: 'sglang:epd_dispatch_failures_total{{instance="fine",reason="DeadlineError"}}'
        values: '0x25'
      - series: 'sglang:epd_receiver_waiting_offers{{instance="full"}}'
        values: '0x2 3x20'
      - series: 'sglang:epd_receiver_waiting_offers{{instance="busy"}}'
        values: '0 2 0 1 0 2 0 1 0 3 0 2 0'
    promql_expr_test:
      - expr: count by (instance) (ALERTS{{alertname="EpdRequestsExpired",alertstate="firing"}})
        eval_time: 10m
        exp_samples:
          - {{labels: '{{instance="encoder"}}', value: 1}}
          - {{labels: '{{instance="ledger"}}', value: 1}}
      - expr: count by (instance) (ALERTS{{alertname="EpdReceiveBudgetFull",alertstate="firing"}})
        eval_time: 10m
        exp_samples: [{{labels: '{{instance="full"}}', value: 1}}]
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not in PATH")
def test_requests_that_are_late_and_memory_that_is_full_raise_alerts(tmp_path):
    """The first one, too, whether the encoder or the ledger ends it. Offers that wait now and then
    raise none."""
    check(tmp_path, _FAILED.format(alerts=OBSERVABILITY / "alerts.yaml"))


def check(folder, text):
    told = folder / "test.yaml"
    told.write_text(text)
    ran = subprocess.run(
        ["promtool", "test", "rules", str(told)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not in PATH")
@pytest.mark.parametrize(
    ("of", "more"), [("dispatch", ',loop="tokenizer"'), ("encoder", ""), ("decode", "")]
)
def test_a_loop_that_stands_still_raises_an_alert_and_no_other_does(tmp_path, of, more):
    check(tmp_path, _STALLS.format(alerts=OBSERVABILITY / "alerts.yaml", of=of, more=more))


_RULES = """
rule_files: [{alerts}]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - series: '{series}'
        values: '{values}'
{more}
    promql_expr_test:
      - expr: count by (instance) (ALERTS{{alertname="{alert}",alertstate="firing"}})
        eval_time: {at}
        exp_samples: [{{labels: '{{instance="a"}}', value: 1}}]
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not in PATH")
@pytest.mark.parametrize(
    ("alert", "series", "values", "more"),
    [
        # Left out for five seconds at each request, ready between.
        (
            "EpdNamespaceMismatch",
            'sglang:epd_dispatch_moves_total{instance="a",state="misfit"}',
            "0x3 1x3 2x3 3x50",
            {
                'sglang:epd_dispatch_encoders{instance="a",state="misfit"}': "0x3 1 0x60",
                'sglang:epd_dispatch_moves_total{instance="b",state="misfit"}': "0x3 1x3 2x53",
            },
        ),
        (
            "EpdServerRestarts",
            'sglang:epd_encoder_loop_lag_seconds_count{instance="a"}',
            "0+10x10 0+10x10 0+10x40",
            {'sglang:epd_encoder_loop_lag_seconds_count{instance="b"}': "0+10x10 0+10x50"},
        ),
        (
            "EpdServerRestarts",
            'sglang:epd_decode_loop_lag_seconds_count{instance="a"}',
            "0+10x10 0+10x10 0+10x40",
            {},
        ),
        (
            "EpdServerDown",
            'up{instance="a"}',
            "1x20 0x300",
            {
                'sglang:epd_decode_prompts_total{instance="a",layout="known"}': "0+1x20",
                'up{instance="b"}': "1x20 0x300",
            },
        ),
        # One that is asked by name is missed though it never answered.
        ("EpdServerDown", 'up{instance="a",job="sglang-epd"}', "0x6300", {}),
        (
            "EpdMediaFail",
            'sglang:epd_dispatch_failures_total{instance="a",reason="TokenError"}',
            "0+1x60",
            {
                'sglang:epd_dispatch_failures_total{instance="b",reason="MediaError"}': "0+1x60",
                'sglang:epd_decode_prompts_total{instance="c",layout="refused"}': "0+1x60",
            },
        ),
        (
            "EpdMediaFail",
            'sglang:epd_decode_prompts_total{instance="a",layout="failed"}',
            "0+1x60",
            {},
        ),
        ("EpdTowerLost", 'sglang:epd_encoder_towers{instance="a",state="lost"}', "0x10 1x60", {}),
        # It waits in bursts.
        (
            "EpdReceiveBudgetFull",
            'sglang:epd_receiver_waiting_offers{instance="a"}',
            " ".join(["8 0 0 0"] * 16),
            {},
        ),
        # One waits all the time.
        ("EpdReceiveBudgetFull", 'sglang:epd_receiver_waiting_offers{instance="a"}', "1x60", {}),
        (
            "EpdEmbeddingTooLarge",
            'sglang:epd_receiver_declines_total{instance="a",reason="too_large"}',
            "0x20 1x40",
            {},
        ),
        # Tried again each half minute.
        (
            "EpdStoreLeftAlone",
            'sglang:epd_encoder_store_breaker{instance="a",direction="write"}',
            " ".join(["2 1 2"] * 21),
            {
                'sglang:epd_encoder_store_writes_total{instance="a",outcome="skipped"}': "0+1x60",
                # It is open until somebody asks again.
                'sglang:epd_encoder_store_breaker{instance="b",direction="write"}': "2x60",
                'sglang:epd_encoder_store_writes_total{instance="b",outcome="skipped"}': "9x60",
            },
        ),
    ],
)
def test_a_fault_raises_its_alert_and_others_of_its_kind_none(
    tmp_path, alert, series, values, more
):
    lines = [f"      - series: '{one}'\n        values: '{told}'" for one, told in more.items()]
    told = {"alert": alert, "series": series, "values": values, "more": "\n".join(lines)}
    # A server that is down for long is down.
    later = ["75m"] * (alert == "EpdServerDown") + ["26h"] * ("job=" in series)
    for at in ("15m", *later):
        check(tmp_path, _RULES.format(alerts=OBSERVABILITY / "alerts.yaml", at=at, **told))
