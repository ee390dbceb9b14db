"""SGLang's forward passes on an emulated accelerator: what they cost, and who waits for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from sglang_epd.emulated import EmulatedAccelerator, Pass
from sglang_epd.platform import emulation
from sglang_epd.profile import load_profile

SHIPPED = load_profile("h100-qwen2_5-vl-7b")
# Another tower than encoders have.
SLOWER = replace(SHIPPED.language.tower, patch_s=1e-4)
PROFILE = replace(SHIPPED, language=replace(SHIPPED.language, tower=SLOWER))
COSTS = PROFILE.language


class Mode:
    """SGLang's `ForwardMode`, as far as it is asked."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, asked: str) -> Any:
        if asked == "is_extend":
            return lambda: self._name in ("extend", "mixed")
        return lambda: asked == f"is_{self._name}"


def batch(mode: str, **of: Any) -> Any:
    return SimpleNamespace(forward_mode=Mode(mode), **of)


def requests(*lengths: int) -> list[Any]:
    return [SimpleNamespace(seqlen=length) for length in lengths]


def test_a_prefill_costs_its_new_tokens_and_what_is_before_them():
    asked = batch("extend", extend_lens=[3000, 2000], prefix_lens=[0, 500])
    found = emulation.batch_seconds(asked, COSTS)
    assert found == {"prefill": COSTS.prefill_s([(3000, 0), (2000, 500)])}


def test_a_step_costs_its_sequences_and_their_contexts():
    found = emulation.batch_seconds(batch("decode", reqs=requests(100, 200)), COSTS)
    assert found == {"decode": COSTS.step_s(2, 300)}


def test_a_mixed_batch_costs_both():
    asked = batch(
        "mixed", extend_lens=[3000, 1, 1], prefix_lens=[0, 100, 200], decoding_reqs=[1, 2]
    )
    assert emulation.batch_seconds(asked, COSTS) == {
        "prefill": COSTS.prefill_s([(3000, 0)]),
        "decode": COSTS.step_s(2, 300),
    }


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        # The in-tree encoder has all pictures in one item.
        ([{"image_grid_thw": torch.tensor([[1, 4, 6], [1, 8, 8]])}], [(24, 1), (64, 1)]),
        ([{"image_grid_thw": [[1, 4, 6]]}, {"image_grid_thw": [[1, 8, 8]]}], [(24, 1), (64, 1)]),
        ([{"video_grid_thw": [[3, 4, 6]], "image_grid_thw": None}], [(72, 3)]),
        # No grids: four patches for each of 10 embeddings.
        ([{}, {}], [(20, 1), (20, 1)]),
    ],
)
def test_patches_are_counted_by_picture(items, expected):
    found = emulation.patches_of(
        [SimpleNamespace(**item) for item in items], torch.zeros(10, 3), merge=4
    )
    assert found == expected


class Scheduler:
    """The part of SGLang's that is wrapped."""

    def run_batch(self, batch: Any) -> Any:
        if hasattr(batch, "encodes"):
            batch.encodes()
        return SimpleNamespace(copy_done=getattr(batch, "event", None))

    def get_internal_state(self, _request: Any) -> Any:
        return SimpleNamespace(internal_state={})


class Model:
    """One whose video method uses that for images."""

    def get_image_feature(self, items: list[Any]) -> torch.Tensor:
        return torch.zeros(256 * len(items), 3)

    def get_video_feature(self, items: list[Any]) -> torch.Tensor:
        return self.get_image_feature(items)


class Device(EmulatedAccelerator):
    """Notes its passes, and what is waited for, in order."""

    def __init__(self) -> None:
        self.now, self.done_passes, self.waited = 0.0, [], []
        super().__init__(PROFILE, 2.0, clock=lambda: self.now, sleep=self._sleep_for)
        self.listen = self.done_passes.append

    def _sleep_for(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, launched: Pass) -> None:
        self.waited.append(launched)
        super().wait(launched)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def stages():
    """Pipeline stages of the server."""
    return 1


@pytest.fixture
def scheduler(device, stages, monkeypatch):
    parallel = SimpleNamespace(pp_size=stages)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    module: Any = ModuleType("scheduler")
    module.Scheduler = type("Hooked", (Scheduler,), {})
    emulation._hook_scheduler(device, module)
    return module.Scheduler()


@pytest.fixture
def model(device):
    fresh = type("Fresh", (Model,), dict(vars(Model)))()
    emulation.price_towers(fresh, device)
    emulation.price_towers(fresh, device)  # by a second engine of the class
    return fresh


STEP = {"reqs": requests(100)}


def test_without_overlap_a_batch_returns_when_it_is_done(scheduler, device):
    scheduler.run_batch(batch("decode", **STEP))
    assert device.now == pytest.approx(2 * COSTS.step_s(1, 100))


@pytest.mark.parametrize("stages", [4])
def test_a_pipeline_stage_takes_its_part_of_the_time(scheduler, device):
    scheduler.run_batch(batch("decode", **STEP))
    assert device.now == pytest.approx(2 * COSTS.step_s(1, 100) / 4)


def test_with_overlap_its_event_is_waited_for(scheduler, device):
    first, second = (
        scheduler.run_batch(batch("decode", event=object(), **STEP)).copy_done for _ in range(2)
    )
    assert (device.now, device.waited) == (0.0, [])
    first.record()
    assert not first.query()
    first.synchronize()
    assert device.now == pytest.approx(2 * COSTS.step_s(1, 100))
    assert first.query() and not second.query()
    second.synchronize()
    assert device.now == pytest.approx(4 * COSTS.step_s(1, 100))


@pytest.mark.parametrize("mode", ["prebuilt", "idle"])
def test_batches_without_a_forward_pass_cost_nothing(scheduler, device, mode):
    scheduler.run_batch(batch(mode))
    assert (device.now, device.done_passes) == (0.0, [])


def test_a_tower_within_a_batch_is_part_of_it(scheduler, device, model):
    items = [SimpleNamespace(), SimpleNamespace()]
    prompt = batch("extend", extend_lens=[3000], prefix_lens=[0])
    prompt.encodes = lambda: model.get_image_feature(items)
    scheduler.run_batch(prompt)
    (only,) = device.done_passes
    assert only.seconds == {
        "prefill": 2 * COSTS.prefill_s([(3000, 0)]),
        "tower": pytest.approx(2 * COSTS.tower.seconds([(1024, 1), (1024, 1)])),
    }
    assert device.now == pytest.approx(sum(only.seconds.values()))


@pytest.mark.parametrize("name", ["get_image_feature", "get_video_feature"])
def test_a_tower_by_itself_is_a_pass(device, model, name):
    getattr(model, name)([SimpleNamespace()])
    assert [one.seconds for one in device.done_passes] == [
        {"tower": 2 * PROFILE.encoder.tower.seconds([(1024, 1)])}
    ]
    assert device.now == pytest.approx(2 * PROFILE.encoder.tower.seconds([(1024, 1)]))
    assert getattr(model, name).__self__ is model, "SGLang asks for the model"


START = (
    "import logging, sys; from sglang_epd.platform import register; register();"
    "from sglang_epd.platform import seams;"
    "print(sorted(seams.emulation.changes()))"
)


def start(script: str = START, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "0", **env},
    )


def test_with_the_setting_absent_nothing_is_hooked():
    done = start()
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    assert "EMULATED" not in done.stderr


def test_a_start_says_loudly_that_it_is_emulated():
    done = start(SGLANG_EPD_EMULATE=PROFILE.name)
    assert done.returncode == 0, done.stderr
    assert "sglang.srt.managers.scheduler" in done.stdout
    assert f"EMULATED ACCELERATOR: forward passes take the times of {PROFILE.name}" in done.stderr


ANSWER = """
import threading, time, urllib.request
from sglang_epd.platform import register; register()
import uvicorn

async def app(scope, receive, send):
    headers = [(b"x-own", b"kept")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})

given = [("x-given", "kept")]
server = uvicorn.Server(uvicorn.Config(app, port=0, access_log=False, headers=given))
thread = threading.Thread(target=server.run)
thread.start()
while not server.started:
    time.sleep(0.01)
port = server.servers[0].sockets[0].getsockname()[1]
answer = urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=20)
print(answer.headers["x-own"], answer.headers["x-given"], answer.headers["x-sglang-epd-emulated"])
server.should_exit = True
thread.join()
"""


def test_every_answer_of_an_emulated_server_says_so():
    done = start(ANSWER, SGLANG_EPD_EMULATE=PROFILE.name, SGLANG_EPD_EMULATE_DILATE="5")
    mark = {"profile": PROFILE.name, "dilation": 5.0}
    assert done.stdout == f"kept kept {json.dumps(mark)}\n", done.stderr


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"SGLANG_EPD_EMULATE": "h1000"}, "no profile is called 'h1000'"),
        ({"SGLANG_EPD_EMULATE": "bad.json"}, "unknown field `patch_ms`"),
        ({"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_EPD_EMULATE": "h100"}, "nothing is emulated"),
    ],
)
def test_what_cannot_be_emulated_ends_the_start(env, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tower = '{"pixels": {"patch_px": 14, "merge": 4, "patch_ms": 1}}'
    (tmp_path / "bad.json").write_text(tower)
    done = start(**env)
    assert done.returncode == 1
    assert done.stderr.startswith("SGLANG_EPD_EMULATE: ") and told in done.stderr
