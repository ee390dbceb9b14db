"""What a Qwen2-Audio server is to answer, by the model of `transformers`.

SGLang's one server cannot be asked about two clips: its scheduler ends (the lengths of a
request's clips are kept with the first, and asked of each).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

import sounds
from integration.client import Generation
from integration.topology import checkpoint

_TOP = 20


class Listener:
    """The checkpoint `name`, run as SGLang runs it: the audio tower attends to the padding."""

    def __init__(self, name: str) -> None:
        folder = checkpoint(name)
        self._processor = AutoProcessor.from_pretrained(folder)
        self._whole = Qwen2AudioForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    @torch.no_grad()
    def generation(self, clips: Sequence[np.ndarray], text: str, tokens: int) -> Generation:
        """A greedy answer to one turn: the clips (16 kHz) side by side, then the text."""
        parts: list[dict[str, Any]] = [{"type": "audio"} for _ in clips]
        spelt = self._processor.apply_chat_template(
            [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
            add_generation_prompt=True,
        )
        inputs = self._processor(
            text=spelt, audio=list(clips), sampling_rate=sounds.RATE_HZ, return_tensors="pt"
        )
        ids = inputs["input_ids"]
        model = self._whole.model
        heard = model.multi_modal_projector(
            model.audio_tower(inputs["input_features"]).last_hidden_state
        )
        frames = inputs["feature_attention_mask"].sum(-1)
        rows = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        pieces = [one[:count] for one, count in zip(heard, rows.tolist(), strict=True)]
        embeddings = model.get_input_embeddings()(ids)
        embeddings[ids == self._whole.config.audio_token_id] = torch.cat(pieces)
        top, said = [], []
        for _ in range(tokens):
            hidden = model.language_model(inputs_embeds=embeddings).last_hidden_state[:, -1:]
            best = self._whole.lm_head(hidden)[0, -1].log_softmax(-1).topk(_TOP)
            names = self._processor.tokenizer.batch_decode(best.indices[:, None])
            top.append(dict(zip(names, best.values.tolist(), strict=True)))
            said.append(names[0])
            token = best.indices[None, :1]
            embeddings = torch.cat([embeddings, model.get_input_embeddings()(token)], dim=1)
        return Generation(said, top, ids.shape[1])
