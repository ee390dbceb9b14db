"""Nothing that a store gives back is believed."""

from __future__ import annotations

import json
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from sglang_epd.errors import ProtocolError
from sglang_epd.store.entry import MAX_OVERHEAD_BYTES, CorruptEntryError, Sealer
from sglang_epd.wire.messages import Layout, TensorSpec
from sglang_epd.wire.tensors import tensor_spec
from store.fakes import image, key_of, sealed

KEY = key_of(1)
LAYOUT, EMBEDDING = image()
GOOD = sealed(KEY, LAYOUT, EMBEDDING)


def array(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, np.uint8).copy()


def opened(raw: bytes, key: bytes = KEY, modality: str = "IMAGE", token: str = ""):
    return Sealer(token).open(key, modality, array(raw))


def parts(raw: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: object, payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text + payload


def test_an_entry_is_a_safetensors_file_that_others_can_read(tmp_path):
    path = tmp_path / "entry.safetensors"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layout, embedding = image(dtype=dtype)
        path.write_bytes(sealed(KEY, layout, embedding))
        with safe_open(path, "pt") as file:
            assert list(file.keys()) == ["embedding"]
            assert torch.equal(file.get_tensor("embedding"), embedding)
            assert file.metadata()["key"] == KEY.hex()


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(
    tokens=st.integers(1, 9),
    width=st.integers(1, 9),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    modality=st.sampled_from(("IMAGE", "VIDEO", "AUDIO")),
    grid=st.lists(st.lists(st.integers(1, 2**40), max_size=3), max_size=3),
    extra=st.dictionaries(st.text(), _json, max_size=4),
    key=st.binary(min_size=32, max_size=32),
    token=st.text(),
)
def test_what_was_sealed_is_opened_to_the_bit(
    tokens, width, dtype, modality, grid, extra, key, token
):
    _, embedding = image(tokens, width, dtype)
    layout = Layout(modality, tensor_spec(embedding), grid, extra)
    found = opened(sealed(key, layout, embedding, token), key, modality, token)
    assert found.layout == layout
    assert found.written_at == 1.7e9
    assert found.embedding.dtype == dtype
    assert torch.equal(found.embedding, embedding)


def test_the_overhead_is_bounded():
    assert len(GOOD) - EMBEDDING.nbytes <= MAX_OVERHEAD_BYTES
    long = Layout("VIDEO", LAYOUT.embedding, [[1, 1, 1]], {"times": [0.123456789] * 50_000})
    with pytest.raises(ProtocolError, match="too long"):
        sealed(KEY, long, EMBEDDING)


def test_what_its_layout_does_not_say_is_not_sealed():
    with pytest.raises(ProtocolError, match="layout"):
        sealed(KEY, Layout("IMAGE", TensorSpec("float32", (8, 4)), [[1, 4, 8]]), EMBEDDING)


@given(st.binary(max_size=2000))
def test_noise_is_corrupt(raw: bytes):
    with pytest.raises(CorruptEntryError):
        opened(raw)


def test_every_changed_byte_that_means_something_is_seen():
    """All but the padding of the header, which says nothing."""
    (length,) = struct.unpack("<Q", GOOD[:8])
    padding = range(8 + len(GOOD[8 : 8 + length].rstrip()), 8 + length)
    draw = random.Random(0)
    for position in range(len(GOOD)):
        if position in padding:
            continue
        raw = bytearray(GOOD)
        raw[position] ^= 1 << draw.randrange(8)
        with pytest.raises(CorruptEntryError):
            opened(bytes(raw))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, len(GOOD) - 1])
def test_what_was_cut_short_is_corrupt(length: int):
    with pytest.raises(CorruptEntryError):
        opened(GOOD[:length])


def test_what_goes_on_after_its_end_is_corrupt():
    with pytest.raises(CorruptEntryError):
        opened(GOOD + b"\0")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, len(GOOD), (256 << 10) + 64, 0])
def test_a_header_that_claims_any_length_is_corrupt(length: int):
    with pytest.raises(CorruptEntryError):
        opened(struct.pack("<Q", length) + GOOD[8:])


def changes() -> dict[str, tuple[object, ...]]:
    """What a header may claim, by the path to it."""
    return {
        "__metadata__.version": ("2", "", None, 1),
        "__metadata__.key": (key_of(2).hex(), "", "zz"),
        "__metadata__.layout": ("", "{}", "[]", "\ud800", '{"modality":"IMAGE"}'),
        "__metadata__.written_at": ("", "nan", "inf", "1e999", "yesterday"),
        "__metadata__.blake3": ("", "0" * 64),
        "__metadata__": (None, {}, []),
        "embedding.dtype": ("F64", "I32", "", None, "BF16"),
        "embedding.shape": ([], [4], [8, 4], [0, 8], [-4, -8], [2**62, 2**62], [4, 8, 1], "4x8"),
        "embedding.data_offsets": ([0, 0], [8, 136], [0, 2**60], [-1, 127], []),
        "embedding": (None, {}, []),
        "another": ({"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]},),
    }


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in changes().items() for value in values]
)
def test_a_header_that_says_something_else_is_corrupt(path: str, value: object):
    header, payload = parts(GOOD)
    *folders, name = path.split(".")
    target = header
    for folder in folders:
        target = target[folder]
    target[name] = value
    with pytest.raises(CorruptEntryError):
        opened(joined(header, payload))


@pytest.mark.parametrize(
    "layout",
    [
        Layout("IMAGE", TensorSpec("float64", (4, 8)), [[1, 2, 8]]),
        Layout("IMAGE", TensorSpec("float32", (-4, -8)), [[1, 2, 8]]),
        Layout("IMAGE", TensorSpec("float32", (4, 8)), [[1, -2, 8]]),
        Layout("IMAGE", TensorSpec("float32", (4, 2**40)), [[1, 2, 8]]),
        Layout("NOISE", TensorSpec("float32", (4, 8)), [[1, 2, 8]]),
    ],
)
def test_a_layout_with_its_own_digest_is_read_with_the_same_eyes(layout: Layout):
    """Without a token whoever can write can make a digest."""
    import msgspec

    header, payload = parts(GOOD)
    metadata = header["__metadata__"]
    metadata["layout"] = msgspec.json.encode(layout).decode()
    metadata["blake3"] = Sealer()._digest(
        metadata["key"], metadata["layout"], metadata["written_at"], memoryview(payload)
    )
    with pytest.raises(CorruptEntryError):
        opened(joined(header, payload), modality=layout.modality)


def test_only_who_has_the_token_can_write_what_is_read():
    forged = sealed(KEY, LAYOUT, EMBEDDING)
    with pytest.raises(CorruptEntryError, match="digest"):
        opened(forged, token="secret")
    assert opened(sealed(KEY, LAYOUT, EMBEDDING, "secret"), token="secret").layout == LAYOUT
    assert len({Sealer(token).folder for token in ("", "secret", "another")}) == 3
    assert "secret" not in Sealer("secret").folder


def test_nested_nonsense_ends_no_process():
    header = b'{"__metadata__":' + b"[" * 100_000
    header += b" " * (-(8 + len(header)) % 64)
    with pytest.raises(CorruptEntryError):
        opened(struct.pack("<Q", len(header)) + header)
