"""What all stores have in common, asked of the real ones: a folder, Mooncake Store."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from sglang_epd.store import shared
from sglang_epd.wire.messages import Layout, TensorSpec
from sglang_epd.wire.tensors import tensor_spec
from store.fakes import Counts, Open, image, key_of, written

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 7), (256, 64), (1500, 256))
LAYOUTS = (
    ("IMAGE", [[1, 16, 16]], {}),
    ("VIDEO", [[4, 8, 8]], {"second_per_grid_ts": 0.5, "video_timestamps": [0.0, 0.25, 1 / 3]}),
    ("AUDIO", [[3000]], {"audio_feature_lens": 3000, "name": 'Ton "ö" \n'}),
)


def cases() -> list[tuple[bytes, Layout, torch.Tensor]]:
    """Every dtype, shape and kind of layout, with every bit pattern that a float may have."""
    made = []
    for number, (dtype, shape, layout) in enumerate(itertools.product(DTYPES, SHAPES, LAYOUTS)):
        count = shape[0] * shape[1]
        size = torch.empty(0, dtype=dtype).element_size()
        generator = torch.Generator().manual_seed(number)
        raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
        embedding = raw.view(dtype).reshape(shape)
        modality, grid, extra = layout
        made.append(
            (key_of(number), Layout(modality, tensor_spec(embedding), grid, extra), embedding)
        )
    return made


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit: NaN is NaN."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


async def test_what_was_kept_another_encoder_finds_to_the_bit(url: str, open_at: Open, counts):
    ours, theirs = await open_at(url), await open_at(url)
    stored = cases()
    for key, layout, embedding in stored:
        ours.keep(key, layout, embedding)
    await written(counts, len(stored))
    assert counts.writes == {"written": len(stored)}
    for key, layout, embedding in stored:
        found = await theirs.find(key, layout.modality)
        assert found is not None
        assert found.layout == layout
        assert same(found.embedding, embedding)
        found.embedding.add_(1)  # it is ours: nobody else's memory
    assert await theirs.find(key_of(999), "IMAGE") is None
    assert counts.reads == {"hit": len(stored), "miss": 1}


async def test_what_is_not_contiguous_is_kept_as_it_reads(url: str, open_at: Open, counts: Counts):
    store = await open_at(url)
    wide = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    embedding = wide[::2, 1:5]
    store.keep(key_of(1), Layout("IMAGE", TensorSpec("float32", (4, 4)), [[1, 4, 4]]), embedding)
    await written(counts)
    found = await store.find(key_of(1), "IMAGE")
    assert found is not None and torch.equal(found.embedding, embedding)


async def test_namespaces_and_tokens_are_apart(url: str, open_at: Open, counts: Counts):
    """Who has no token of ours neither reads what we wrote nor takes it for corrupt."""
    store = await open_at(url, token="secret")
    store.keep(key_of(1), *image())
    await written(counts)
    others = [
        await open_at(url, token="another"),
        await open_at(url),
        await open_at(url.replace("namespace=test-", "namespace=other-"), token="secret"),
    ]
    for other in others:
        assert await other.find(key_of(1), "IMAGE") is None
    assert counts.reads == {"miss": len(others)}
    assert await store.find(key_of(1), "IMAGE") is not None


async def test_a_key_of_another_modality_is_no_hit(url: str, open_at: Open, counts: Counts):
    store = await open_at(url)
    store.keep(key_of(1), *image())
    await written(counts)
    assert await store.find(key_of(1), "VIDEO") is None
    assert counts.reads == {"corrupt": 1}


async def test_what_is_too_old_is_a_miss_and_goes(
    url: str, open_at: Open, counts: Counts, monkeypatch: pytest.MonkeyPatch
):
    store = await open_at(url + "&ttl_s=3600")
    store.keep(key_of(1), *image())
    await written(counts)
    now = time.time()
    monkeypatch.setattr(shared.time, "time", lambda: now + 3599)
    assert await store.find(key_of(1), "IMAGE") is not None
    monkeypatch.setattr(shared.time, "time", lambda: now + 3601)
    assert await store.find(key_of(1), "IMAGE") is None
    # A folder that is being swept may have lost it already.
    swept = counts.reads["miss"]
    assert counts.reads["expired"] + swept == 1
    if not swept:
        await written(counts, 2)
        assert counts.writes["removed"] == 1
    assert await store.find(key_of(1), "IMAGE") is None
    assert counts.reads["miss"] == swept + 1


async def test_what_is_too_large_is_not_stored_and_not_read(url: str, open_at: Open, counts):
    store = await open_at(url)
    layout, embedding = image(tokens=3000, width=1024)  # 12 MB
    store.keep(key_of(1), layout, embedding)
    assert counts.writes == {"too_large": 1}
    generous = await open_at(url.replace("max_item_mb=8", "max_item_mb=32"))
    generous.keep(key_of(1), layout, embedding)
    await written(counts, 2)
    assert counts.writes["written"] == 1
    assert await store.find(key_of(1), "IMAGE") is None
    assert counts.reads["too_large"] == 1
    # It is somebody's.
    assert await generous.find(key_of(1), "IMAGE") is not None


async def test_a_corrupt_entry_is_a_miss_and_written_anew(url: str, open_at: Open, counts: Counts):
    store = await open_at(url)
    layout, embedding = image()
    good, bad = key_of(1), key_of(2)
    store.keep(good, layout, embedding)
    await written(counts)
    # Under the name of another: sound bytes, and not what was asked for.
    raw = await store._backend.get(store._name(good), 1 << 20)
    assert raw is not None
    await store._backend.put(store._name(bad), [raw.data])
    assert await store.find(bad, "IMAGE") is None
    assert counts.reads["corrupt"] == 1
    store.keep(bad, layout, embedding)
    await written(counts, 3)
    assert counts.writes == {"written": 2, "removed": 1}
    found = await store.find(bad, "IMAGE")
    assert found is not None and torch.equal(found.embedding, embedding)
