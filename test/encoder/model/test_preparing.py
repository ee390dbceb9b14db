"""What of preparing needs no model; the rest runs in test/integration."""

from __future__ import annotations

import pytest
import torch

from sglang_epd.encoder.model.engine import preparing_threads
from sglang_epd.encoder.model.preparing import _group
from sglang_epd.errors import ConfigError


def test_clips_of_one_padded_length_share_a_forward():
    short, long = torch.zeros(1, 128, 300), torch.zeros(1, 128, 3000)
    assert _group("AUDIO", short) == _group("AUDIO", torch.zeros(2, 128, 300))
    assert _group("AUDIO", short) != _group("AUDIO", long)


def test_patches_share_a_forward_whatever_their_number():
    assert _group("IMAGE", torch.zeros(4, 1176)) == _group("IMAGE", torch.zeros(16, 1176))
    assert _group("IMAGE", torch.zeros(4, 1176)) != _group("VIDEO", torch.zeros(4, 1176))


@pytest.mark.parametrize(("told", "threads"), [(None, 4), ("1", 1), ("12", 12)])
def test_sglangs_variable_says_how_many_items_are_prepared_side_by_side(monkeypatch, told, threads):
    monkeypatch.delenv("SGLANG_ENCODER_PREPROC_WORKERS", raising=False)
    if told is not None:
        monkeypatch.setenv("SGLANG_ENCODER_PREPROC_WORKERS", told)
    assert preparing_threads() == threads


def test_no_threads_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("SGLANG_ENCODER_PREPROC_WORKERS", "0")
    with pytest.raises(ConfigError, match="SGLANG_ENCODER_PREPROC_WORKERS=0"):
        preparing_threads()
