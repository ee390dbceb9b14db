"""Every transfer backend, on one rank and on several: the same answer as one server."""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import requests
from PIL import Image

from integration.client import TOLERANCE, Client, data_url, image_part, text_part, until, user
from integration.counters import answered, counted, status
from integration.hostile import flood_the_payload_port
from integration.late import Late, question
from integration.listener import Site
from integration.test_parity import CASES, TOKENS
from integration.test_survival import tokenizer_workers
from integration.topology import START_TIMEOUT_S, TOPOLOGIES, Machine, Topology
from sglang_epd.cli.processes import ServerError

Photographs = list[Image.Image]
ATTENTION = "--tp 2 --dp-size 2 --enable-dp-attention"

# Topology and entry point; in the order in which they are started.
ENTRIES = [
    ("others", "language@zmq_to_tokenizer"),
    ("others", "language@mooncake"),
    ("others", "language@stages"),
    ("others", "language@ranks"),
    *(
        pytest.param(entry, marks=pytest.mark.extended)
        for entry in (
            ("ranks", "language@mooncake"),
            ("zmq_to_tokenizer_apart", "router"),
            ("mooncake_apart", "router"),
            ("replicas", "language@zmq_to_tokenizer"),
            ("replicas", "language@replicas"),
            ("ranks_apart", "router"),
            ("attention", "language@zmq_to_scheduler"),
            ("attention_tokenizer", "language"),
            ("attention_mooncake", "language@mooncake"),
            ("attention_hosts", "language"),
            ("attention_stages", "language@stages"),
            ("attention_stage_a_host", "language@stages"),
            ("workers", "language@zmq_to_tokenizer"),
            ("stages_glm4v", "language@stages"),
            ("stages_glm4v", "language@zmq_to_tokenizer"),
            ("stages", "language@zmq_to_tokenizer"),
            ("stages", "language@mooncake"),
            ("stages_apart", "router"),
            ("stage_a_host", "language@stages"),
            ("hosts", "language@zmq_to_scheduler"),
            ("hosts", "language@zmq_to_tokenizer"),
            ("hosts_apart", "router"),
        )
    ),
]


@pytest.fixture(scope="module", params=ENTRIES, ids="-".join)
def entry(
    machine: Machine, photographs: Photographs, request: pytest.FixtureRequest
) -> tuple[Topology, Client]:
    name, role = request.param
    model = TOPOLOGIES[name]().model
    for case in CASES:
        machine.reference(model, case(photographs), TOKENS)
    topology = machine.use(name)
    return topology, topology.client(role)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_log_probabilities_equal_one_servers(
    machine: Machine, entry: tuple[Topology, Client], photographs: Photographs, case: Any
) -> None:
    topology, client = entry
    machine.check(client, topology.model, case(photographs), TOKENS)


# Topology, entry point, the server that prefills, and tokens of a picture.
STAGES = [
    ("others", "language@stages", "language@stages", 48),
    pytest.param(("stages_apart", "router", "prefill", 35), marks=pytest.mark.extended),
]


@pytest.mark.parametrize("stages", STAGES, ids=lambda stages: stages[0])
def test_stages_prefill_a_prompts_beginning_and_agree(
    machine: Machine, site: Site, asked: list[dict[str, Any]], stages: tuple[str, str, str, int]
) -> None:
    """While its last picture is on its way. Later stages run what the first one does, or none goes
    on."""
    topology = machine.use(stages[0])
    client, url = topology.client(stages[1]), topology.urls[stages[2]]
    expected = machine.reference(topology.model, asked, TOKENS)
    late = Late(url, site, asked)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.generation, *late.messages, tokens=TOKENS)
        late.wait(stages[3])
        assert not answer.done()
        site.released.set()
        answer.result().check(expected)
    assert late.counted("failed") == 0
    assert late.tokens < expected.prompt_tokens
    until(late.gave_back, 10.0, "its items are held")
    topology.check_alive()


@pytest.mark.parametrize("stages", STAGES, ids=lambda stages: stages[0])
@pytest.mark.parametrize("ends", ["fails", "is aborted"])
def test_stages_forget_a_beginning_whose_request(
    machine: Machine,
    site: Site,
    photographs: Photographs,
    stages: tuple[str, str, str, int],
    ends: str,
) -> None:
    # Its prompt has no beginning that another's has.
    asked = question(f"{stages[0]} {ends}", photographs)
    topology = machine.use(stages[0])
    client, url = topology.client(stages[1]), topology.urls[stages[2]]
    late = Late(url, site, asked)
    if ends == "fails":
        site.files.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.chat, *late.messages, rid="an early one")
        late.wait(stages[3])
        if ends == "is aborted":
            requests.post(f"{url}/abort_request", json={"rid": "an early one"}, timeout=20)
            assert answer.result().status_code >= 400
        site.released.set()
        assert answer.result().status_code >= 400
    until(late.gave_back, 10.0, "its items are held")
    # What was prefilled is a prefix like any other.
    machine.check(client, topology.model, asked, TOKENS)
    topology.check_alive()


@pytest.mark.extended
def test_a_model_without_stages_is_sglangs_own_error(machine: Machine) -> None:
    with pytest.raises(ServerError, match="Pipeline Parallel is not compatible with this model"):
        machine.use("stages_gemma3")


@pytest.mark.extended
def test_attention_to_latents_in_replicas(machine: Machine, message: dict[str, Any]) -> None:
    flags = {"encoder": "--trust-remote-code", "language": f"--trust-remote-code {ATTENTION}"}
    with machine.lend(Topology("tiny-kimi-vl", tuple(flags), flags=flags)) as topology:
        for _ in range(3):
            machine.check(topology.client(), "tiny-kimi-vl", [message], at="kimi_vl")


def test_embeddings_travel_the_way_that_was_asked_for(
    entry: tuple[Topology, Client], photographs: Photographs, request: pytest.FixtureRequest
) -> None:
    topology, client = entry
    name, role = request.node.callspec.params["entry"]

    def ways() -> Counter[str]:
        return counted(topology.urls["encoder"], "encoder_delivered_bytes_total", "landing")

    before = ways()
    new = photographs[0].rotate(len(f"{name} {role}"))
    client.answer(user(image_part(data_url(new)), text_part("What is it?")))
    used = {"remote"} if "mooncake" in f"{name} {role}" else {"shared"}
    # An answer may be faster than the encoder's last word.
    assert until(lambda: ways() - before).keys() == used


def test_what_was_sent_once_is_not_sent_again(
    entry: tuple[Topology, Client], photographs: Photographs, request: pytest.FixtureRequest
) -> None:
    """Nor where another replica has the KV, or none has."""
    topology, client = entry
    if "workers" in request.node.callspec.params["entry"]:
        pytest.skip("each tokenizer worker keeps what it has received")
    parts = [image_part(data_url(photo.resize((392, 252)))) for photo in photographs]
    first = client.generation(user(*parts, text_part("What are these?")), tokens=4)
    before = answered(topology)
    for _ in range(3):
        again = client.generation(user(*parts, text_part("What are these?")), tokens=4)
        assert again.distance(first) < TOLERANCE
    another = user(text_part("Well?"), *reversed(parts))
    assert client.chat(another).status_code == 200
    assert answered(topology) == before


def test_samples_and_many_at_once(
    entry: tuple[Topology, Client], photographs: Photographs, request: pytest.FixtureRequest
) -> None:
    """Requests that are copied, or spread over replicas, find their items."""
    _, client = entry
    urls = [data_url(photo.resize((224, 168))) for photo in photographs]
    questions = [user(image_part(url), text_part("Describe it.")) for url in urls]
    answers = [client.answer(question) for question in questions]
    if "router" not in request.node.name:
        # SGLang's prefill and decode servers never answer n > 1, of text alone neither.
        samples = client.chat(questions[0], n=3).json()["choices"]
        assert [sample["message"]["content"] for sample in samples] == [answers[0]] * 3
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(client.answer, questions * 8))
    assert many == answers * 8


def test_what_is_wrong_with_an_image_is_that_requests_error(
    entry: tuple[Topology, Client], photographs: Photographs, site: Site
) -> None:
    topology, client = entry
    good = image_part(data_url(photographs[0].resize((224, 168))))
    for stream in (False, True):
        bad = client.chat(user(good, image_part(f"{site.url}/none.png")), stream=stream)
        # The mini-lb answers 200 to every stream, and passes on the error as its body.
        status = bad.json()["code"] if stream else bad.status_code
        assert 400 <= status < 500, bad.text
        assert "image 2 of 2" in bad.text
    empty = client.chat(user(image_part("data:image/png;base64,")))
    assert 400 <= empty.status_code < 500, empty.text
    client.answer(user(good))
    topology.check_alive()


@pytest.mark.parametrize("role", ["language@zmq_to_tokenizer", "language@mooncake"])
def test_garbage_on_the_payload_port(machine: Machine, photographs: Photographs, role: str) -> None:
    topology = machine.use("others")
    client = topology.client(role)
    flood_the_payload_port(topology, role)
    client.answer(user(image_part(data_url(photographs[0]))))
    topology.check_alive()


def test_a_client_that_leaves_is_forgotten(
    entry: tuple[Topology, Client], photographs: Photographs
) -> None:
    topology, client = entry
    messages = [user(image_part(data_url(photographs[0])), text_part("What is it?"))]
    # Long enough to be under way when the last of them leaves.
    for after_s in (0.01, 0.05, 0.1):
        client.leaves(*messages, after_s=after_s, max_tokens=512, ignore_eos=True)
    client.answer(*messages)
    topology.check_alive()


@pytest.mark.parametrize("role", ["language@zmq_to_tokenizer", "language@ranks"])
def test_an_encoder_stops_when_a_client_has_left(machine: Machine, site: Site, role: str) -> None:
    topology = machine.use("others")
    site.slow_s = 60.0
    body = {"messages": [user({"type": "image_url", "image_url": {"url": f"{site.url}/slow.png"}})]}
    address = urlsplit(topology.urls[role])
    client = HTTPConnection(address.hostname or "", address.port)
    text = json.dumps({"model": "default", **body})
    client.request("POST", "/v1/chat/completions", text, {"Content-Type": "application/json"})
    until(lambda: site.asked)
    assert status(topology)["items"] == 1
    client.close()
    # Before the encoder's own limit on a download.
    until(lambda: status(topology)["items"] == 0, seconds=5.0)


@pytest.mark.extended
def test_a_tokenizer_worker_that_receives_is_replaced(
    machine: Machine, photographs: Photographs
) -> None:
    messages = CASES[0](photographs)
    topology = machine.use("workers")
    role = "language@zmq_to_tokenizer"
    client = topology.client(role)

    first = tokenizer_workers(topology, role)
    assert len(first) == 2
    assert all(map(_folders, first)), "each has a receiver of its own"
    first[0].kill()

    def replaced() -> bool:
        others = set(tokenizer_workers(topology, role)) - set(first)
        return len(others) == 1 and all(map(_folders, others))

    until(replaced, START_TIMEOUT_S)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.generation(*messages, tokens=TOKENS), range(16)))
    expected = machine.reference(topology.model, messages, TOKENS)
    for answer in answers:
        answer.check(expected)
    # It went when the next one made its own.
    assert not _folders(first[0])


def _folders(process: psutil.Process) -> list[str]:
    """That a process receives in; SGLang has its tokenizer workers log nothing of this."""
    return glob.glob(f"{tempfile.gettempdir()}/sglang-epd-{os.getuid()}-{process.pid}-*")
