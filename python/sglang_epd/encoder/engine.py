"""SGLang's vision tower and media processor behind two calls: prepare and forward.

Leans on the in-tree encoder's building blocks, so that a model family is prepared and
run exactly as SGLang does it: `disaggregation.encoder.server.MMEncoder` (loading, item
building, embedding widths) and its `EncoderPreprocessor`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from sglang_epd.errors import EncodeError, MediaError, MediaTypeError
from sglang_epd.media import MediaLimits, decode_image
from sglang_epd.wire import Layout, TensorSpec
from sglang_epd.wire.tensors import tensor_spec

_DECODE_THREADS = 4


@dataclass(frozen=True)
class Prepared:
    """An item ready for the tower: its layout, and the model's own item objects."""

    layout: Layout
    modality: Any
    model_items: list[Any]


class Engine:
    """Loads the tower; prepares and encodes one item at a time.

    Args:
        server_args: SGLang's, resolved.
        limits: bounds on decoding.
    """

    def __init__(self, server_args: Any, limits: MediaLimits) -> None:
        from sglang.srt.disaggregation.encoder import preprocessor, server
        from sglang.srt.managers.schedule_batch import Modality
        from sglang.srt.server_args import PortArgs
        from sglang.srt.utils.network import NetworkAddress

        self._modalities = Modality
        self._feature_of = server._get_mm_feature
        self._to_tensor = preprocessor._convert
        self._limits = limits
        port = PortArgs.init_new(server_args).nccl_port
        rendezvous = NetworkAddress("127.0.0.1", port).to_tcp()
        self._encoder = server.MMEncoder(server_args, dist_init_method=rendezvous)
        self._target = getattr(self._encoder.model, "thinker", self._encoder.model)
        self.dtype = str(self._encoder._embedding_dtype).removeprefix("torch.")
        self.hf_config = self._encoder.model_config.hf_config
        self._decoders = ThreadPoolExecutor(_DECODE_THREADS, "epd-decode")
        # One forward at a time: the tower uses the whole device.
        self._tower = ThreadPoolExecutor(1, "epd-tower")
        self._tower.submit(self._bind_device).result()

    async def prepare(self, modality: str, data: bytes) -> Prepared:
        """Decode and preprocess one item, off the event loop.

        Raises:
            MediaError: the media cannot be decoded or preprocessed.
            MediaTypeError: the model does not take this modality.
        """
        if modality != "IMAGE" or not self._encoder.supports_modality(self._modalities.IMAGE):
            raise MediaTypeError(f"this model's encoder does not take {modality.lower()} input")
        image = await asyncio.get_running_loop().run_in_executor(
            self._decoders, decode_image, data, self._limits
        )
        return await self._prepare_image(image)

    async def forward(self, prepared: Prepared) -> torch.Tensor:
        """Run the tower; returns the embedding [tokens, width] on the host.

        Raises:
            EncodeError: the tower gave another shape or dtype than the layout says.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._tower, self._forward, prepared
        )

    async def warm_up(self) -> None:
        """Encode one small picture, so that the first user does not wait for lazy set-up."""
        await self.forward(await self._prepare_image(Image.new("RGB", (112, 112))))

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
        return Prepared(Layout("IMAGE", spec, grid), modality, model_items)

    def _bind_device(self) -> None:
        if self._encoder.device != "cpu":
            torch.get_device_module(self._encoder.device).set_device(self._encoder.gpu_id)

    def _forward(self, prepared: Prepared) -> torch.Tensor:
        encode = getattr(self._target, f"get_{prepared.modality.name.lower()}_feature")
        with torch.inference_mode():
            embedding = encode(prepared.model_items).cpu()
        embedding = embedding.reshape(-1, embedding.shape[-1])
        if tensor_spec(embedding) != prepared.layout.embedding:
            raise EncodeError(
                f"the encoder made {tensor_spec(embedding)}, its layout says "
                f"{prepared.layout.embedding}"
            )
        return embedding
