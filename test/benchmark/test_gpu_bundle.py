from __future__ import annotations

import struct

from gpu.bundle import blank_others

CODE = 64


def entry(kind: int, architecture: int) -> bytes:
    header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, CODE, 0, 0, 0, 0, architecture)
    return header.ljust(64, b"\0") + b"\xab" * CODE


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_machine_code_of_one_architecture_is_left():
    kept, other, assembly = entry(2, 90), entry(2, 80), entry(1, 90)
    library = bytearray(b"code" + container(kept, other, assembly) + b"data")
    before = bytes(library)

    assert blank_others(library, 90) == 2 * CODE

    assert len(library) == len(before)
    assert library.count(b"\xab") == CODE
    assert kept in library
    assert library.startswith(b"code")
    assert library.endswith(b"data")


def test_bytes_that_only_look_like_device_code_are_left():
    odd = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 128) + b"\xff" * 128
    cut = container(entry(2, 80))[:100]
    library = bytearray(odd + cut)

    assert blank_others(library, 90) == 0
    assert library == odd + cut
