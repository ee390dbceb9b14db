"""Tables of LoRA adapters, on a machine that has no pinned memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_epd.platform import adapters, defaults


def tables() -> list[torch.Tensor]:
    """Made in each way in which SGLang makes them."""
    return [
        torch.tensor([3, 1], dtype=torch.int32, pin_memory=True, device="cpu"),
        torch.zeros((2,), dtype=torch.int32, pin_memory=True),
        torch.ones(2).cpu().pin_memory(),
    ]


class Manager:
    def __init__(self) -> None:
        self.tables: list[list[torch.Tensor]] = []

    def init_lora_modules(self) -> None:
        self.tables.append(tables())

    def update_lora_info(self) -> None:
        self.tables.append(tables())

    def prepare_lora_batch(self, count: int, *, times: int) -> int:
        self.tables.append(tables())
        return count * times


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned")
def test_they_cannot_be_pinned() -> None:
    """Else this part of the platform would be of no use."""
    with pytest.raises(RuntimeError):
        tables()


def test_they_are_in_ordinary_memory() -> None:
    patched = type("Patched", (Manager,), {})
    adapters.install(SimpleNamespace(LoRAManager=patched))  # type: ignore[arg-type]
    manager = patched()
    manager.init_lora_modules()
    manager.update_lora_info()
    assert manager.prepare_lora_batch(2, times=3) == 6
    for made in manager.tables:
        assert [one.tolist() for one in made] == [[3, 1], [0, 0], [1, 1]]
        assert not any(one.is_pinned() for one in made)
    assert made[0].dtype == torch.int32


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned")
def test_nothing_else_is_changed() -> None:
    adapters.install(SimpleNamespace(LoRAManager=type("Patched", (Manager,), {})))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        tables()


@pytest.mark.parametrize(
    ("typed", "used"), [("csgmv", "torch_native"), ("triton", "torch_native"), ("ascend", "ascend")]
)
def test_kernels_of_tritons_are_not_chosen(typed: str, used: str) -> None:
    assert defaults.lora_backend(typed) == used
