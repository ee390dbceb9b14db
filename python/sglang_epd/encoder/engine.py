"""SGLang's tower and media processor in this process, behind two calls: prepare and forward.

Leans on the in-tree encoder's building blocks, so that a model family is prepared and
run exactly as SGLang does it: `disaggregation.encoder.server.MMEncoder` (loading, item
building, embedding widths) and its `EncoderPreprocessor`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from PIL import Image

from sglang_epd.encoder.tower import Prepared
from sglang_epd.errors import EncodeError, MediaError, MediaTypeError
from sglang_epd.media import MediaLimits, decode_image
from sglang_epd.wire import Layout, TensorSpec
from sglang_epd.wire.tensors import tensor_spec

_DECODE_THREADS = 4


class Engine:
    """Loads the tower and is one (`encoder.tower.Tower`).

    Args:
        server_args: SGLang's, resolved.
        limits: bounds on decoding.
        rank: of this process among the tower's; all are to be asked the same.
        gpu_id: accelerator; `--base-gpu-id` plus the rank by default.
        rendezvous: where the tower's ranks meet, tcp://host:port; a free port by default.
    """

    def __init__(
        self,
        server_args: Any,
        limits: MediaLimits,
        *,
        rank: int = 0,
        gpu_id: int | None = None,
        rendezvous: str | None = None,
    ) -> None:
        from sglang.srt.disaggregation.encoder import preprocessor, server
        from sglang.srt.managers.schedule_batch import Modality
        from sglang.srt.server_args import PortArgs
        from sglang.srt.utils.network import NetworkAddress

        self._modalities = Modality
        self._feature_of = server._get_mm_feature
        self._to_tensor = preprocessor._convert
        self._limits = limits
        if rendezvous is None:
            port = PortArgs.init_new(server_args).nccl_port
            rendezvous = NetworkAddress("127.0.0.1", port).to_tcp()
        self._encoder = server.MMEncoder(
            server_args, dist_init_method=rendezvous, rank=rank, gpu_id=gpu_id
        )
        self._target = getattr(self._encoder.model, "thinker", self._encoder.model)
        self.dtype = str(self._encoder._embedding_dtype).removeprefix("torch.")
        self.hf_config = self._encoder.model_config.hf_config
        self._decoders = ThreadPoolExecutor(_DECODE_THREADS, "epd-decode")
        # One forward at a time: the tower uses the whole device.
        self._tower = ThreadPoolExecutor(1, "epd-tower")
        self._tower.submit(self._bind_device).result()

    @property
    def alive(self) -> bool:
        return True

    @property
    def modalities(self) -> tuple[str, ...]:
        """What it takes."""
        return ("IMAGE",)

    @property
    def preparers(self) -> int:
        return _DECODE_THREADS

    async def prepare(self, modality: str, data: bytes) -> Prepared:
        if modality != "IMAGE" or not self._encoder.supports_modality(self._modalities.IMAGE):
            raise MediaTypeError(f"this model's encoder does not take {modality.lower()} input")
        image = await asyncio.get_running_loop().run_in_executor(
            self._decoders, decode_image, data, self._limits
        )
        return await self._prepare_image(image)

    async def forward(self, batch: Sequence[Prepared]) -> list[torch.Tensor]:
        return await asyncio.get_running_loop().run_in_executor(self._tower, self._forward, batch)

    def discard(self, prepared: Prepared) -> None:
        pass

    async def close(self) -> None:
        """Nothing: it ends with the process."""

    async def warm_up(self) -> None:
        """Encode one small picture, so that the first user does not wait for lazy set-up."""
        await self.forward([await self._prepare_image(Image.new("RGB", (112, 112)))])

    async def _prepare_image(self, image: Image.Image) -> Prepared:
        modality = self._modalities.IMAGE
        try:
            result = await self._encoder.preprocessor.process_mm_items([image], modality)
        except (TypeError, ValueError) as error:
            raise MediaError(f"cannot be preprocessed: {error}") from error
        feature = self._to_tensor(self._feature_of(result.mm_inputs, modality))
        count = len(result.grid_thw)
        model_items = self._encoder._build_model_mm_items(
            feature, result, list(range(count)), modality
        )
        spec = TensorSpec(
            self.dtype, (sum(result.token_counts), self._encoder._embedding_dims[modality])
        )
        grid = torch.as_tensor(result.grid_thw).reshape(count, -1).tolist()
        patches = sum(math.prod(row) for row in grid)
        return Prepared(Layout("IMAGE", spec, grid), patches, "IMAGE", (modality, model_items))

    def _bind_device(self) -> None:
        if self._encoder.device != "cpu":
            torch.get_device_module(self._encoder.device).set_device(self._encoder.gpu_id)

    def _forward(self, batch: Sequence[Prepared]) -> list[torch.Tensor]:
        modality = batch[0].content[0]
        encode = getattr(self._target, f"get_{modality.name.lower()}_feature")
        with torch.inference_mode():
            together = encode([item for prepared in batch for item in prepared.content[1]])
            together = together.reshape(-1, together.shape[-1])
            embeddings = _split(together, [prepared.layout.embedding for prepared in batch])
            # One alone is its storage's only user already.
            return [
                part.cpu() if len(batch) == 1 else part.to("cpu", copy=True) for part in embeddings
            ]


def _split(together: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    made = tensor_spec(together)
    expected = TensorSpec(specs[0].dtype, (sum(spec.shape[0] for spec in specs), specs[0].shape[1]))
    if made != expected:
        raise EncodeError(f"the encoder made {made}, the layouts say {expected}")
    return list(together.split([spec.shape[0] for spec in specs]))
