"""`--enable-pd-role-switch`: a prefill and a decode server take each other's place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from integration.client import (
    Client,
    Generation,
    about_a_crop,
    image_part,
    text_part,
    until,
    user,
)
from integration.counters import delivered
from integration.listener import Site
from integration.test_parity import five_of_mixed_sizes, one, two
from integration.topology import EARLY, Machine, Topology

pytestmark = pytest.mark.extended
Photographs = list[Image.Image]
Messages = list[dict[str, Any]]
MODEL = "tiny-qwen2_5-vl"
TOKENS = 8
ROLES = ("prefill", "decode")
# A server that came to decode with a prefix cache that is a prefill server's ends by SGLang's check
# of memory when a prompt comes twice: of text alone, and without this package, too.
SWITCH = "--enable-pd-role-switch --disaggregation-decode-enable-radix-cache"
rooms = itertools.count(1)


@pytest.fixture(scope="module")
def servers(machine: Machine) -> Iterator[Topology]:
    machine.colocated(MODEL)
    # Parts of prompts are not asked of a server that may come to decode.
    flags = {"prefill": SWITCH, "decode": SWITCH}
    with machine.lend(Topology(MODEL, ("encoder", *ROLES), EARLY, flags)) as topology:
        yield topology


class Pair:
    """A prefill and a decode server, asked as SGLang's router asks them."""

    def __init__(self, topology: Topology, prefill: str, decode: str) -> None:
        self._prefill, self._decode = topology.client(prefill), topology.client(decode)
        self._bootstrap = topology.ports[f"{prefill} bootstrap"]

    def chat(self, messages: Messages, **options: Any) -> list[Any]:
        """The answers of both."""
        place = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._bootstrap,
            "bootstrap_room": next(rooms),
        }
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(server.chat, *messages, **options, **place)
                for server in (self._prefill, self._decode)
            ]
            return [each.result() for each in asked]

    def generation(self, messages: Messages) -> Generation:
        told = {"max_tokens": TOKENS, "logprobs": True, "top_logprobs": 20}
        answers = self.chat(messages, **told)
        assert [each.status_code for each in answers] == [200, 200], [each.text for each in answers]
        return Generation.of(answers[1].json())


def switch(topology: Topology, **roles: str) -> None:
    """Give servers other roles; each has to be idle."""

    def done(server: Client, role: str) -> bool:
        # On a CPU there are no graphs of decode steps to be captured.
        body = {"new_role": role, "decode_cuda_graph_memory_gb": 0.0}
        answer = server.post("/pd_role_switch", body)
        assert answer.status_code == 200 or "idle" in answer.text, answer.text
        return answer.status_code == 200

    for name, role in roles.items():
        server = topology.client(name)
        until(lambda server=server, role=role: done(server, role))  # type: ignore[misc]


def check(machine: Machine, pair: Pair, messages: Messages) -> None:
    pair.generation(messages).check(machine.reference(MODEL, messages, TOKENS))


def test_pictures_before_and_after(
    machine: Machine, servers: Topology, photographs: Photographs, site: Site
) -> None:
    first, then = Pair(servers, "prefill", "decode"), Pair(servers, "decode", "prefill")
    cases = [case(photographs) for case in (one, two, five_of_mixed_sizes)]
    text = [user(text_part("No picture here."))]
    for messages in (*cases, text):
        check(machine, first, messages)

    switch(servers, prefill="decode", decode="prefill")
    before = delivered(servers)
    for messages in (*cases, text, [about_a_crop(photographs, 1)]):
        # Again, out of the prefix cache, if the new prefill server has one.
        for _ in range(2):
            check(machine, then, messages)
    assert delivered(servers) > before
    many = [[about_a_crop(photographs, 10 + number)] for number in range(6)]
    expected = [machine.reference(MODEL, messages, TOKENS) for messages in many]
    with ThreadPoolExecutor(6) as pool:
        for answer, theirs in zip(pool.map(then.generation, many), expected, strict=True):
            answer.check(theirs)
    for answer in then.chat([user(image_part(f"{site.url}/none.png"))]):
        assert 400 <= answer.status_code < 500, answer.text
        assert "image 1 of 1" in answer.text

    switch(servers, prefill="prefill", decode="decode")
    for messages in (*cases, text, [about_a_crop(photographs, 2)]):
        check(machine, first, messages)
    servers.check_alive()


def test_a_server_of_which_a_request_waits_for_its_picture_takes_no_other_role(
    machine: Machine, servers: Topology, photographs: Photographs, site: Site
) -> None:
    messages = [about_a_crop(photographs, 30)]
    expected = machine.reference(MODEL, messages, TOKENS)
    site.slow_s = 60.0
    pair, linked = Pair(servers, "prefill", "decode"), site.linked(messages)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.generation, linked)
        until(lambda: bool(site.asked))
        refused = servers.client("prefill").post("/pd_role_switch", {"new_role": "decode"})
        site.released.set()
        asked.result().check(expected)
    assert refused.status_code == 400, refused.text
    assert "requests wait for their media" in refused.text
