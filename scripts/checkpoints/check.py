"""Measures whether a checkpoint is fit for its purpose, with the model of `transformers`.

Two servers can only be compared on a checkpoint whose answer depends on the image and
on little else: not on the order in which floats are added up.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import photographs

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
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()

    def prompt(self, images: Sequence[Image.Image], text: str = "What is this?") -> dict:
        """Model inputs for one user turn: the images side by side, then the text."""
        parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
        spelled = self.processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        return dict(self.processor(text=spelled, images=list(images) or None, return_tensors="pt"))

    @torch.no_grad()
    def next_token(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Log-probabilities of the first token of the answer, float32 [vocabulary]."""
        return self.model(**self.prompt(images)).logits[0, -1].log_softmax(-1)

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
        types = torch.nn.functional.pad(
            inputs["mm_token_type_ids"], (0, whole.shape[1] - inputs["input_ids"].shape[1])
        )
        replayed = inputs | {
            "input_ids": whole,
            "attention_mask": torch.ones_like(whole),
            "mm_token_type_ids": types,
        }
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


def _deepstack(subject: Subject, photo: Image.Image, whole: torch.Tensor) -> Iterator[Measurement]:
    """What losing the deepstack features would change (Qwen3-VL only)."""
    mergers = getattr(subject.model.model.visual, "deepstack_merger_list", ())
    hooks = [merger.register_forward_hook(lambda _m, _i, out: out * 0) for merger in mergers]
    if hooks:
        change = top_difference(whole, subject.next_token([photo]))[0]
        yield Measurement("deepstack features left out", change, 0.2)
    for hook in hooks:
        hook.remove()


def generation(subject: Subject, photos: dict[str, Image.Image]) -> Iterator[Measurement]:
    """Whether greedy answers are varied, long enough and far from float noise."""
    distinct, lengths, noise, gaps = [], [], [], []
    threads = torch.get_num_threads()
    for photo in photos.values():
        inputs = subject.prompt([photo, photos["cat"]])
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
    images = subject.processor.image_processor([photo.resize((448, 448))], return_tensors="pt")
    prompt = {"input_ids": torch.arange(1000)[None] % 1000}

    def encode() -> object:
        return subject.model.model.visual(images["pixel_values"], grid_thw=images["image_grid_thw"])

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
