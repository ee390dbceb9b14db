"""Sounds: the same answer as one colocated server, and a 4xx for what is wrong with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import requests
import torch
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

import clips
import sounds
from integration.client import TOLERANCE, Client, Generation, audio_part, text_part, user
from integration.topology import Machine, Topology, checkpoint

MODEL = "tiny-qwen2-audio"
TOKENS = 16

QUESTION = text_part("What is this?")
ONE = user(audio_part(clips.audio("low")), QUESTION)
CASES: dict[str, list[dict[str, Any]]] = {
    "one": [ONE],
    "another rate": [user(audio_part(clips.audio(rate_hz=44_100)), QUESTION)],
    "mp3": [user(audio_part(clips.audio(container="MP3", rate_hz=44_100), "audio/mpeg"))],
    # More than the tower hears.
    "long": [user(audio_part(clips.audio(seconds=33.0)), QUESTION)],
}
# Names and seconds of clips side by side, of which one server cannot be asked.
SEVERAL = {
    "one": [("low", 2.0)],
    "two": [("low", 2.0), ("high", 3.5)],
    "the same twice": [("middle", 2.0), ("middle", 2.0)],
    "four": [("low", 1.0), ("high", 1.0), ("low", 1.0), ("shrill", 5.0)],
}


class Listener:
    """The checkpoint `name`, run by the model of `transformers` as SGLang runs it: the audio tower
    attends to the padding.

    SGLang's one server cannot be asked about two clips: its scheduler ends (the lengths of a
    request's clips are kept with the first, and asked of each).
    """

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
            best = self._whole.lm_head(hidden)[0, -1].log_softmax(-1).topk(20)
            names = self._processor.tokenizer.batch_decode(best.indices[:, None])
            top.append(dict(zip(names, best.values.tolist(), strict=True)))
            said.append(names[0])
            token = best.indices[None, :1]
            embeddings = torch.cat([embeddings, model.get_input_embeddings()(token)], dim=1)
        return Generation(said, top, ids.shape[1])


@pytest.fixture(scope="module")
def topology(machine: Machine) -> Topology:
    return machine.use("audio")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("audio", "language"), id="E+PD"),
        pytest.param(("audio_apart", "router"), id="E+P+D", marks=pytest.mark.extended),
    ],
)
def client(machine: Machine, request: pytest.FixtureRequest) -> Client:
    name, entry = request.param
    return machine.use(name).client(entry)


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_equal_one_servers(machine: Machine, client: Client, case: str) -> None:
    machine.check(client, MODEL, CASES[case], TOKENS)


def test_a_transcription_is_one_servers(machine: Machine, client: Client) -> None:
    """Of a file, without a prompt."""
    files = {"file": ("clip.wav", clips.audio("low"), "audio/wav")}
    said = []
    for server in (client, machine.colocated(MODEL)):
        answer = requests.post(
            f"{server.url}/v1/audio/transcriptions", files=files, data={"model": "d"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        said.append(answer.json()["text"])
    assert said[0] == said[1] != ""


def test_a_recording_whose_header_cannot_be_read_is_decoded_by_no_server(client: Client) -> None:
    """SGLang would decode all of it in its own process."""
    files = {"file": ("clip.flac", clips.audio(container="FLAC")[:30], "audio/flac")}
    url = f"{client.url}/v1/audio/transcriptions"
    answer = requests.post(url, files=files, data={"model": "d"}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "header cannot be read" in answer.text


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener(MODEL)


@pytest.mark.parametrize("case", SEVERAL)
def test_log_probabilities_equal_the_models(client: Client, listener: Listener, case: str) -> None:
    files = [clips.audio(name, seconds=seconds) for name, seconds in SEVERAL[case]]
    # As the samples are in a file of 16 bits.
    heard = [clips.samples(file) for file in files]
    expected = listener.generation(heard, QUESTION["text"], TOKENS)
    client.generation(user(*map(audio_part, files), QUESTION), tokens=TOKENS).check(expected)


def test_the_answer_depends_on_the_sound(topology: Topology) -> None:
    """Else parity would prove nothing."""
    first, second = (
        topology.client().generation(user(audio_part(clips.audio(name)), QUESTION), tokens=1)
        for name in ("low", "high")
    )
    assert first.change(second) > 100 * TOLERANCE


BAD = {
    "text": (lambda: b"This is a text.", 400, "not an audio file"),
    "head of a file": (lambda: clips.audio(container="FLAC")[:40], 400, "damaged"),
    "no sound": (lambda: clips.audio()[:44], 400, "no sound"),
    "too short": (lambda: clips.audio(seconds=0.02), 400, "too short"),
    "too long": (lambda: clips.audio(container="FLAC", seconds=601.0), 413, "longer than 600 s"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_clip_is_a_4xx_that_names_it(topology: Topology, kind: str) -> None:
    make, status, reason = BAD[kind]
    language, bad = topology.client(), audio_part(make())
    response = language.chat(user(audio_part(clips.audio()), bad, text_part("What?")))
    assert response.status_code == status, response.text
    assert "audio 2 of 2" in response.json()["message"]
    assert reason in response.json()["message"]
    assert language.answer(ONE)
    topology.check_alive()
