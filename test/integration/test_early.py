"""A prompt's beginning is prefilled while its last picture is still on its way, and nothing of
the answer shows it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import requests

from integration.client import Client, Generation, until, user
from integration.late import Late
from integration.listener import Site
from integration.topology import EARLY, Machine, Topology

TOKENS = 8
# Behind these servers a request's first token comes from the prefill.
ENTRIES = {"language": "language", "router": "prefill"}


@pytest.fixture(params=ENTRIES)
def entry(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def in_background(client: Client, late: Late) -> tuple[ThreadPoolExecutor, Future[Generation]]:
    pool = ThreadPoolExecutor(1)
    return pool, pool.submit(client.generation, *late.messages, tokens=TOKENS)


def test_the_answer_is_one_servers(
    machine: Machine, qwen2_5: Topology, site: Site, entry: str, asked: list[dict[str, Any]]
) -> None:
    expected = machine.reference(qwen2_5.model, asked, TOKENS)
    late = Late(qwen2_5.urls[ENTRIES[entry]], site, asked)
    pool, answer = in_background(qwen2_5.client(entry), late)
    with pool:
        late.wait()
        assert not answer.done()
        site.released.set()
        answer.result().check(expected)
    assert late.counted("failed") == 0
    assert late.tokens < expected.prompt_tokens
    assert "early-" not in qwen2_5.log(ENTRIES[entry])


def cached_tokens(client: Client, messages: list[dict[str, Any]]) -> int:
    """What an answer says that the prefix cache had."""
    usage = client.chat(*messages, max_tokens=1).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_what_was_prefilled_early_is_not_told_as_cached(
    qwen2_5: Topology, site: Site, asked: list[dict[str, Any]]
) -> None:
    late = Late(qwen2_5.urls["language"], site, asked)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(cached_tokens, qwen2_5.client(), late.messages)
        late.wait()
        site.released.set()
        assert told.result() < 48 <= late.done
    assert cached_tokens(qwen2_5.client(), late.messages) > late.done, "another time they are"


def test_a_late_picture_that_fails_fails_the_request_alone(
    machine: Machine, qwen2_5: Topology, site: Site, entry: str, asked: list[dict[str, Any]]
) -> None:
    late = Late(qwen2_5.urls[ENTRIES[entry]], site, asked)
    site.files.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(qwen2_5.client(entry).chat, *late.messages)
        late.wait()
        site.released.set()
        assert answer.result().status_code == 400
    # What was prefilled is a prefix like any other.
    machine.check(qwen2_5.client(entry), qwen2_5.model, asked, TOKENS)
    until(late.gave_back, 10.0, "its items are held")


def test_a_prefill_server_refuses_a_request_that_no_decode_server_waits_for(
    machine: Machine, qwen2_5: Topology, asked: list[dict[str, Any]]
) -> None:
    refused = qwen2_5.client("prefill").chat(*asked)
    assert refused.status_code == 400, refused.text
    assert "without bootstrap room id" in refused.text
    machine.check(qwen2_5.client("router"), qwen2_5.model, asked, TOKENS)


def test_an_aborted_request_leaves_nothing(
    machine: Machine, qwen2_5: Topology, site: Site, asked: list[dict[str, Any]]
) -> None:
    late = Late(qwen2_5.urls["language"], site, asked)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(qwen2_5.client().chat, *late.messages, rid="an early one")
        late.wait()
        (load,) = requests.get(f"{late.url}/v1/loads", timeout=20).json()["loads"]
        assert load["num_waiting_reqs"] == 1, "routers do not see it"
        requests.post(f"{late.url}/abort_request", json={"rid": "an early one"}, timeout=20)
        assert answer.result().status_code >= 400
    site.released.set()
    until(late.gave_back, 10.0, "its items are held")
    machine.check(qwen2_5.client(), qwen2_5.model, asked, TOKENS)


@pytest.mark.extended
@pytest.mark.parametrize("ranks", ["--tp 2", "--tp 2 --pp-size 2"])
def test_on_several_ranks_with_pages_and_memory_for_one_request(
    machine: Machine, site: Site, asked: list[dict[str, Any]], ranks: str
) -> None:
    """Parts of one request and another request fight for the KV cache; none waits for ever."""
    flags = f"{ranks} --page-size 16 --max-total-tokens 512 --enable-metrics"
    wanted = Topology("tiny-qwen2_5-vl", ("encoder", "language"), EARLY, {"language": flags})
    expected = machine.reference(wanted.model, asked, TOKENS)
    with machine.lend(wanted) as topology:
        late = Late(topology.urls["language"], site, asked)
        pool, answer = in_background(topology.client(), late)
        with pool:
            late.wait()
            # What was prefilled has to make room for it.
            other = [user(*reversed(asked[0]["content"]))]
            assert topology.client().answer(*other, max_tokens=200)
            site.released.set()
            answer.result().check(expected)
        topology.check_alive()
