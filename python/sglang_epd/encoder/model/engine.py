"""SGLang's tower and media processor in this process, behind two calls: prepare and forward.

Leans on the in-tree encoder's building blocks, so that a model family is prepared and
run exactly as SGLang does it: `disaggregation.encoder.server.MMEncoder` loads it,
`preparing` has the rest. `loading` leaves the language model out; of families that the
in-tree encoder does not know `adapted` prepares, by the processor that their language
servers use.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from PIL import Image

from sglang_epd.decoding import Decoders
from sglang_epd.device import device_of
from sglang_epd.device.cuda import capture_beside_other_threads
from sglang_epd.emulated import accelerator
from sglang_epd.encoder.breakage import STUCK_S, Breakage, in_time
from sglang_epd.encoder.memory import keep_freed
from sglang_epd.encoder.model.adapted import AdaptedPreparer
from sglang_epd.encoder.model.copyout import CopyOut, fresh
from sglang_epd.encoder.model.features import mark, moved, take
from sglang_epd.encoder.model.graphs import forget
from sglang_epd.encoder.model.loading import (
    follow_custom_all_reduce,
    groups_on,
    without_language_model,
)
from sglang_epd.encoder.model.passes import in_passes, within_steps
from sglang_epd.encoder.model.patches import Patches
from sglang_epd.encoder.model.preparing import Preparer, videos_can_be_read
from sglang_epd.encoder.tower import Prepared, ProfileRequest, Tell
from sglang_epd.errors import ConfigError, EncodeError, ProtocolError
from sglang_epd.families import Family, family_of
from sglang_epd.families.adapter import load_processor
from sglang_epd.families.proof import adapt
from sglang_epd.families.reading import held_bytes
from sglang_epd.media import MediaLimits
from sglang_epd.modality import IMAGE, VIDEO
from sglang_epd.wire.messages import TensorSpec
from sglang_epd.wire.tensors import tensor_spec

logger = logging.getLogger(__name__)

# Items that a tower prepares side by side unless `SGLANG_ENCODER_PREPROC_WORKERS` is set: on a
# CPU, whose cores the tower itself needs, and at most. Each is a thread that takes the
# interpreter's lock from the one that launches kernels: of 448 px an H100 encoded 138 pictures a
# second with 4, 132 with 8 and 112 with 16.
_THREADS_ON_CPU = 4
_MOST_THREADS = 8
# Most items that wait for memory beside them.
_WAITING = 64
# Python's own is 5 ms. The thread that launches a pass gives the interpreter up at each of
# its operators, and has it back when the interval of a thread that computes is over. A tiny
# tower beside two such threads made 17% more of 56 px pictures.
_SWITCH_S = 0.0005


def preparing_threads(device: str, cores: int) -> tuple[int, int]:
    """How many items a tower prepares side by side, and threads of torch for each of them.

    Args:
        device: torch's name of the tower's.
        cores: for its process.

    Raises:
        ConfigError: SGLang's variable says less than one.
    """
    from sglang.srt.environ import envs

    told = envs.SGLANG_ENCODER_PREPROC_WORKERS
    on_cpu = device.startswith("cpu")
    most = _THREADS_ON_CPU if on_cpu else _MOST_THREADS
    threads = told.get() if told.is_set() else max(_THREADS_ON_CPU, min(cores, most))
    if threads < 1:
        raise ConfigError(f"SGLANG_ENCODER_PREPROC_WORKERS={threads} is no number of threads")
    team = torch.get_num_threads()
    # With a team of all cores for each, they would wait for each other. The tower of a CPU
    # needs a team of all.
    return threads, team if on_cpu else min(team, max(1, cores // threads))


class Engine:
    """Loads the tower and is one (`encoder.tower.Tower`).

    Args:
        server_args: SGLang's, resolved.
        limits: bounds on one item's decoding.
        decode_bytes: for all that is decoded at a time.
        patches: of one pass over a long video, where the tower can take it in several.
        rank: of this process among the tower's; all are to be asked the same.
        gpu_id: accelerator; `--base-gpu-id` plus the rank by default.
        rendezvous: where the tower's ranks meet, tcp://host:port; a free port by default.
        share: processes that prepare on this process's cores, this one included.
    """

    # Whether the tower has one rank.
    _alone = True

    def __init__(
        self,
        server_args: Any,
        limits: MediaLimits,
        decode_bytes: int,
        patches: int = 16_384,
        *,
        rank: int = 0,
        gpu_id: int | None = None,
        rendezvous: str | None = None,
        share: int = 1,
    ) -> None:
        from sglang.srt.arg_groups.overrides import model_config_of
        from sglang.srt.disaggregation.encoder import server
        from sglang.srt.environ import envs
        from sglang.srt.runtime_context import get_device, get_mm
        from sglang.srt.utils.network import NetworkAddress, get_free_port_below_ephemeral

        cores = max(1, len(os.sched_getaffinity(0)) // share)
        device = get_device().device
        self._threads, team = preparing_threads(device, cores)
        torch.set_num_threads(team)  # here, and in threads that begin from now on
        sys.setswitchinterval(_SWITCH_S)
        keep_freed()
        if rendezvous is None:
            port = server_args.nccl_port or get_free_port_below_ephemeral()
            rendezvous = NetworkAddress("127.0.0.1", port).to_tcp()
        architecture = model_config_of(server_args).hf_config.architectures[0]
        family = family_of(architecture)
        self._decoders = Decoders(limits, decode_bytes, self._threads, cuts=family is None)
        self._decoders.start()  # while the model is loaded
        # SGLang has a pool of its own, in which its processors run.
        side_by_side = envs.SGLANG_ENCODER_PREPROC_WORKERS.override(self._threads)
        gpu_id = get_device().base_gpu_id + rank if gpu_id is None else gpu_id
        follow_custom_all_reduce()
        with (
            without_language_model(),
            groups_on(gpu_id),
            side_by_side,
            # Embeddings are stored by this package, which gives each encoder its store.
            get_mm().override(enable_mm_global_cache=False),
        ):
            self._encoder = server.MMEncoder(
                server_args, dist_init_method=rendezvous, rank=rank, gpu_id=gpu_id
            )
        self._target = getattr(self._encoder.model, "thinker", self._encoder.model)
        self._most = patches if within_steps(self._target) else None
        self.weights_bytes = held_bytes(self._encoder.model)
        logger.info("Holds the tower alone: %.1f MiB", self.weights_bytes / 2**20)
        self._device = device_of(self._encoder.device, self._encoder.gpu_id)
        if server_args.mem_fraction_static is not None:  # typed, not SGLang's default
            self._device.limit_memory(server_args.mem_fraction_static)
        # What the language model works in, and one server casts to. A parameter's own may be
        # another: that of a quantised tower's weights.
        self.dtype = str(self._encoder.model_config.dtype).removeprefix("torch.")
        # SGLang's schedulers do so; its encoder leaves it to the models.
        self._moves_features = family is not None and self._encoder.device != "cpu"
        self._preparer: Preparer | AdaptedPreparer
        self._patches: Patches | None = None
        if family is None:
            widen(self._encoder.preprocessor, self._threads + _WAITING)
            self._preparer = Preparer(self._encoder, self.dtype, limits, self._device)
            self._patches = self._preparer.patches
        else:
            self._preparer = self._adapted_preparer(architecture, family)
        self._preparing = self._threads_of("epd-prepare", self._threads + _WAITING)
        # One forward at a time: the tower uses the whole device.
        self._tower = self._threads_of("epd-tower", 1)
        self._queue_passes()
        # Weights are loaded on another stream than passes run on.
        self._device.synchronize()
        self._alone = server_args.tp_size == 1
        self._breakage = Breakage(self._probe)

    @property
    def alive(self) -> bool:
        return not self._breakage.reason

    @property
    def preparers(self) -> int:
        # Those that wait for memory to be decoded in take nobody's turn.
        return self._threads + min(self._decoders.waiting, _WAITING)

    @property
    def modalities(self) -> tuple[str, ...]:
        """What the model takes, by the names of `modality.MODALITIES`."""
        return self._preparer.modalities

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Mapping[str, Any] | None = None,
    ) -> Prepared:
        decoding = self._decoders.begin(deadline)

        def prepare() -> Prepared:
            with decoding:
                prepared = self._preparer.prepare(modality, data, decoding, options)
                return mark(prepared, self._device)

        thread = self._preparing.submit(prepare)
        prepared = asyncio.wrap_future(thread)
        try:
            return await self._breakage.watch(asyncio.shield(prepared))
        except asyncio.CancelledError:
            decoding.stop()
            thread.cancel()
            while not prepared.done():  # its place is free when its thread is
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([prepared])
            if not prepared.cancelled():
                prepared.exception()  # of no interest any more, and would be logged as forgotten
            raise

    @property
    def depth(self) -> int:
        # On an accelerator the next pass is put on its stream while this one's output is
        # copied; on a CPU it would only compete with it. An emulated one is waited for in the
        # tower's thread, where the next pass queues.
        return 1 if self._copies is None and accelerator() is None else 2

    async def forward(
        self, batch: Sequence[Prepared], tell: Tell | None = None
    ) -> list[torch.Tensor]:
        if self._most is not None and len(batch) == 1:
            passes = in_passes(batch[0], self._most)
            if len(passes) > 1:
                long = self._forward_long(batch[0].layout.embedding, passes, tell)
                return [await self._breakage.watch(long)]
        return await self._breakage.watch(self._forward_once(batch))

    @cached_property
    def _turn(self) -> AbstractAsyncContextManager[None]:
        """Held while a batch's passes are queued: ranks of a tower queue them in the order of the
        batches, or those of two batches would meet in their collectives."""
        return nullcontext() if self._alone else asyncio.Lock()

    async def _forward_long(
        self, spec: TensorSpec, passes: list[Prepared], tell: Tell | None
    ) -> torch.Tensor:
        """One embedding, made by one pass after the other, each of which has a batch's time."""
        loop = asyncio.get_running_loop()
        made = fresh(spec.shape, getattr(torch, spec.dtype))
        places = made.split([one.layout.tokens for one in passes])
        rows = itertools.accumulate(map(len, places))
        landings: list[asyncio.Future[Any]] = []
        landing: asyncio.Future[Any]
        try:
            async with self._turn:
                for one, place in zip(passes, places, strict=True):
                    run = partial(self._run, [one])
                    if self._copies is None:
                        landing = loop.run_in_executor(self._tower, _into, place, run)
                    else:
                        launching = loop.run_in_executor(self._tower, self._copies.launch, run)
                        launched = await in_time(launching, STUCK_S)
                        land = partial(self._copies.land, launched, [len(place)], [place])
                        landing = loop.run_in_executor(self._lander, land)
                    landings.append(landing)
                    if len(landings) > 1:
                        await in_time(landings[-2], STUCK_S)  # beside this pass
                        if tell is not None:
                            tell(made, next(rows))
            await in_time(landings[-1], STUCK_S)
        except BaseException:
            # Not waited for: a device that is stuck lands nothing.
            for landing in landings:
                landing.cancel()
            raise
        return made

    async def _forward_once(
        self, batch: Sequence[Prepared], limit_s: float | None = STUCK_S
    ) -> list[torch.Tensor]:
        loop = asyncio.get_running_loop()
        if self._copies is None:
            running = loop.run_in_executor(self._tower, self._forward, batch)
            return await in_time(running, limit_s)
        async with self._turn:  # which a long video before it may have for many passes
            launching = loop.run_in_executor(
                self._tower, self._copies.launch, lambda: self._run(batch)
            )
            launched = await in_time(launching, limit_s)
        rows = [prepared.layout.tokens for prepared in batch]
        landing = loop.run_in_executor(self._lander, self._copies.land, launched, rows)
        return await in_time(landing, limit_s)

    def discard(self, prepared: Prepared) -> None:
        pass

    async def profile(self, asked: ProfileRequest | None) -> None:
        # A profiler records the thread that it was begun in.
        await asyncio.get_running_loop().run_in_executor(self._tower, self._profile, asked)

    def _profile(self, asked: ProfileRequest | None) -> None:
        profiler = self._encoder.profiler
        try:
            done, why = profiler.stop() if asked is None else profiler.start(asked)
        except OSError as error:
            raise ProtocolError(f"the profile cannot be written: {error}") from error
        if not done:
            raise ProtocolError(why)

    def _count_steps(self, items: int) -> None:
        """A profile may end after so many, and is written then."""
        try:
            for _ in range(items):
                self._encoder.profiler.step()
        except OSError:
            # The items are not to suffer.
            logger.exception("The profile cannot be written")
            self._encoder.profiler.profiler = None

    async def close(self) -> None:
        """End what decodes; the rest ends with the process."""
        self._decoders.close()

    async def warm_up(self) -> None:
        """Encode one small picture, so that the first user waits neither for lazy set-up nor for
        the modules of the process that decodes."""
        if IMAGE in self.modalities:
            file = io.BytesIO()
            Image.new("RGB", (112, 112)).save(file, "PNG")
            # It may compile kernels for longer than a pass takes.
            await self._forward_once([await self.prepare(IMAGE, file.getvalue())], None)

    async def _run_own_picture(self) -> None:
        def prepare() -> Prepared:
            picture = Image.new("RGB", (112, 112))
            return mark(self._preparer.preprocess(IMAGE, picture), self._device)

        prepared = await asyncio.get_running_loop().run_in_executor(self._preparing, prepare)
        await self._forward_once([prepared])

    async def _probe(self) -> None:
        """Succeeds unless the tower fails at everything."""

        def settle() -> None:
            if self._alone:
                # A failed batch leaves it, and the batch's halves may need it in other pieces.
                self._device.empty_cache()
                self._device.synchronize()
                return
            # Other work of the device may wait for what other ranks have yet to queue.
            stream = self._device.stream()
            with self._device.use(stream):
                self._device.empty([1], torch.uint8).fill_(0)
            stream.record_event().synchronize()

        # In the tower's thread: a wait for the device in another one ends a graph's capture.
        await asyncio.get_running_loop().run_in_executor(self._tower, settle)
        # One rank would wait for the others in a pass.
        if self._alone and IMAGE in self.modalities:
            await self._run_own_picture()

    def _queue_passes(self) -> None:
        """Have passes, and copies of what they make, on streams where the device has any."""
        from sglang.srt.environ import envs

        self._copies: CopyOut | None = None
        self._has_graphs = self._device.queues and envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.get()
        if self._has_graphs:
            capture_beside_other_threads()
        if self._device.queues:
            self._copies = CopyOut(self._device, reuses_output=self._has_graphs)
            self._lander = self._threads_of("epd-land", 1)

    def _threads_of(self, name: str, count: int) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(count, name, initializer=self._device.bind)

    def _adapted_preparer(self, architecture: str, family: Family) -> AdaptedPreparer:
        """The preparer of a model that SGLang's own encoder does not know.

        Raises:
            ConfigError: it cannot be split, and why.
        """
        if not hasattr(self._target, "get_image_feature"):
            raise ConfigError(
                f"{architecture} cannot have its encoder apart: its class in SGLang has no "
                "get_image_feature, which would run its tower alone"
            )
        config = self._encoder.model_config
        processor = load_processor(self._encoder.server_args, config)
        for one in (processor, getattr(processor, "inner", None)):
            widen(one, self._threads + _WAITING)
        adapter = adapt(processor, architecture, family)
        towers = [IMAGE]
        if hasattr(self._target, "get_video_feature") and videos_can_be_read():
            towers.append(VIDEO)
        return AdaptedPreparer(adapter, self.dtype, config.hidden_size, towers)

    def _forward(self, batch: Sequence[Prepared]) -> list[torch.Tensor]:
        together = self._run(batch).cpu().contiguous()
        return list(together.split([prepared.layout.tokens for prepared in batch]))

    def _run(self, batch: Sequence[Prepared]) -> torch.Tensor:
        """The batch's embeddings [tokens, width], one item's after the other's."""
        modality = batch[0].content[0]
        encode = getattr(self._target, f"get_{modality.name.lower()}_feature")
        if self._has_graphs:
            forget(self._target, self._device)
        items = take(batch, self._device)
        if self._patches is not None:
            items = self._patches.finish(items)
        if self._moves_features:
            for item in items:
                item.feature = moved(item.feature, self._encoder.device)
        with torch.inference_mode():
            made = None
            try:
                made = encode(items)
            except torch.OutOfMemoryError:
                if not self._has_graphs:
                    raise
                # Each has memory of its own, and one that was begun is in no count.
                forget(self._target, self._device, most=0)
                if not self._alone:
                    raise  # other ranks would wait in another pass
            if made is None:
                # The error is gone, and with it what its frames held.
                self._device.empty_cache()
                made = encode(items)
            if not isinstance(made, torch.Tensor):
                made = torch.cat([part.reshape(-1, part.shape[-1]) for part in made])
            made = made.reshape(-1, made.shape[-1])
            together: torch.Tensor = made.to(getattr(torch, self.dtype))
        layout = batch[0].layout.embedding
        tokens = sum(prepared.layout.tokens for prepared in batch)
        expected = TensorSpec(layout.dtype, (tokens, layout.shape[1]))
        if tensor_spec(together) != expected:
            raise EncodeError(
                f"the encoder made {tensor_spec(together)}, the layouts say {expected}"
            )
        self._count_steps(len(batch))
        return together


def widen(processor: Any, threads: int) -> None:
    """Give a processor of SGLang's pools of so many threads, for each that it has: an item that
    waits for memory to be decoded in keeps one of them."""
    for name in ("io_executor", "preproc_executor"):
        if hasattr(processor, name):
            setattr(processor, name, ThreadPoolExecutor(threads, f"epd-{name}"))


def _into(place: torch.Tensor, run: Callable[[], torch.Tensor]) -> None:
    place.copy_(run())
