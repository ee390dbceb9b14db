"""Prefill beside encoding: what a cell costs, its turns on servers, and its page."""

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import early
import early_cells as cells
import early_page
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from comparison.workloads import requests

from sglang_epd.profile import load_profile

ALONE = cells.cell("h100-1E1PD-4-alone")
WHOLE = load_profile("h100-qwen2_5-vl-7b")


def _cell(sent: str, topology: str = "1E1PD", machine: str = "h100") -> cells.Cell:
    return cells.Cell(machine, topology, sent, "alone")


def test_a_request_costs_what_it_would_with_pictures_of_1080p() -> None:
    cost, by = cells.passes(ALONE, 1100), 10764 / 1024
    assert cost.encode == pytest.approx(4 * WHOLE.encoder.tower.seconds([(10764, 1)]))
    assert cost.first == pytest.approx(WHOLE.encoder.tower.seconds([(10764, 1)]))
    first, rest = 779 * by, 321 * by
    expected = WHOLE.language.prefill_s([(first, 0)]) + WHOLE.language.prefill_s([(rest, first)])
    assert cost.prefill == pytest.approx(expected)
    tail = (256 + cells.TEXT_TOKENS) * by
    assert cost.last == pytest.approx(WHOLE.language.prefill_s([(tail, 1100 * by - tail)]))


@pytest.mark.parametrize(
    ("one", "passes"),
    [
        (_cell("8"), [1] * 8),
        (_cell("8", "2E1PD"), [1] * 4),
        (_cell("8", machine="h20"), [1, 2, 2, 2, 1]),
        (_cell("2", "2E1PD"), [1]),
    ],
)
def test_pictures_are_encoded_as_far_as_they_fit_into_a_pass(
    one: cells.Cell, passes: list[int]
) -> None:
    profile = one.profile
    patches = 784 if one.machine == "h20" else 1024
    expected = sum(profile.encoder.tower.seconds([(patches, 1)] * count) for count in passes)
    assert cells.passes(one, 5000).encode == pytest.approx(expected)


def test_the_bound_is_the_later_of_encoding_and_prefill() -> None:
    slow_tower = cells.Passes(encode=10.0, first=1.0, prefill=3.0, last=0.5)
    slow_prefill = cells.Passes(encode=4.0, first=1.0, prefill=8.0, last=2.0)
    assert (slow_tower.serial, slow_tower.bound) == (13.0, 10.5)
    assert (slow_prefill.serial, slow_prefill.bound) == (12.0, 9.0)


def test_a_video_in_one_pass_has_nothing_to_save() -> None:
    cost = cells.passes(_cell("video"), 4150)
    steps = cells.CLIP.frames // 2
    tower = _cell("video").profile.encoder.tower
    step = cells.CLIP.width // 14 * (cells.CLIP.height // 14)
    # Qwen2.5-VL's attends to the whole of it.
    assert cost.encode == pytest.approx(tower.seconds([(step * steps, 1)]))
    assert early_page.share(cost, 0.1) is None


@pytest.mark.parametrize("topology", ["1E1PD", "2E1PD"])
def test_a_video_in_several_passes_is_prefilled_beside_them(topology: str) -> None:
    one = _cell("video", topology, "h20")
    cost, tower = cells.passes(one, 900), one.profile.encoder.tower
    steps, step = cells.CLIP.frames // 2, 160 // 16 * (96 // 16)
    # Two passes of equal size have room for it.
    assert steps / 2 < tower.batch_patches // step < steps
    assert cost.first == pytest.approx(tower.seconds([(step * (steps // 2), steps // 2)]))
    assert cost.encode == pytest.approx(2 * cost.first)
    assert cost.bound < 0.95 * cost.serial


def test_half_of_what_the_busiest_could_do() -> None:
    cost = cells.passes(ALONE, 1100)
    assert cost.prefill > cost.encode
    assert cells.half_rate(ALONE, 1100) == pytest.approx(0.5 / cost.prefill)


def test_every_cell_has_its_own_name() -> None:
    every = list(cells.cells())
    assert len({one.name for one in every}) == len(every) == 3 * 5 * 3 * 5
    assert all(cells.cell(one.name) == one for one in every)
    with pytest.raises(ValueError, match="no cell"):
        cells.cell("h100-1E1PD-3-alone")
    chosen = [cells.cell(name) for name in ("h100-1E1PD-4-half", "h20-1E1PD-4-half", ALONE.name)]
    assert early.groups(chosen) == [[chosen[0], chosen[2]], [chosen[1]]]


@pytest.mark.parametrize("topology", cells.TOPOLOGIES)
def test_arms_differ_by_the_setting_alone(topology: str) -> None:
    on, off, in_tree, one = early.arms_of(topology, ["one", "off", "on", "in-tree"])
    for mine, other in zip(on.servers, off.servers, strict=True):
        asks = mine.role in ("language", "prefill")
        assert mine.env == ({early.SETTING: "auto"} if asks else {})
        assert other == msgspec.structs.replace(mine, env={early.SETTING: "off"} if asks else {})
    assert on.family == off.family == "sglang-epd"
    assert [one.family for one in (in_tree, one)] == ["in-tree", "colocated"]
    encoders = sum(server.count for server in on.servers if server.role == "encoder")
    assert encoders == _cell("2", topology).encoders
    (only,) = early.arms_of(topology, ["off"])
    assert only.title == cells.OFF


def test_requests_have_what_the_cell_says() -> None:
    def count(said: str) -> int:
        return len(said.split())

    for sent, kinds in (("4", ["image_url"] * 4), ("video", ["video_url"])):
        one, other = islice(requests(_cell(sent).workload(), "small", 1, count), 2)
        assert [part["type"] for part in one.turns[0]] == [*kinds, "text"]
        assert one.turns != other.turns


class Answers:
    """A server of so many tokens, which fails at some requests.

    Attributes:
        asked: a word of each request, in order; all servers share them.
    """

    def __init__(self, name: str, asked: list[str], failing: int = -1) -> None:
        self._name, self._failing = name, failing
        self.asked = asked
        self._streamed = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        parts = body["messages"][0]["content"]
        kind = "text" if len(parts) == 1 else "media"
        self.asked.append(f"{self._name} {kind}")
        if not body["stream"]:
            return web.json_response({"usage": {"prompt_tokens": 1100}})
        if kind == "media":
            self._streamed += 1
            if self._streamed == self._failing:
                return web.Response(status=503, text="busy")
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(body["max_tokens"]):
            end = "length" if number == body["max_tokens"] - 1 else None
            choice = {"delta": {"content": "a"}, "finish_reason": end}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        return response

    async def metrics(self, _request: web.Request) -> web.Response:
        lines = [
            'sglang:epd_emulated_seconds_total{kind="prefill"} ' + f"{2.0 * len(self.asked)}",
            f"sglang:epd_emulated_overrun_seconds_total {0.5 * len(self.asked)}",
            "sglang:epd_emulated_passes_total 1.0",
            f"sglang:epd_early_tokens_total {100.0 * self._streamed}",
        ]
        return web.Response(text="\n".join(lines) + "\n")


@pytest.mark.parametrize("load", cells.LOADS)
async def test_arms_have_their_turns(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "_TURN", 2)
    one = cells.Cell("h100", "1E1PD", "4", load)
    asked: list[str] = []
    arms, servers, ups = early.arms_of("1E1PD", ["on", "off"]), [], []
    for arm, failing in zip(arms, (-1, 2), strict=True):
        answers = Answers(arm.name, asked, failing)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answers.chat)
        app.router.add_get("/metrics", answers.metrics)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        url = str(servers[-1].make_url("")).rstrip("/")
        roles = {"language": [url]}
        running = SimpleNamespace(url=url, urls=lambda role, roles=roles: roles.get(role, []))
        ups.append(early.Up(arm, running))
    made = list(islice(requests(one.workload(), "small", 1, lambda said: len(said.split())), 6))
    turns = early.Turns(one, ups, 0.01, made, iter("abcdefgh" * 100), warm=2)
    measured = await turns.measure()
    for server in servers:
        await server.close()
    media = [line.split()[0] for line in asked if line.endswith("media")]
    expected = ["on", "on", "off", "off"] * 2 if load == "half" else ["on", "off"] * 4
    assert media == ["on", "off"] * 2 + expected
    assert any(line.endswith("text") for line in asked) == (load != "alone")
    on, off = measured
    assert (on.arm, off.arm) == (cells.ON, cells.OFF)
    assert (len(on.ttfts_ms), on.failures) == (4, [])
    assert (len(off.ttfts_ms), off.failures) == (3, ["HTTP 503: busy"])
    assert bool(on.tpots_ms) == bool(off.tpots_ms) == (load != "alone")
    assert (on.early_tokens, on.prompt) == (400.0, 1100)
    # Both count what all have been asked, of which the first two were before.
    assert on.accelerator_s == pytest.approx(100 * 2.0 * (len(asked) - 4))
    assert on.overrun_s == pytest.approx(on.accelerator_s / 4)


def _measured(one: cells.Cell, arm: str, ttfts_ms: list[float], early_tokens: float = 0.0):
    tpots_ms = [] if one.load == "alone" else [value / 100 for value in ttfts_ms]
    return cells.Measured(
        one.name, arm, 8.0, 1100, ttfts_ms, tpots_ms, ["lost"], early_tokens, 10.0, 0.1
    )


def test_the_page_compares_with_off_and_with_the_bound() -> None:
    beside = cells.cell("h100-1E1PD-4-beside")
    results = cells.Results({"cores": 2}, {"sglang": "0.5.23"}, ["benchmark/early.py"])
    for one in (beside, ALONE):
        found = [
            _measured(one, cells.ON, [300.0, 320.0, 360.0], 1650.0),
            _measured(one, cells.OFF, [400.0, 400.0, 450.0]),
            _measured(one, "one server", [500.0, 500.0, 500.0]),
        ]
        results.put(one.name, found)
    results.read = "It shows this."
    text = early_page.page(results)
    where = "| H100, Qwen2.5-VL-7B | 1E1PD | 4 pictures |"
    assert (
        f"{where} alone | early prefill auto | 3 of 4 | 320 | 360 | 0.80 | 0.80 |  |  |  "
        "| 50% | 1.0% |" in text
    )
    assert f"{where} beside | early prefill auto | 6 of 7 | 320 | 360 | 0.80 | 0.80 | 3.2 " in text
    assert f"{where} alone | one server | 3 of 4 | 500 | 500 | 1.25 | 1.11 |" in text
    cost = cells.passes(ALONE, 1100)
    allowed = 0.08 / (cost.serial - cost.bound)
    assert f"| {1e3 * cost.bound:.0f} | 400 | 320 | 80 | {allowed:.0%} |" in text
    # Of requests that come one at a time.
    assert text.count("| 80 |") == 1 and "It shows this." in text
    results.put(ALONE.name, [_measured(ALONE, cells.OFF, [400.0])])
    assert "What overlap could save" not in early_page.page(results)


def test_cells_are_added_in_their_order_and_take_the_place_of_earlier_ones(tmp_path: Path) -> None:
    out, other = tmp_path / "kept.json", cells.cell("h100-1E1PD-2-alone")
    results = early.begin(out, add=True)
    assert results.measured == []
    for one, ttft_ms in ((ALONE, 1.0), (other, 2.0), (ALONE, 3.0)):
        results.put(one.name, [_measured(one, arm, [ttft_ms]) for arm in (cells.ON, cells.OFF)])
    results.read = "Words."
    early.keep(out, results)
    again = early.begin(out, add=True)
    assert [(one.cell, one.arm, one.ttfts_ms) for one in again.measured] == [
        (other.name, cells.ON, [2.0]),
        (other.name, cells.OFF, [2.0]),
        (ALONE.name, cells.ON, [3.0]),
        (ALONE.name, cells.OFF, [3.0]),
    ]
    assert again.read in out.with_suffix(".md").read_text()
    assert early.begin(out, add=False).measured == []
