"""What `hostile.py` saw, the file that keeps it, and the page that is made of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pages import quantile_ms, setting, table

# The aims.
SLOWER = 2.0
MEMORY_MB = 2_000


@dataclass
class Row:
    """One attack on one arm.

    Attributes:
        calm_s, seconds: of the honest requests that were answered, without and with it.
        calm_failed, failed: those that were not, or wrongly, by what they failed of.
        moves: how often the encoder came into a state of the language server's pool.
        health_s: the slowest answer to GET /health, by server.
        memory_before_mb, memory_mb: the most that a server held, calm and then.
        ended: why servers ended; empty where they did not.
        recovered_s: from its end till an honest request was answered; None where none was.
        answers, sent_bytes: the attacker's own.
    """

    arm: str
    attack: str
    calm_s: list[float]
    calm_failed: dict[str, int]
    seconds: list[float]
    failed: dict[str, int]
    moves: dict[str, int]
    health_s: dict[str, float]
    memory_before_mb: dict[str, float]
    memory_mb: dict[str, float]
    ended: str
    recovered_s: float | None
    answers: dict[str, int]
    sent_bytes: int

    @property
    def grown_mb(self) -> dict[str, float]:
        return {role: most - self.memory_before_mb[role] for role, most in self.memory_mb.items()}

    @property
    def summary(self) -> str:
        slow = quantile_ms(self.seconds, 0.99) if self.seconds else "no"
        calm = quantile_ms(self.calm_s, 0.99) if self.calm_s else "no"
        return (
            f"{len(self.seconds)} answered, failed {self.failed}, p99 {slow} ms (calm {calm}), "
            f"moves {self.moves}, health {_both(self.health_s, 1e3)} ms, "
            f"grown {_both(self.grown_mb)} MB, attacker {self.answers} {self.ended}"
        )


@dataclass
class Results:
    """What the file beside the page keeps: how the last rows were made, and all rows."""

    setting: str
    rate: float
    calm_s: float
    seconds: float
    rows: list[Row]


def load(page_path: Path, options: argparse.Namespace) -> Results:
    """What there is beside a page, or nothing yet."""
    path = page_path.with_suffix(".json")
    if not path.exists():
        return Results(setting(options), options.rate, options.calm, options.seconds, [])
    kept = json.loads(path.read_text())
    return Results(**{**kept, "rows": [Row(**row) for row in kept["rows"]]})


def save(page_path: Path, results: Results) -> None:
    page_path.parent.mkdir(parents=True, exist_ok=True)
    page_path.with_suffix(".json").write_text(json.dumps(asdict(results)) + "\n")
    page_path.write_text(page(results))


def _both(values: dict[str, float], scale: float = 1.0) -> str:
    return ", ".join(f"{scale * values[role]:.0f}" for role in ("encoder", "language"))


def calm_s(rows: Sequence[Row], arm: str) -> list[float]:
    """Of all calm requests of an arm."""
    return [seconds for row in rows if row.arm == arm for seconds in row.calm_s]


def missed(row: Row, rows: Sequence[Row]) -> list[str]:
    """The aims that an arm misses beside an attack."""
    ratio = slower(row, rows)
    broken = []
    if row.failed:
        broken.append("failures")
    if ratio is None or ratio > SLOWER:
        broken.append("p99")
    if row.moves.get("open"):
        broken.append("eviction")
    if max(row.grown_mb.values()) > MEMORY_MB:
        broken.append("memory")
    if row.ended:
        broken.append("servers ended")
    elif row.recovered_s is None:
        broken.append("no recovery")
    return broken


def slower(row: Row, rows: Sequence[Row]) -> float | None:
    """The p99 latency by the calm one of its arm; None where nothing was answered."""
    if not row.seconds:
        return None
    return float(quantile_ms(row.seconds, 0.99)) / float(quantile_ms(calm_s(rows, row.arm), 0.99))


def attack_rows(rows: Sequence[Row]) -> list[list[str]]:
    head = ["attack", "arm", "honest requests", "failed", "p50 (ms)", "p99 (ms)", "p99 by calm"]
    head += ["suspect, open", "slowest /health (ms)", "memory grew (MB)", "aims"]
    shown = [head]
    attacks = list(dict.fromkeys(row.attack for row in rows))
    for row in sorted(rows, key=lambda row: attacks.index(row.attack)):
        ratio = slower(row, rows)
        failed = sum(row.failed.values())
        wrong = row.failed.get("another answer than at peace", 0)
        cells = [row.attack, row.arm, str(len(row.seconds) + failed - wrong), str(failed)]
        if ratio is None:
            cells += ["", "", "none answered"]
        else:
            cells += [quantile_ms(row.seconds, at) for at in (0.5, 0.99)] + [f"{ratio:.2f}"]
        cells.append(f"{row.moves.get('suspect', 0)}, {row.moves.get('open', 0)}")
        cells += [_both(row.health_s, 1e3), _both(row.grown_mb)]
        cells.append(", ".join(missed(row, rows)) or "met")
        shown.append(cells)
    return shown


def detail_rows(rows: Sequence[Row]) -> list[list[str]]:
    shown = [["attack", "arm", "attacker sent (MB)", "its answers", "honest failures", "servers"]]
    for row in rows:
        answers = ", ".join(f"{count} x {kind}" for kind, count in sorted(row.answers.items()))
        failed = ", ".join(f"{count} x {kind}" for kind, count in row.failed.items())
        if row.ended:
            servers = row.ended
        elif row.recovered_s is None:
            servers = "did not come back to themselves: started anew"
        else:
            servers = f"answered {row.recovered_s:.1f} s after its end"
        cells = [row.attack, row.arm, f"{row.sent_bytes / 1e6:.1f}", answers, failed, servers]
        shown.append([cell.replace("|", "/").replace("\n", " ") for cell in cells])
    return shown


def page(results: Results) -> str:
    rows, lines = results.rows, []
    for arm in dict.fromkeys(row.arm for row in rows):
        mine = [row for row in rows if row.arm == arm]
        met = sum(not missed(row, rows) for row in mine)
        calm, failed = calm_s(rows, arm), sum(sum(row.calm_failed.values()) for row in mine)
        lines.append(
            f"- {arm}: all aims met beside {met} of {len(mine)} attacks. "
            f"Calm: {len(calm)} requests, {failed} failed, "
            f"p50 {quantile_ms(calm, 0.5)} ms, p99 {quantile_ms(calm, 0.99)} ms."
        )
    told = "\n".join(lines)
    return f"""# An honest load beside attacks

{results.setting} One encoder and one language server answer {results.rate:g} requests/s at random
(Poisson) moments, for 8 tokens each about a picture of 448 x 448 px, half of them behind URLs. No
cache is on, so each is encoded anew. {results.calm_s:g} s calm come before {results.seconds:g} s of
each attack, which sends at most 10 MB/s or 20 requests/s. Attackers run at a low
priority, as if they were on machines of their own. A request that is answered otherwise than
at peace, or not within 30 s, has failed.

Aims beside each attack: nothing fails, the p99 latency is within {SLOWER:g} times that of all calm
requests of the arm, the encoder stays in the pool (never `open`), and neither server grows by more
than {MEMORY_MB} MB (proportional set size).

{told}

Where a cell has two figures of servers, the encoder's is first.

{table(attack_rows(rows))}

## What attackers saw, and what failed

{table(detail_rows(rows))}
"""
