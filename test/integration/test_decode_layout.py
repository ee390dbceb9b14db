"""Encoder, prefill and decode: an image is read once, by the encoder, and the answer is
that of one server."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from integration.client import Client, data_url, image_part, text_part, until, user
from integration.counters import total
from integration.listener import Site
from integration.test_forms import IMAGE
from integration.test_parity import (
    TOKENS,
    Messages,
    Photographs,
    one,
    side_by_side,
    two,
    two_turns,
)
from integration.topology import Machine, Topology

LIMIT_S = 20.0


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def topology(machine: Machine, request: pytest.FixtureRequest) -> Topology:
    return machine.use(request.param)


@pytest.fixture
def router(topology: Topology) -> Client:
    return topology.client("router")


@pytest.fixture
def laid_out(topology: Topology) -> Callable[[str], float]:
    return _laid_out(topology)


def _laid_out(topology: Topology) -> Callable[[str], float]:
    """How many prompts the decode server has laid out in a way, since this was called."""

    def count(way: str) -> float:
        return total(topology.urls["decode"], "decode_prompts_total", layout=way)

    before = {way: count(way) for way in ("known", "own", "refused", "failed")}
    return lambda way: count(way) - before[way]


@pytest.mark.parametrize("case", [one, two, side_by_side, two_turns], ids=lambda one: one.__name__)
def test_an_image_is_downloaded_once_and_the_answer_is_one_servers(
    machine: Machine,
    topology: Topology,
    router: Client,
    site: Site,
    photographs: Photographs,
    laid_out: Callable[[str], float],
    case: Callable[[Photographs], Messages],
) -> None:
    expected = machine.reference(topology.model, case(photographs), TOKENS)
    router.generation(*site.linked(case(photographs)), tokens=TOKENS).check(expected)
    assert sorted(site.asked) == sorted(site.files)
    assert (laid_out("known"), laid_out("own"), laid_out("failed")) == (1, 0, 0)
    assert total(topology.urls["decode"], "decode_loop_lag_seconds_count"), "it is watched"


def test_an_image_named_twice_is_laid_out_twice(
    machine: Machine, topology: Topology, router: Client, site: Site, photographs: Photographs
) -> None:
    messages = side_by_side(photographs[:1] * 2)
    expected = machine.reference(topology.model, messages, TOKENS)
    router.generation(*site.linked(messages), tokens=TOKENS).check(expected)
    # Two items, for all that the language server knows; encoders share one answer between
    # those who wait for it.
    assert site.asked in ([*site.files], [*site.files] * 2)


def test_each_prompt_of_a_batch_has_its_own_layouts(
    machine: Machine,
    topology: Topology,
    router: Client,
    photographs: Photographs,
    laid_out: Callable[[str], float],
) -> None:
    body = {
        "text": [f"{IMAGE}What is it?", "No picture here.", f"{IMAGE}{IMAGE}And these?"],
        "image_data": [
            [data_url(photographs[0].resize((112, 112)))],
            None,
            [data_url(photo.resize((112, 224))) for photo in photographs],
        ],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0},
    }
    servers = (machine.colocated(topology.model), router)
    answers = [server.generate(**body) for server in servers]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    expected, actual = (
        [(part["text"], part["meta_info"]["prompt_tokens"]) for part in answer.json()]
        for answer in answers
    )
    assert actual == expected
    assert (laid_out("known"), laid_out("own")) == (2, 0)


def test_a_burst_is_answered_without_a_second_download(
    qwen2_5: Topology, site: Site, photographs: Photographs
) -> None:
    router, laid_out = qwen2_5.client("router"), _laid_out(qwen2_5)
    messages = [site.linked(case(photographs)) for case in (one, two)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda n: router.answer(*messages[n % 2]), range(16)))
    # Once an item at most: encoders share one answer between those who wait for it.
    asked = Counter(site.asked)
    first, second = site.files
    assert asked.keys() == site.files.keys()
    assert asked[first] <= 16
    assert asked[second] <= 8
    assert (laid_out("known"), laid_out("own")) == (16, 0)


def test_who_leaves_both_servers_is_waited_for_by_neither(
    qwen2_5: Topology, site: Site, photographs: Photographs
) -> None:
    """As a router does that gives a request up; the image would take longer than that."""
    router, laid_out = qwen2_5.client("router"), _laid_out(qwen2_5)
    site.slow_s = 60.0
    begin = time.monotonic()
    body = {
        "model": "default",
        "messages": site.linked(one(photographs)),
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": qwen2_5.ports["prefill bootstrap"],
        "bootstrap_room": 4711,
    }

    def ask_and_leave(role: str) -> None:
        # The decode server may hear that the prefill server was left, and answer before it is.
        with contextlib.suppress(requests.Timeout):
            requests.post(f"{qwen2_5.urls[role]}/v1/chat/completions", json=body, timeout=1)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask_and_leave, ("prefill", "decode")))
    until(lambda: laid_out("refused"), begin + 8 - time.monotonic(), "fetching itself has 10 s")
    site.slow_s = 0.0
    assert router.answer(*site.linked(one(photographs[1:])))
    qwen2_5.check_alive()


def test_what_the_prefill_refuses_before_it_begins_is_fetched_by_neither(
    qwen2_5: Topology, site: Site, photographs: Photographs
) -> None:
    """The decode server would take it, and SGLang's loader reads any address."""
    router, laid_out = qwen2_5.client("router"), _laid_out(qwen2_5)
    messages = site.linked(one(photographs))
    room = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": qwen2_5.ports["prefill bootstrap"],
        "bootstrap_room": 4712,
    }
    site.slow_s = 60.0
    with ThreadPoolExecutor(1) as pool:
        prefill = qwen2_5.client("prefill")
        first = pool.submit(prefill.leaves, *messages, after_s=5, rid="twice", **room)
        until(lambda: site.asked, 5, "the first asks for its picture")
        private = user(image_part(f"{site.url}/private.png"), text_part("What is this?"))
        response = router.chat(private, rid="twice")
        first.result()
    assert response.status_code == 400, response.text
    assert "Duplicate" in response.text
    assert site.asked == [*site.files]
    assert (laid_out("refused"), laid_out("own")) == (1, 0)
    site.slow_s = 0.0
    assert router.answer(*site.linked(one(photographs[1:])))
    qwen2_5.check_alive()


def test_without_its_prefill_a_request_ends_with_the_same_status_in_a_stream(
    qwen2_5: Topology, site: Site, photographs: Photographs, unused_tcp_port: int
) -> None:
    decode = qwen2_5.client("decode")
    (message,) = site.linked(one(photographs))
    room = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": unused_tcp_port,
        "bootstrap_room": 4713,
    }
    image = next(part for part in message["content"] if part["type"] == "image_url")
    body = {"text": f"{IMAGE}What is it?", "image_data": image["image_url"]["url"], **room}
    with ThreadPoolExecutor(4) as pool:
        chats = [pool.submit(decode.chat, message, stream=way, **room) for way in (True, False)]
        texts = [pool.submit(decode.generate, stream=way, **body) for way in (True, False)]
        chats, texts = ([one.result() for one in some] for some in (chats, texts))
    assert [answer.status_code for answer in (*chats, texts[1])] == [503] * 3
    assert '"code":503' in texts[0].text
    for answer in (*chats, *texts):
        assert "the request's prefill server does not answer" in answer.text
    assert not site.asked
    qwen2_5.check_alive()


@pytest.mark.parametrize(
    ("bad", "status", "reason", "stream"),
    [
        ("/missing.png", 400, "HTTP 404", False),
        ("file:///etc/hostname", 403, "local files", False),
        ("data:image/png;base64,", 400, "empty", True),
    ],
    ids=["404", "forbidden", "unreadable stream"],
)
def test_a_bad_image_ends_on_both_servers(
    qwen2_5: Topology,
    site: Site,
    photographs: Photographs,
    bad: str,
    status: int,
    reason: str,
    stream: bool,
) -> None:
    router = qwen2_5.client("router")
    (good,) = site.linked([user(image_part(data_url(photographs[0])))])[0]["content"]
    url = f"{site.url}{bad}" if bad.startswith("/") else bad
    begin = time.monotonic()

    response = router.chat(user(good, image_part(url), text_part("What is this?")), stream=stream)

    assert time.monotonic() - begin < LIMIT_S
    # The mini-lb answers a stream before its servers have.
    assert response.status_code == (200 if stream else status), response.text
    assert "image 2 of 2" in response.text
    assert reason in response.text
    assert Counter(site.asked)[next(iter(site.files))] <= 1
    assert router.answer(user(good, text_part("And this?")))
    qwen2_5.check_alive()
