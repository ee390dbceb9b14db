"""SGLang's runners of graphs, without a GPU that captures any."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from devices.late import LateDevice
from sglang_epd.encoder.model.engine import Engine
from sglang_epd.encoder.model.features import mark
from sglang_epd.encoder.model.graphs import forget
from sglang_epd.encoder.tower import Prepared
from sglang_epd.wire.messages import Layout, TensorSpec

WIDTH = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Module()
        self.attn.attn = nn.Module()


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = self.layers = nn.ModuleList([Block()])


class Device(LateDevice):
    synchronized = 0

    def synchronize(self):
        self.synchronized += 1


@pytest.mark.parametrize(
    ("module", "kind", "name", "graphs"),
    [
        ("vit_cuda_graph_runner", "ViTCudaGraphRunner", "graph_runners", "block_graphs"),
        ("vit_cuda_graph_runner", "ViTCudaGraphRunner", "cuda_graph_runner", "block_graphs"),
        (
            "internvl_vit_cuda_graph_runner",
            "InternViTCudaGraphRunner",
            "cuda_graph_runner",
            "graphs",
        ),
    ],
)
def test_a_tower_with_as_many_graphs_as_it_may_have_begins_anew(sglang, module, kind, name, graphs):
    sglang("utils")
    runner_of = getattr(importlib.import_module(f"sglang.srt.multimodal.{module}"), kind)
    model, device = nn.Module(), Device()
    model.tower = Tower()
    runner = runner_of(model.tower)
    setattr(model.tower, name, runner)
    for layout in range(3):
        getattr(runner, graphs)[layout] = object()
        forget(model, device, most=4)
        assert getattr(model.tower, name) is runner
    getattr(runner, graphs)[3] = object()
    forget(model, device, most=4)
    fresh = getattr(model.tower, name)
    assert type(fresh) is runner_of
    assert fresh is not runner
    assert getattr(fresh, graphs) == {}
    assert device.synchronized == 1


@pytest.mark.parametrize("graphs", [True, False])
def test_a_pass_without_memory_drops_all_graphs(engine_of, monkeypatch, graphs):
    """Also one whose capture failed, whose buffers are in no count."""
    engine = engine_of(0, graphs)
    tower = engine._target.tower
    before = tower.cuda_graph_runner
    tower.graph_runners = None
    before.block_input[(7,)] = torch.zeros(7)

    def fail(_items):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._target, "get_image_feature", fail)
    with pytest.raises(torch.OutOfMemoryError):
        engine.launch(1, 4)
    assert (tower.cuda_graph_runner is not before) == graphs
    assert type(tower.cuda_graph_runner) is type(before)
    assert bool(tower.cuda_graph_runner.block_input) != graphs
    assert tower.graph_runners is None


def test_a_runner_with_a_bound_of_its_own_is_left_alone(sglang):
    sglang("utils")
    module = importlib.import_module("sglang.srt.multimodal.kimi_k3_vit_cuda_graph_runner")
    tower, device = Tower(), Device()
    runner = module.KimiK3ViTCudaGraphRunner(tower, capacity=100, min_hits=1)
    runner.graphs = dict.fromkeys(range(100))
    tower.cuda_graph_runner = runner
    forget(tower, device)
    assert tower.cuda_graph_runner is runner
    assert len(runner.graphs) == 100


class Replaying(nn.Module):
    """A model whose tower has a graph for each number of rows, with one output for all replays;
    each row is twice the patch."""

    def __init__(self, device, runner_of):
        super().__init__()
        self.tower = Tower()
        self.tower.cuda_graph_runner = runner_of(self.tower)
        self._device = device

    @property
    def graphs(self):
        return self.tower.cuda_graph_runner.block_graphs

    def get_image_feature(self, items):
        (item,) = items
        shape = item.feature.shape
        if shape not in self.graphs:
            self.graphs[shape] = self._device.empty(shape, torch.float32)
        output = self.graphs[shape]
        output.copy_(item.feature, non_blocking=True)
        return output.mul_(2)


class Apart(Engine):
    """The engine around such a model, on a device."""

    def __init__(self, device, runner_of):
        self._device = device
        self._target = Replaying(device, runner_of)
        self._patches, self._moves_features = None, False
        self._encoder = SimpleNamespace(profiler=SimpleNamespace(step=lambda: None))
        self.dtype = "float32"
        self._queue_passes()

    def launch(self, number, rows):
        item = SimpleNamespace(
            feature=torch.full((rows, WIDTH), float(number)), model_specific_data={}
        )
        layout = Layout("IMAGE", TensorSpec("float32", (rows, WIDTH)), [[1, 1, rows]])
        content = (SimpleNamespace(name="IMAGE"), [item])
        batch = [mark(Prepared(layout, rows, "IMAGE", content), self._device)]
        return self._copies.launch(lambda: self._run(batch))

    def wrong_passes(self):
        """Of passes of one layout, two of them in flight."""
        wrong = 0
        for number in range(0, 8, 2):
            pair = [self.launch(number, 4), self.launch(number + 1, 4)]
            for one, launched in enumerate(pair, number):
                (part,) = self._copies.land(launched, [4])
                wrong += not bool((part == 2 * one).all())
        return wrong


@pytest.fixture
def engine_of(sglang, monkeypatch):
    sglang("utils")
    module = importlib.import_module("sglang.srt.multimodal.vit_cuda_graph_runner")
    # What is changed there is undone with the test.
    monkeypatch.setattr(torch.cuda.graph, "__init__", torch.cuda.graph.__init__)

    def make(seed, graphs):
        monkeypatch.setenv("SGLANG_VIT_ENABLE_CUDA_GRAPH", str(graphs))
        return Apart(LateDevice(seed), module.ViTCudaGraphRunner)

    return make


def test_an_engine_whose_tower_replays_graphs_copies_their_outputs(engine_of):
    assert not sum(engine_of(seed, 1).wrong_passes() for seed in range(10))
    assert sum(engine_of(seed, 0).wrong_passes() for seed in range(10)), "the test shows nothing"


def test_it_bounds_the_graphs_that_it_keeps(engine_of):
    engine = engine_of(0, 1)
    held = []
    for rows in range(1, 100):
        (part,) = engine._copies.land(engine.launch(rows, rows), [rows])
        assert bool((part == 2 * rows).all())
        held.append(len(engine._target.graphs))
    assert max(held) == 64


def test_its_graphs_are_captured_beside_other_threads(engine_of, monkeypatch):
    def mode():
        return torch.cuda.graph(None, stream=object()).capture_error_mode

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: None)
    engine_of(0, 0)
    assert mode() == "global"
    engine_of(0, 1)
    assert mode() == "thread_local"
