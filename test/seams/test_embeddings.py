"""Embeddings are given back when SGLang is done with a request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_epd.seams import prefix
from sglang_epd.seams.embeddings import release_sent


@pytest.fixture
def inputs(sglang, hooked, monkeypatch):
    """Makes SGLang's inputs of a request with two items, in a language server's scheduler."""
    hooked("MultimodalInputs.release_features")
    monkeypatch.setattr(prefix.Installed, "gate", object())
    batch = sglang("managers.schedule_batch")

    def make():
        made = batch.MultimodalInputs(mm_items=[])
        for _ in range(2):
            item = batch.MultimodalDataItem(modality=batch.Modality.IMAGE)
            item.feature = item.precomputed_embeddings = object()
            made.mm_items.append(item)
        return made

    return make


def held(inputs) -> int:
    return sum(item.precomputed_embeddings is not None for item in inputs.mm_items)


def test_they_go_with_the_features(inputs):
    one = inputs()
    one.release_features()
    assert held(one) == 0


def test_another_server_keeps_them(inputs, monkeypatch):
    monkeypatch.setattr(prefix.Installed, "gate", None)
    one = inputs()
    release_sent([SimpleNamespace(multimodal_inputs=one, session=None)], None)
    assert all(item.feature is not None for item in one.mm_items)
    one.release_features()
    assert held(one) == 2


def test_a_prefill_server_drops_what_it_has_sent_but_not_a_sessions(inputs):
    sent = SimpleNamespace(multimodal_inputs=inputs(), session=None)
    kept = SimpleNamespace(multimodal_inputs=inputs(), session=object())
    text = SimpleNamespace(multimodal_inputs=None, session=None)
    release_sent([sent, kept, text], None, rids_to_check=None)
    assert held(sent.multimodal_inputs) == 0
    assert held(kept.multimodal_inputs) == 2
