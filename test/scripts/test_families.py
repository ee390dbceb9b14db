"""What a family's file says, and the page that is made of the family tests' results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoints.families import FAMILIES, SPECS, family_of
from checkpoints.family import AUDIO, IMAGE, VIDEO, Family
from checkpoints.spec import Rule
from checkpoints.unweighted import Unweighted
from checkpoints.weights import randomise
from family_table import DOCS, NOT_MADE, add, page
from sglang_epd.families import IN_TREE


def test_names_are_unique_and_lead_back_to_their_family() -> None:
    specs = [spec for family in FAMILIES.values() for spec in family.specs]
    assert len(specs) == len(SPECS)
    for family in FAMILIES.values():
        assert all(family_of(spec.name) is family for spec in family.specs)
        assert family.marks.keys() <= {IMAGE, VIDEO, AUDIO}
        assert family.marks
        for spec in family.specs:
            assert (spec.vision is not None) == (IMAGE in family.marks)
            # A checkpoint without weights says the sizes of its audio tower itself.
            if not isinstance(family, Unweighted):
                assert (spec.audio is not None) == (AUDIO in family.marks)


def test_every_architecture_of_in_tree_epd_is_made_or_said_not_to_be() -> None:
    made = {family.architecture for family in FAMILIES.values()}
    assert made.isdisjoint(NOT_MADE)
    assert made | NOT_MADE.keys() >= IN_TREE


def test_some_of_the_checkpoints_that_are_compared_are_sharded() -> None:
    """One that SGLang lists, and one that it does not."""
    sharded = {f.architecture in IN_TREE for f in FAMILIES.values() if f.specs[0].shard_mb}
    assert sharded == {True, False}


def test_the_page_is_what_the_results_give() -> None:
    records = json.loads((DOCS / "families.json").read_text())
    assert (DOCS / "families.md").read_text() == page(records), "run scripts/families --render"
    assert records.keys() <= FAMILIES.keys()


RESULTS = """<testsuites><testsuite>
<testcase name="a"><properties>
<property name="family" value="qwen3_vl"/><property name="backend" value="mooncake"/>
<property name="case" value="one image"/><property name="distance" value="2.5e-06"/>
</properties></testcase>
<testcase name="b"><properties>
<property name="family" value="qwen3_vl"/><property name="backend" value="mooncake"/>
<property name="case" value="one video"/></properties><failure message="no"/></testcase>
<testcase name="c"><properties>
<property name="family" value="qwen3_vl"/><property name="backend" value="mooncake"/>
<property name="case" value="video and image"/></properties><skipped message="because"/></testcase>
<testcase name="d"><properties>
<property name="family" value="qwen3_vl"/><property name="modality" value="image"/>
<property name="change" value="1.5"/></properties></testcase>
<testcase name="of another file"/>
<testcase name="e"><properties>
<property name="family" value="qwen2_audio"/><property name="stopped" value="Error: x"/>
</properties></testcase>
</testsuite></testsuites>"""


def test_a_case_that_could_not_start_has_failed(tmp_path: Path) -> None:
    file = tmp_path / "results.xml"
    file.write_text(RESULTS.replace("<failure", "<error"))
    records: dict = {}
    add(records, file)
    assert records["qwen3_vl"]["parity"]["mooncake"]["one video"] == {"passed": False}


class Model(nn.Module):
    """A language model, and a tower with its connector."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({"proj": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})
        self.projector = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32))
        self.language = nn.ModuleDict({"words": nn.Embedding(6, 32), "o_proj": nn.Linear(32, 32)})
        self.head = nn.Linear(32, 6, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.language["words"]

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_one_channel_is_constant_whatever_the_names() -> None:
    model = Model()
    randomise(model, Family(), seed=1, sayable=[1, 2])
    assert model.language["words"].weight[:, 0].tolist() == [3.0] * 6
    assert model.language["o_proj"].weight[0].abs().max() == 0
    assert model.projector[1].bias[0] == 3.0
    assert model.projector[0].bias[0] != 3.0
    assert (model.tower["norm"].weight - 1).abs().max() < 1
    assert model.head.weight[[0, 3, 4, 5], 0].tolist() == [-8.0] * 4


def test_equal_seeds_give_equal_weights() -> None:
    models = [Model() for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        randomise(model, Family(), seed=seed, sayable=[1])
    same = [torch.equal(models[0].tower["proj"].weight, m.tower["proj"].weight) for m in models]
    assert same == [True, True, False]


def test_a_parameter_that_no_rule_knows_is_told() -> None:
    model = Model()
    model.tower["proj"].register_parameter("decay", nn.Parameter(torch.zeros(8)))
    with pytest.raises(KeyError, match=r"tower\.proj\.decay"):
        randomise(model, Family(), seed=1, sayable=[1])


def test_a_familys_rules_come_first() -> None:
    class Own(Family):
        rules = (Rule(r"\.decay$", deviation=0.0, offset=-1.0), Rule("tower.*weight", gain=0.0))

    model = Model()
    model.tower["proj"].register_parameter("decay", nn.Parameter(torch.zeros(8)))
    randomise(model, Own(), seed=1, sayable=[1])
    assert model.tower["proj"].decay.tolist() == [-1.0] * 8
    assert model.tower["proj"].weight.abs().max() == 0
