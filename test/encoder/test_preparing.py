"""What of preparing needs no model; the rest runs in test/integration."""

from __future__ import annotations

import torch

from sglang_epd.encoder.preparing import _group, _Unspoken


def test_media_is_not_quoted_by_whoever_mentions_it():
    media = _Unspoken(b"a user's secret")
    for mentioned in (f"{media}", str(media), repr(media), f"{media!r}", "%s" % media):  # noqa: UP031
        assert mentioned == "<15 bytes>"


def test_media_is_bytes_to_whoever_reads_it():
    media = _Unspoken(b"RIFF data")
    assert isinstance(media, bytes)
    assert media == b"RIFF data"
    assert bytes(media[:4]) == b"RIFF"


def test_clips_of_one_padded_length_share_a_forward():
    short, long = torch.zeros(1, 128, 300), torch.zeros(1, 128, 3000)
    assert _group("AUDIO", short) == _group("AUDIO", torch.zeros(2, 128, 300))
    assert _group("AUDIO", short) != _group("AUDIO", long)


def test_patches_share_a_forward_whatever_their_number():
    assert _group("IMAGE", torch.zeros(4, 1176)) == _group("IMAGE", torch.zeros(16, 1176))
    assert _group("IMAGE", torch.zeros(4, 1176)) != _group("VIDEO", torch.zeros(4, 1176))
