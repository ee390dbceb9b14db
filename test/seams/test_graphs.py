"""SGLang's runners of graphs, without a GPU that captures any."""

from __future__ import annotations

import importlib

import pytest
from torch import nn

from devices.late import LateDevice
from sglang_epd.encoder.model.graphs import forget


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
