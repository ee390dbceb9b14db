from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from sglang_epd.seams import stages

ROWS, WIDTH = 1000, 64


@pytest.fixture
def send(flags):
    """What the next stage has of a list, and what was pickled for it."""

    def send(data, language_only: bool = True):
        flags(disagg={"language_only": language_only})
        frames = []

        def original(scheduler, data, async_send=False):
            assert (scheduler, async_send) == ("scheduler", True)
            frames.append(pickle.dumps(data))
            return "work"

        assert stages.send(original, "scheduler", data, async_send=True) == "work"
        return pickle.loads(frames[0]), len(frames[0])

    return send


@pytest.fixture
def item(sglang):
    module = sglang("managers.schedule_batch")

    def item(identity: bytes | None = bytes(32)):
        made = module.MultimodalDataItem(
            modality=module.Modality.IMAGE,
            offsets=[(2, 5)],
            precomputed_embeddings=torch.rand(2 * ROWS, WIDTH)[:ROWS],
        )
        made.image_grid_thw = torch.tensor([[1, 2, 4]])
        if identity:
            made.set_identity(identity)
        return made

    return item


@pytest.fixture
def request_of(sglang):
    structs, batches = sglang("managers.io_struct"), sglang("managers.schedule_batch")

    def request_of(*items):
        inputs = batches.MultimodalProcessorOutput(
            mm_items=list(items), input_ids=[1, 2], mrope_positions=torch.arange(6)
        )
        needed = dict.fromkeys(structs.TokenizedGenerateReqInput.__struct_fields__)
        return structs.TokenizedGenerateReqInput(
            **{**needed, "rid": "r", "mm_inputs": inputs, "input_ids": [1, 2]}
        )

    return request_of


def test_the_next_stage_has_all_but_the_rows(send, item, request_of):
    first = item()
    request = request_of(first)
    before = copy.deepcopy(first)
    (sent,), nbytes = send([request])
    assert nbytes < ROWS * WIDTH
    (bare,) = sent.mm_inputs.mm_items
    assert bare.precomputed_embeddings.shape == (0, WIDTH)
    for name in ("modality", "offsets", "hash", "identity", "pad_value", "pad_values"):
        assert getattr(bare, name) == getattr(before, name), name
    assert torch.equal(bare.image_grid_thw, before.image_grid_thw)
    assert torch.equal(sent.mm_inputs.mrope_positions, request.mm_inputs.mrope_positions)
    assert (sent.rid, sent.input_ids, sent.mm_inputs.input_ids) == ("r", [1, 2], [1, 2])
    # This stage runs the request with the very items.
    assert request.mm_inputs.mm_items == [first]
    assert torch.equal(first.precomputed_embeddings, before.precomputed_embeddings)


def test_so_has_it_a_batchs(sglang, send, item, request_of):
    batch = sglang("managers.io_struct").BatchTokenizedGenerateReqInput(
        rids=["r", "s"], batch=[request_of(item()), request_of()]
    )
    (sent,), nbytes = send([batch])
    assert nbytes < ROWS * WIDTH
    assert sent.rids == ["r", "s"]
    assert [len(one.mm_inputs.mm_items) for one in sent] == [1, 0]
    assert len(batch.batch[0].mm_inputs.mm_items[0].precomputed_embeddings) == ROWS


def test_ids_and_texts_go_on_as_they_are(send):
    text = SimpleNamespace(rid="r", mm_inputs=None)
    sent, _ = send(["a", "b", text])
    assert sent == ["a", "b", text]
    assert send([])[0] == []


def test_rows_that_an_item_would_be_named_by_are_sent(send, item, request_of):
    (sent,), _ = send([request_of(item(identity=None))])
    assert len(sent.mm_inputs.mm_items[0].precomputed_embeddings) == ROWS


def test_what_the_first_stage_heard_goes_to_the_next_and_is_no_request(send):
    """The list that a stage has taken in is what it sends on."""
    text, heard = SimpleNamespace(rid="r", mm_inputs=None), stages.Heard([("settle", "r")])
    taken, order = [heard, text], []
    scheduler = SimpleNamespace(
        mm_receiver=SimpleNamespace(hear=lambda one: order.append(("heard", one.calls)))
    )
    order.append(("queued", stages.hear(scheduler, taken)))
    assert order == [("heard", [("settle", "r")]), ("queued", [text])]
    assert send(taken)[0] == [heard, text]


def test_another_server_sends_what_it_sent(send, item, request_of):
    (sent,), _ = send([request_of(item())], language_only=False)
    assert len(sent.mm_inputs.mm_items[0].precomputed_embeddings) == ROWS
