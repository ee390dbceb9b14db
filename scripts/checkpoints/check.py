"""Measures whether a checkpoint is fit for its purpose, with the model of `transformers`.

Two servers can only be compared on a checkpoint whose answer depends on the media and
on little else: not on the order in which floats are added up.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import photographs
import sounds
from checkpoints.families import FAMILIES
from checkpoints.family import AUDIO, IMAGE

# A picture, or a sound at 16 kHz: float32 [samples].
Media = Image.Image | np.ndarray

_TOP = 20
_NEW_TOKENS = 16


@dataclass(frozen=True)
class Measurement:
    """One figure and the bounds it has to keep; None is no bound."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def passed(self) -> bool:
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        bounds = [f"at least {self.at_least:g}"] if self.at_least is not None else []
        bounds += [f"at most {self.at_most:g}"] if self.at_most is not None else []
        verdict = "" if not bounds else "  ok" if self.passed else "  FAILED"
        note = f"  ({', '.join(bounds)})" if bounds else ""
        return f"{self.name:<58} {self.value:10.3g}{note}{verdict}"


class Subject:
    """A loaded checkpoint and the few questions that are asked of it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(folder)
        family = FAMILIES[AutoConfig.from_pretrained(folder).model_type]
        self.modalities = frozenset(family.marks)
        self.model = family.load(folder)
        self.model.eval()

    def prompt(self, media: Sequence[Media], text: str = "What is this?") -> dict:
        """Model inputs for one user turn: the media side by side, then the text."""
        kind = IMAGE if all(isinstance(item, Image.Image) for item in media) else AUDIO
        parts = [{"type": kind} for _ in media] + [{"type": "text", "text": text}]
        spelled = self.processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        given: dict = {"images": list(media)} if kind == IMAGE else {"audio": list(media)}
        if kind == AUDIO:
            given["sampling_rate"] = sounds.RATE_HZ
        return dict(self.processor(text=spelled, return_tensors="pt", **given))

    @torch.no_grad()
    def next_token(self, media: Sequence[Media]) -> torch.Tensor:
        """Log-probabilities of the first token of the answer, float32 [vocabulary]."""
        return self.model(**self.prompt(media)).logits[0, -1].log_softmax(-1)

    @torch.no_grad()
    def greedy(self, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of a greedy answer [n] and the log-probabilities of each [n, vocabulary]."""
        out = self.model.generate(
            **inputs,
            max_new_tokens=_NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, inputs["input_ids"].shape[1] :]
        return tokens, torch.cat(out.logits).log_softmax(-1)

    @torch.no_grad()
    def replay(self, inputs: dict, tokens: torch.Tensor, attention: str) -> torch.Tensor:
        """The same log-probabilities from one forward over prompt and answer together."""
        whole = torch.cat([inputs["input_ids"], tokens[None, :-1]], dim=1)
        replayed = inputs | {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        if "mm_token_type_ids" in inputs:
            added = whole.shape[1] - inputs["input_ids"].shape[1]
            replayed["mm_token_type_ids"] = torch.nn.functional.pad(
                inputs["mm_token_type_ids"], (0, added)
            )
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(attention)
        try:
            logits = self.model(**replayed).logits[0, -len(tokens) :]
        finally:
            self.model.set_attn_implementation(before)
        return logits.log_softmax(-1)


def top_difference(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    """Largest difference over the tokens in both top-20 lists, and how many those are."""
    shared = sorted(set(a.topk(_TOP).indices.tolist()) & set(b.topk(_TOP).indices.tolist()))
    if not shared:
        return float("inf"), 0
    return float((a[shared] - b[shared]).abs().max()), len(shared)


def measure(folder: Path) -> Iterator[Measurement]:
    """Yield every figure of the checkpoint in `folder`, the costly ones last."""
    subject = Subject(folder)
    clips = {name: sounds.load(name) for name in sounds.NAMES}
    if AUDIO in subject.modalities:
        yield from sound_dependence(subject, clips)
    if IMAGE not in subject.modalities:
        yield from generation(subject, clips)
        return
    photos = {name: photographs.load(name) for name in ("coffee", "rocket", "astronaut", "cat")}
    yield from image_dependence(subject, photos)
    yield from generation(subject, photos)
    yield from _timing(subject, photos["astronaut"])


def image_dependence(subject: Subject, photos: dict[str, Image.Image]) -> Iterator[Measurement]:
    """How far the first token's log-probabilities move with the images."""
    alone = {name: subject.next_token([photo]) for name, photo in photos.items()}
    pairs = [top_difference(alone[a], alone[b]) for a, b in itertools.combinations(alone, 2)]
    yield Measurement("other photograph: log-probabilities differ by", min(pairs)[0], 0.5)
    yield Measurement("other photograph: shared tokens of the top 20", min(p[1] for p in pairs), 3)
    first, second = photos["coffee"], photos["rocket"]
    forward, backward = subject.next_token([first, second]), subject.next_token([second, first])
    yield Measurement("two in the other order", top_difference(forward, backward)[0], 0.2)
    yield Measurement(
        "second of two exchanged",
        top_difference(forward, subject.next_token([first, photos["cat"]]))[0],
        0.2,
    )
    patched = first.copy()
    patched.paste(second.crop((160, 80, 384, 304)), (200, 100))
    change = top_difference(alone["coffee"], subject.next_token([patched]))[0]
    yield Measurement("a third of one photograph exchanged", change, 0.1)
    tall = first.resize((28, 336))
    wide = Image.frombytes("RGB", (336, 28), tall.transpose(Image.Transpose.TRANSPOSE).tobytes())
    change = top_difference(subject.next_token([tall]), subject.next_token([wide]))[0]
    yield Measurement("transposed", change, 0.2)
    yield from _deepstack(subject, first, alone["coffee"])


def sound_dependence(subject: Subject, clips: dict[str, np.ndarray]) -> Iterator[Measurement]:
    """How far the first token's log-probabilities move with the sounds."""
    alone = {name: subject.next_token([clip]) for name, clip in clips.items()}
    pairs = [top_difference(alone[a], alone[b]) for a, b in itertools.combinations(alone, 2)]
    yield Measurement("other sound: log-probabilities differ by", min(pairs)[0], 0.2)
    yield Measurement("other sound: shared tokens of the top 20", min(p[1] for p in pairs), 3)
    first, second = clips["low"], clips["high"]
    forward, backward = subject.next_token([first, second]), subject.next_token([second, first])
    yield Measurement("two in the other order", top_difference(forward, backward)[0], 0.2)
    changed = first.copy()
    changed[: len(first) // 3] = second[: len(first) // 3]
    change = top_difference(alone["low"], subject.next_token([changed]))[0]
    yield Measurement("a third of one sound exchanged", change, 0.1)


def _deepstack(subject: Subject, photo: Image.Image, whole: torch.Tensor) -> Iterator[Measurement]:
    """What losing the deepstack features would change (Qwen3-VL only)."""
    mergers = [
        merger
        for name, module in subject.model.named_modules()
        if name.endswith("deepstack_merger_list")
        for merger in module.children()
    ]
    hooks = [merger.register_forward_hook(lambda _m, _i, out: out * 0) for merger in mergers]
    if hooks:
        change = top_difference(whole, subject.next_token([photo]))[0]
        yield Measurement("deepstack features left out", change, 0.2)
    for hook in hooks:
        hook.remove()


def generation(subject: Subject, media: Mapping[str, Media]) -> Iterator[Measurement]:
    """Whether greedy answers are varied, long enough and far from float noise."""
    distinct, lengths, noise, gaps = [], [], [], []
    threads = torch.get_num_threads()
    last = list(media.values())[-1]
    for item in media.values():
        inputs = subject.prompt([item, last])
        tokens, cached = subject.greedy(inputs)
        torch.set_num_threads(1)
        again = subject.replay(inputs, tokens, "eager")
        torch.set_num_threads(threads)
        top = cached.topk(_TOP).indices
        noise.append(float((cached.gather(1, top) - again.gather(1, top)).abs().max()))
        best = cached.topk(2).values
        gaps.append(float((best[:, 0] - best[:, 1]).min()))
        distinct.append(len(set(tokens.tolist())))
        lengths.append(len(tokens))
    yield Measurement("greedy tokens before the turn ends", min(lengths), _NEW_TOKENS)
    yield Measurement("distinct among them", min(distinct), 5)
    yield Measurement(
        "noise after 16 tokens: other kernels, threads, no cache", max(noise), None, 1e-4
    )
    yield Measurement("smallest lead of a greedy token", min(gaps), 1e-3)


def _timing(subject: Subject, photo: Image.Image) -> Iterator[Measurement]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    given = subject.prompt([photo.resize((448, 448))])
    image = {name: given[name] for name in given if name.startswith(("pixel_", "image_"))}
    prompt = {"input_ids": torch.arange(1000)[None] % 1000}

    def encode() -> object:
        return subject.model.get_image_features(**image)

    yield Measurement("vision transformer, 448x448 on one core (ms)", _best_ms(encode))
    yield Measurement(
        "prefill of 1000 tokens on one core (ms)",
        _best_ms(lambda: subject.model(**prompt, logits_to_keep=1)),
    )
    torch.set_num_threads(threads)


def _best_ms(call: Callable[[], object], repeats: int = 5) -> float:
    """The least processor time of some calls, which is hardly affected by other load."""
    best = float("inf")
    with torch.no_grad():
        for _ in range(repeats):
            start = time.process_time()
            call()
            best = min(best, (time.process_time() - start) * 1e3)
    return best
