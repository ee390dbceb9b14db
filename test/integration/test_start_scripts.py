"""Flags that start scripts have, many at once, on every server: an answer is one server's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from integration.client import (
    Client,
    about_a_crop,
    data_url,
    image_part,
    text_part,
    user,
)
from integration.counters import delivered
from integration.test_forms import GREEDY, IMAGE
from integration.test_parity import one as one_picture
from integration.test_parity import two
from integration.topology import Machine, Topology, checkpoint

pytestmark = pytest.mark.extended
Photographs = list[Image.Image]
MODEL = "tiny-qwen2_5-vl"
FLAGS = (
    "--schedule-policy fcfs --enable-priority-scheduling --enable-mixed-chunk --page-size 16 "
    "--chunked-prefill-size 64 --max-total-tokens 2048 --max-running-requests 4 "
    "--disable-overlap-schedule --schedule-conservativeness 0.5 --context-length 1024 "
    "--served-model-name vision --reasoning-parser qwen3 --tool-call-parser qwen25 "
    "--stream-interval 4 --enable-cache-report --enable-metrics --log-requests "
    "--log-requests-level 3 --log-level debug --skip-server-warmup --disable-fast-image-processor "
    "--limit-mm-data-per-request '{\"image\": 4}' --enable-return-hidden-states"
)
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": LOOK}]


@pytest.fixture(scope="module")
def both(machine: Machine) -> Iterator[tuple[Client, Client]]:
    alone = Topology(MODEL, ("colocated",), flags={"colocated": FLAGS})
    roles = ("encoder", "language")
    with (
        machine.lend(alone) as one,
        machine.lend(Topology(MODEL, roles, flags=dict.fromkeys(roles, FLAGS))) as ours,
    ):
        yield one.client("colocated"), ours.client()


def test_answers_are_one_servers(both: tuple[Client, Client], photographs: Photographs) -> None:
    one, ours = both
    for messages in (one_picture(photographs), two(photographs)):
        expected = one.generation(*messages, tokens=8)
        for _ in range(2):
            ours.generation(*messages, tokens=8).check(expected)
    asked = [about_a_crop(photographs, number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = [list(pool.map(server.answer, asked)) for server in both]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "options",
    [{"tools": TOOLS}, {"priority": 5}, {"separate_reasoning": True}],
    ids=lambda options: next(iter(options)),
)
def test_what_a_client_may_say(
    both: tuple[Client, Client], photographs: Photographs, options: dict[str, Any]
) -> None:
    answers = [server.chat(*one_picture(photographs), **options).json() for server in both]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_too_many_pictures_are_as_much_of_an_error(
    both: tuple[Client, Client], photographs: Photographs
) -> None:
    part = image_part(data_url(photographs[0].resize((56, 56))))
    for server in both:
        refused = server.chat(user(*[part] * 5, text_part("Five?")))
        assert refused.status_code == 400
        assert "Image count 5 exceeds limit 4" in refused.text


@pytest.mark.skipif(
    find_spec("granian") is None, reason="granian, of SGLang's extra http2, is not installed"
)
@pytest.mark.parametrize("more", ["", " --tokenizer-worker-num 2"])
def test_http2(machine: Machine, photographs: Photographs, more: str) -> None:
    roles = ("encoder", "language")
    flags = {"encoder": "--enable-http2", "language": f"--enable-http2{more}"}
    asked = one_picture(photographs)
    body = {"model": "default", "messages": asked, "temperature": 0, "max_tokens": 8}
    with machine.lend(Topology(MODEL, roles, flags=flags)) as topology:
        machine.check(topology.client(), MODEL, asked, tokens=8)
        url = f"{topology.urls['language']}/v1/chat/completions"
        curl = ["curl", "-s", "--http2-prior-knowledge", "-w", " HTTP/%{http_version}"]
        told = ["-H", "Content-Type: application/json", "--data-binary", "@-", url]
        said = subprocess.check_output([*curl, *told], input=json.dumps(body), text=True)
        answer, _, version = said.rpartition(" HTTP/")
        text = json.loads(answer)["choices"][0]["message"]["content"]
        assert (version, text) == ("2", topology.client().answer(*asked, max_tokens=8))


def test_token_ids_to_a_server_without_a_tokenizer(
    machine: Machine, photographs: Photographs
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(MODEL))
    bodies = [
        {
            "input_ids": tokenizer.encode(f"{IMAGE * count}What is number {count}?"),
            "image_data": [data_url(photo.resize((224, 168))) for photo in photographs[:count]],
            "sampling_params": GREEDY,
        }
        for count in range(3)
    ]
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    runs = [48 if token == pad else 1 for token in bodies[2]["input_ids"]]
    expanded = [
        one for one, run in zip(bodies[2]["input_ids"], runs, strict=True) for _ in range(run)
    ]
    bodies.append({**bodies[2], "input_ids": expanded})
    one = machine.colocated(MODEL)
    expected = [one.generate(**body).json()["output_ids"] for body in bodies]
    roles = ("encoder", "language@zmq_to_scheduler", "language@zmq_to_tokenizer")
    flags = {
        role: f"--skip-tokenizer-init --encoder-transfer-backend {role[9:]}" for role in roles[1:]
    }
    with machine.lend(Topology(MODEL, roles, flags=flags)) as topology:
        for role in roles[1:]:
            client = topology.client(role)
            answers = [client.generate(**body).json() for body in bodies]
            assert [answer["output_ids"] for answer in answers] == expected
        assert delivered(topology) > 0
