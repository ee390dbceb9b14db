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


@pytest.mark.parametrize(
    ("told", "device", "cores", "threads", "team"),
    [
        (None, "cpu", 64, 4, 64),
        (None, "cuda", 64, 8, 8),
        (None, "cuda", 6, 6, 1),
        (None, "cuda", 2, 4, 1),
        ("1", "cuda", 64, 1, 64),
        ("24", "cpu", 2, 24, 64),
    ],
)
def test_how_many_items_are_prepared_side_by_side_and_how(
    monkeypatch, told, device, cores, threads, team
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.delenv("SGLANG_ENCODER_PREPROC_WORKERS", raising=False)
    if told is not None:
        monkeypatch.setenv("SGLANG_ENCODER_PREPROC_WORKERS", told)
    assert preparing_threads(device, cores) == (threads, team)


def test_no_threads_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("SGLANG_ENCODER_PREPROC_WORKERS", "0")
    with pytest.raises(ConfigError, match="SGLANG_ENCODER_PREPROC_WORKERS=0"):
        preparing_threads("cuda", 8)
