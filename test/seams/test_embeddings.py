"""Embeddings are given back when SGLang is done with a request."""

from __future__ import annotations

from types import SimpleNamespace

from sglang_epd.seams.embeddings import drop, release_sent


class Inputs:
    def __init__(self) -> None:
        self.mm_items = [SimpleNamespace(precomputed_embeddings=object()) for _ in range(2)]

    def release_features(self) -> None:
        drop(None, self)

    @property
    def held(self) -> int:
        return sum(item.precomputed_embeddings is not None for item in self.mm_items)


def test_they_go_with_the_features() -> None:
    inputs = Inputs()
    drop(None, inputs)
    assert inputs.held == 0


def test_a_prefill_server_drops_what_it_has_sent_but_not_a_sessions() -> None:
    sent = SimpleNamespace(multimodal_inputs=Inputs(), session=None)
    kept = SimpleNamespace(multimodal_inputs=Inputs(), session=object())
    text = SimpleNamespace(multimodal_inputs=None, session=None)
    assert release_sent([sent, kept, text], None, rids_to_check=None) is None
    assert sent.multimodal_inputs.held == 0
    assert kept.multimodal_inputs.held == 2
