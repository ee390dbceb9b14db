"""A Prometheus of its own, on the loopback interface, that scrapes servers and is asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

OBSERVABILITY = Path(__file__).resolve().parents[2] / "docker" / "observability"
_READY_S = 30.0
_RATE_INTERVAL = "30s"


@dataclass(frozen=True)
class Query:
    """What a panel of the dashboard, or an alert, asks."""

    where: str
    text: str


def installed() -> bool:
    """Whether `prometheus` and `promtool` are (Debian: `apt-get install prometheus`)."""
    return all(map(shutil.which, ("prometheus", "promtool")))


def dashboard_queries() -> list[Query]:
    """Every query of the Grafana dashboard, as Grafana would send it, of all servers."""
    told = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "sglang-epd.json").read_text())
    return [
        Query(
            panel["title"],
            target["expr"].replace("$__rate_interval", _RATE_INTERVAL).replace("$instance", ".*"),
        )
        for panel in told["panels"]
        for target in panel.get("targets", ())
    ]


def version() -> str:
    """Such as `Prometheus 2.42.0`."""
    told = subprocess.run(
        ["prometheus", "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    return f"Prometheus {(told.stdout + told.stderr).split()[2]}"


def check_rules() -> str:
    """What `promtool check rules` says of the alert rules.

    Raises:
        subprocess.CalledProcessError: it refuses them.
    """
    command = ["promtool", "check", "rules", str(OBSERVABILITY / "alerts.yaml")]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The samples that answer a query now; NaN is none.

        Raises:
            urllib.error.HTTPError: it is refused.
        """
        told = self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': query})}")
        assert told["status"] == "success", told
        return [one for one in told["data"]["result"] if one["value"][1] != "NaN"]

    def targets(self) -> dict[str, str]:
        """What became of each scrape, by its URL."""
        told = self._get("/api/v1/targets")["data"]["activeTargets"]
        return {one["scrapeUrl"]: one["health"] for one in told}

    def rules(self) -> list[dict[str, Any]]:
        """The alert rules, each with its `health` and `state`."""
        groups = self._get("/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=20) as answer:
            return json.load(answer)


@contextmanager
def running(folder: Path, port: int, roles: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """A Prometheus that scrapes servers every second.

    Args:
        folder: for its data and its log.
        roles: the servers' host:port, by role.
    """
    told = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(OBSERVABILITY / "alerts.yaml")],
        "scrape_configs": [
            {
                **_scraping(),
                "static_configs": [
                    {"targets": list(targets), "labels": {"role": role}}
                    for role, targets in roles.items()
                ],
            }
        ],
    }
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(told))
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(f"{url}/-/ready", process, log)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(20)


def _scraping() -> dict[str, Any]:
    """How docker/observability has servers scraped, but for which."""
    told = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    (job,) = told["scrape_configs"]
    return {name: value for name, value in job.items() if name != "static_configs"}


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _READY_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"Prometheus does not start:\n{log.read_text()}") from None
        time.sleep(0.2)
