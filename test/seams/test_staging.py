from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_epd.device import Host
from sglang_epd.language.uploads import Stager
from sglang_epd.seams import staging
from sglang_epd.transfer.arena import Arena

WIDTH, HIDDEN = 8, 4


class Recording(Host):
    """Notes what it is asked for, and poses as a device that queues."""

    queues = True
    refuses = False

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.registered = 0

    def empty(self, shape, dtype):
        made = super().empty(shape, dtype)
        self.rows += len(made)
        return made

    def register(self, address, nbytes):
        if self.refuses:
            raise RuntimeError("out of memory")
        self.registered += nbytes


@pytest.fixture
def device(monkeypatch):
    device = Recording()
    stager = Stager(device)
    monkeypatch.setattr(staging, "stager", lambda: stager)
    return device


@st.composite
def prompts(draw):
    """Items with the texts before them, and the part of the prompt that a pass takes."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    offsets, end = [], 0
    for size in sizes:
        begin = end + draw(st.integers(0, 3))
        end = begin + size
        offsets.append((begin, end - 1))
    prefix = draw(st.integers(0, end - 1))
    return offsets, prefix, draw(st.integers(1, end + 2 - prefix))


def items_of(offsets):
    """Each row has the number of its token."""
    return [
        SimpleNamespace(
            precomputed_embeddings=torch.arange(first, last + 1.0)[:, None].expand(-1, WIDTH),
            offsets=[(first, last)],
        )
        for first, last in offsets
    ]


def test_sglang_gathers_rows_that_are_staged_and_no_others(hooked, sglang, device):
    gather = sglang("managers.mm_schedule")._get_precomputed_embedding

    @settings(deadline=None)
    @given(prompts())
    def check(prompt):
        offsets, prefix, extend = prompt
        device.rows = 0
        gathered = gather(items_of(offsets), [0, len(offsets)], [prefix], [extend], [offsets])
        tokens = [
            token
            for first, last in offsets
            for token in range(first, last + 1)
            if prefix <= token < prefix + extend
        ]
        assert gathered[:, 0].tolist() == tokens
        assert gathered.shape == (len(tokens), WIDTH)
        assert device.rows == len(tokens)

    hooked("get_embedding_chunk")
    check()


def test_items_keep_what_a_request_that_is_retracted_is_prefilled_from(hooked, sglang, device):
    gather = sglang("managers.mm_schedule")._get_precomputed_embedding
    hooked("get_embedding_chunk")
    (item,) = items_of([(0, 5)])
    before = item.precomputed_embeddings
    gather([item], [0, 1], [0], [6], [[(0, 5)]])
    assert item.precomputed_embeddings is before
    assert device.rows == 6


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("language_only", [True, False])
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_it_is_for_language_servers_on_a_device(monkeypatch, flags, language_only, name, stage):
    devices = {"cpu": Host(), "cuda": Recording()}
    flags(
        disagg={"language_only": language_only},
        device={"device": name},
        parallel={"pp_rank": stage},
    )
    monkeypatch.setattr(staging, "device_of", devices.__getitem__)
    staging.stager.cache_clear()
    try:
        first = language_only and stage == 0
        assert (staging.stager() is not None) == (first and name == "cuda")
        assert staging.stager() is staging.stager()
    finally:
        staging.stager.cache_clear()


def test_on_the_host_nothing_is_changed(hooked, sglang, monkeypatch, flags):
    monkeypatch.setattr(staging, "stager", lambda: None)
    flags(disagg={"language_only": True}, device={"device": "cpu"})
    hooked("get_embedding_chunk")
    hooked("mm_runtime_reservation_gb")
    (item,) = items_of([(0, 5)])
    gathered = sglang("managers.mm_schedule")._get_precomputed_embedding(
        [item], [0, 1], [0], [6], [[(0, 5)]]
    )
    assert gathered.data_ptr() == item.precomputed_embeddings.data_ptr()
    reserved = sglang("mem_cache.kv_cache_configurator").mm_runtime_reservation_gb
    assert reserved(is_multimodal=False, mm_feature_transport=None) == 0
    arena = Arena.create(4096, readers=1)
    assert staging.connect(arena) is None
    arena.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_the_kv_pool_leaves_room_for_the_rows_of_two_passes(
    hooked, sglang, monkeypatch, flags, stage
):
    """Wherever SGLang sizes it, and on all stages: what it keeps beside KV it sizes on each."""
    monkeypatch.setattr(staging, "device_of", lambda _name: Recording())
    staging.stager.cache_clear()
    alone = {"pp_rank": stage, "pp_size": 1, "pp_async_batch_depth": 0}
    flags(disagg={"language_only": True}, device={"device": "cuda"}, parallel=alone)
    tower = SimpleNamespace(deepstack_visual_indexes=[8, 16, 24])
    model = SimpleNamespace(
        hidden_size=4096, dtype=torch.bfloat16, hf_config=SimpleNamespace(vision_config=tower)
    )
    schedule = {"chunked_prefill_size": 8192, "max_prefill_tokens": 16384}
    flags(schedule=schedule, server_args={})
    monkeypatch.setattr(sglang("arg_groups.overrides"), "model_config_of", lambda _: model)
    hooked("mm_runtime_reservation_gb")
    sizes = ("mem_cache.kv_cache_configurator", "model_executor.model_runner_components")
    for module in (sizes[0], f"{sizes[1]}.kv_pool_runtime"):
        reserved = sglang(module).mm_runtime_reservation_gb
        assert reserved(is_multimodal=False, mm_feature_transport=None) == 0.5
    flags(schedule={**schedule, "chunked_prefill_size": -1})  # no chunks
    assert staging.staged_bytes() == 1 << 30
    for pp_size, depth, passes in ((2, 0, 2), (4, 0, 4), (4, 1, 4), (4, 2, 5)):
        flags(parallel={**alone, "pp_size": pp_size, "pp_async_batch_depth": depth})
        assert staging.staged_bytes() == passes << 29
    flags(parallel=alone)
    thinker = SimpleNamespace(vision_config=SimpleNamespace())
    model.hf_config = SimpleNamespace(thinker_config=thinker)
    assert staging.staged_bytes() == 1 << 28


@pytest.mark.parametrize("refuses", [True, False])
def test_an_arena_is_registered_and_a_refusal_is_told(device, caplog, refuses):
    device.refuses = refuses
    arena = Arena.create(1 << 20, readers=1)
    with caplog.at_level("INFO"):
        assert staging.connect(arena) is staging.stager()
    assert device.registered == (0 if refuses else 1 << 20)
    (told,) = caplog.messages
    assert ("pageable" in told) == refuses
    arena.data[:] = 1
    arena.give_back([(0, len(arena.data))])
    assert arena.data.all()
    arena.close()
