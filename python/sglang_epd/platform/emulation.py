"""Has SGLang's forward passes take the time of an emulated accelerator (`emulated`).

Leans on every batch of every scheduler going through `Scheduler.run_batch`, on results being
waited for by their `copy_done` where scheduling is overlapped, and on every server, the
in-tree encoder too, running a tower by its model's `get_*_feature(items)` and answering HTTP by
uvicorn. A draft model's passes have no price, nor has preprocessing, which takes its real time.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sglang_epd.deferred import Change
from sglang_epd.emulated import EmulatedAccelerator, Pass, accelerator, mark
from sglang_epd.errors import ConfigError
from sglang_epd.profile import LanguageCosts, TowerCosts

logger = logging.getLogger(__name__)

# Of each HTTP answer of an emulated server, with the profile's name and the dilation.
HEADER = "x-sglang-epd-emulated"
_FEATURES = ("get_image_feature", "get_video_feature", "get_audio_feature")
_GRIDS = ("image_grid_thw", "video_grid_thw")


def changes() -> dict[str, Change]:
    """The modules that change, and how; none unless an accelerator is emulated.

    Raises:
        SystemExit: it is asked for, and cannot be had; SGLang would only log another error.
    """
    try:
        device = accelerator()
    except ConfigError as error:
        raise SystemExit(f"SGLANG_EPD_EMULATE: {error}") from error
    if device is None:
        return {}
    if multiprocessing.parent_process() is None:
        logger.warning(
            "EMULATED ACCELERATOR: forward passes take the times of %s (%s, times %g). "
            "What this server measures is not this machine's.",
            device.profile.name,
            device.profile.hardware,
            device.dilation,
        )
    tower = device.profile.encoder.tower
    # As on an accelerator, and not the smaller ones of a CPU.
    os.environ.setdefault("SGLANG_EPD_ENCODER_BATCH_PATCHES", str(tower.batch_patches))
    os.environ.setdefault("SGLANG_EPD_ENCODER_BATCH_ITEMS", str(tower.batch_items))
    # It makes an event of CUDA's where scheduling is overlapped.
    os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
    return {
        "sglang.srt.managers.scheduler": partial(_hook_scheduler, device),
        "sglang.srt.model_executor.model_runner": partial(_hook_runner, device),
        "sglang.srt.disaggregation.encoder.server": partial(_hook_encoder, device),
        "uvicorn.config": _hook_answers,
    }


class PassDone:
    """Stands for the event behind a result's copy to the host."""

    def __init__(self, device: EmulatedAccelerator, launched: Pass) -> None:
        self._device, self._launched = device, launched

    def record(self, *_stream: Any) -> None:
        """Nothing: the pass ends when its time is over."""

    def query(self) -> bool:
        return self._device.done(self._launched)

    def synchronize(self) -> None:
        self._device.wait(self._launched)


def _hook_scheduler(device: EmulatedAccelerator, module: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    scheduler = module.Scheduler
    run_batch, internal_state = scheduler.run_batch, scheduler.get_internal_state

    @functools.wraps(run_batch)
    def emulated_run_batch(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        mode = batch.forward_mode
        # Neither runs a model: KV that has arrived, and a rank without requests.
        if mode.is_prebuilt() or mode.is_idle():
            return run_batch(self, batch, *args, **options)
        _count(device)
        # Each has its part of the layers.
        stages = get_parallel().pp_size
        with device.launch() as launched:
            for kind, seconds in batch_seconds(batch, device.profile.language).items():
                launched.add(kind, seconds / stages)
            result = run_batch(self, batch, *args, **options)
        if getattr(result, "copy_done", None) is None:
            device.wait(launched)
        else:
            result.copy_done = PassDone(device, launched)
        return result

    @functools.wraps(internal_state)
    def marked_internal_state(self: Any, request: Any) -> Any:
        answer = internal_state(self, request)
        answer.internal_state.update(mark())
        return answer

    scheduler.run_batch = emulated_run_batch
    scheduler.get_internal_state = marked_internal_state


def _hook_runner(device: EmulatedAccelerator, module: Any) -> None:
    load_model = module.ModelRunner.load_model

    @functools.wraps(load_model)
    def load_and_price(self: Any, *args: Any, **options: Any) -> None:
        load_model(self, *args, **options)
        price_towers(self.model, device)

    module.ModelRunner.load_model = load_and_price


def _hook_encoder(device: EmulatedAccelerator, module: Any) -> None:
    make = module.MMEncoder.__init__

    @functools.wraps(make)
    def make_and_price(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        price_towers(self.model, device)

    module.MMEncoder.__init__ = make_and_price


def _hook_answers(module: Any) -> None:
    """Name the accelerator in a header of every answer."""
    make = module.Config.__init__

    @functools.wraps(make)
    def make_and_mark(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.headers = [*self.headers, (HEADER, json.dumps(mark()["emulated"]))]

    module.Config.__init__ = make_and_mark


def batch_seconds(batch: Any, costs: LanguageCosts) -> dict[str, float]:
    """Time of a scheduler's batch by prefill and decode, without its tower."""
    if not batch.forward_mode.is_extend():
        contexts = [request.seqlen for request in batch.reqs]
        return {"decode": costs.step_s(len(contexts), sum(contexts))}
    rows = list(zip(batch.extend_lens, batch.prefix_lens, strict=True))
    # Behind the prompts of a mixed batch stands a row for each sequence that decodes.
    decoding = len(batch.decoding_reqs or ()) if batch.forward_mode.is_mixed() else 0
    prompts, sequences = rows[: len(rows) - decoding], rows[len(rows) - decoding :]
    seconds = {"prefill": costs.prefill_s(prompts)}
    if sequences:
        seconds["decode"] = costs.step_s(decoding, sum(before for _, before in sequences))
    return seconds


def price_towers(model: Any, device: EmulatedAccelerator) -> None:
    """Have the encoding methods of a model's class take the time of the profile.

    Of the class: SGLang asks a bound method for its model.
    """
    for holder in {type(model), type(getattr(model, "thinker", model))}:
        for name in _FEATURES:
            method = getattr(holder, name, None)
            if method is not None:
                setattr(holder, name, _priced(method, device))


def _priced(encode: Callable[..., Any], device: EmulatedAccelerator) -> Callable[..., Any]:
    profile = device.profile

    def run(launched: Pass, costs: TowerCosts, items: Sequence[Any], call: partial[Any]) -> Any:
        launched.encodes = True
        made = call()
        launched.encodes = False
        launched.add("tower", costs.seconds(patches_of(items, made, profile.pixels.merge)))
        return made

    @functools.wraps(encode)
    def priced(self: Any, items: Sequence[Any], *args: Any, **options: Any) -> Any:
        call, running = partial(encode, self, items, *args, **options), device.launching
        if running is None:
            _count(device)
            with device.launch() as launched:
                made = run(launched, profile.encoder.tower, items, call)
            device.wait(launched)
            return made
        # Another such method has called this one, or this one was hooked twice.
        if running.encodes:
            return call()
        # Of a server that encodes itself: a part of its prefill.
        return run(running, profile.language.tower, items, call)

    return priced


def patches_of(items: Sequence[Any], made: Any, merge: int) -> list[tuple[float, int]]:
    """Patches and steps of each picture and video.

    Args:
        made: the embeddings; they tell the patches of models that have no grids.
        merge: patches of a token.
    """
    grids = [
        [int(extent) for extent in grid]
        for item in items
        for name in _GRIDS
        if getattr(item, name, None) is not None
        for grid in getattr(item, name)
    ]
    if grids:
        return [(float(math.prod(grid)), grid[0]) for grid in grids]
    parts = made if isinstance(made, list | tuple) else [made]
    tokens = sum(part.numel() // part.shape[-1] for part in parts)
    return [(tokens * merge / len(items), 1)] * len(items)


def _count(device: EmulatedAccelerator) -> None:
    """Count passes among the metrics of SGLang's server, unless an encoder of ours counts them.

    Not sooner: SGLang has to set the metrics' directory before they are imported.
    """
    if device.listen is None:
        from sglang_epd.observability.emulation import EmulationMetrics

        device.listen = EmulationMetrics().count
