"""What runs items: the contract between the encoder's stages and whatever holds the model.

A tower prepares items (decoding, preprocessing: processor time) and runs batches of
them. `engine` is one in this process; a pool of worker processes is several. Owns no
queue and no policy: what is run when, and with what, is decided by its user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from sglang_epd.wire.messages import Layout

if TYPE_CHECKING:
    import torch


# Called, on the event loop, with the embedding of a batch's one item and how many of its rows are
# there, while others are being made.
Tell = Callable[["torch.Tensor", int], None]


class TowerLostError(Exception):
    """What held the model is gone, with all that was prepared there: prepare it again."""


class TowerBrokenError(Exception):
    """What holds the model fails at everything, until the process that it lives in is new."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """An item ready to be run.

    Attributes:
        layout: of the embedding that it will become.
        patches: what it costs to run: patches for images and videos, feature frames
            for audio.
        group: only items of equal groups may be run together.
        content: the tower's own.
    """

    layout: Layout
    patches: int
    group: Hashable
    content: Any


class ProfileRequest(msgspec.Struct, frozen=True):
    """What is to be profiled; the fields are of SGLang's `ProfileReq`, of the same meaning.

    Attributes:
        num_steps: items after which it ends by itself.
        activities: of CPU, GPU and MEM; the first two by default.
    """

    output_dir: str | None = None
    profile_prefix: str | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None


class Tower(Protocol):
    """Prepares items side by side and runs one batch after the other.

    Attributes:
        alive: whether it takes calls now. A tower that is not raises TowerLostError, and
            comes back by itself.
        dtype: of its weights and embeddings, without "torch.".
        modalities: that it takes.
        weights_bytes: of the parameters and buffers that it holds.
    """

    @property
    def alive(self) -> bool: ...

    @property
    def dtype(self) -> str: ...

    @property
    def modalities(self) -> tuple[str, ...]: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def preparers(self) -> int:
        """How many items it prepares side by side; more would wait inside."""

    @property
    def depth(self) -> int:
        """How many batches to hand it at a time, so that it never waits for the next."""

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """Decode and preprocess one item, off the event loop.

        Decoding ends when this is cancelled.

        Args:
            modality: a name of `modality.MODALITIES`.
            data: the encoded media.
            deadline: by `time.monotonic`, which a machine's processes share; decoding ends
                then.
            options: the item's own (`wire.http.EncodeItem`), if it has any.

        Raises:
            DeadlineError: the deadline passed while it was decoded.
            MediaError: the media cannot be decoded or preprocessed.
            MediaTypeError: the model does not take this modality.
            TowerLostError, TowerBrokenError: the tower is gone, or broken.
        """

    async def forward(
        self, batch: Sequence[Prepared], tell: Tell | None = None
    ) -> list[torch.Tensor]:
        """Run a batch of one group; each item's embedding [tokens, width] on the host.

        Called for `depth` batches at a time at most, and not cancelled. Embeddings may lie in
        one memory, which stays as long as one of them. The items are the tower's no more when
        it returns; when it raises, they may be run again, and have to be discarded.

        Args:
            batch: items of one group, prepared here.
            tell: hears of a long video's first rows, from a tower in this process; what it
                raises ends that video.

        Raises:
            EncodeError: the tower gave another shape or dtype than a layout says.
            TowerLostError, TowerBrokenError: the tower is gone, or broken.
            Exception: whatever the model raises; the same items may do better apart.
        """

    def discard(self, prepared: Prepared) -> None:
        """Forget an item that was prepared here and will not be run again, lost or not."""

    async def profile(self, asked: ProfileRequest | None) -> None:
        """Begin to profile, or end it and write the traces.

        Raises:
            ProtocolError: there is a profile already, or none; or it cannot be written.
            TowerLostError: the tower is gone.
        """

    async def close(self) -> None:
        """End what holds the model; calls under way raise TowerLostError."""
