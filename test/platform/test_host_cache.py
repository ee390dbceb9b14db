"""The host tier of the KV cache, on a machine whose device has the same memory."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch

from sglang_epd.platform import host_cache


def test_tokens_of_every_layer_go_and_come_back() -> None:
    pool = ModuleType("mha")
    host_cache.copy_rows(pool)
    device = [torch.rand(6, 2, 3) for _ in range(4)]
    host = [torch.zeros(9, 2, 3) for _ in range(4)]
    here, there = torch.tensor([4, 1, 2]), torch.tensor([8, 0, 3])
    pool.transfer_kv_direct(
        src_layers=device, dst_layers=host, src_indices=here, dst_indices=there, page_size=1
    )
    assert all(not layer[[1, 2, 4, 5, 6, 7]].any() for layer in host)
    back = [torch.zeros(6, 2, 3) for _ in range(4)]
    pool.transfer_kv_direct(
        src_layers=host, dst_layers=back, src_indices=there, dst_indices=here, page_size=1
    )
    for was, now in zip(device, back, strict=True):
        assert torch.equal(was[here], now[here])
        assert not now[[0, 3, 5]].any()


def test_nothing_is_registered_with_cuda() -> None:
    common = SimpleNamespace(_cuda_host_register=None)
    host_cache.leave_unpinned(common)
    common._cuda_host_register(torch.zeros(3), None)
