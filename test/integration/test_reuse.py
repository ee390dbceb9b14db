"""No image is encoded or sent twice, and the answers are one server's all the same."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from integration.client import TOLERANCE, Client, data_url, image_part, text_part, until, user
from integration.counters import answered, counted, delivered, samples, total
from integration.listener import Site
from integration.test_forms import IMAGE
from integration.test_parity import Messages, Photographs
from integration.topology import Machine, Topology

TOKENS = 8
# An answer that says where its pictures came from: the encoder's word on it is there first.
LONG = {"max_new_tokens": 128, "temperature": 0, "ignore_eos": True}
_TURNS = 6
_MODEL = "tiny-qwen2_5-vl"
# KV and language cache; KV alone, paged, in chunks and scarce; KV that is always lost
# between the match and the prefill.
TOPOLOGY_OF = {"language": "reuse", "language@kv": "reuse", "language@miss": "reuse_missed"}
KEEPING = ["language", "language@kv"]
SERVERS = [*KEEPING, pytest.param("language@miss", marks=pytest.mark.extended)]


def pictures(photos: Photographs, count: int, turn: int = 0) -> Messages:
    return [
        image_part(data_url(photos[index % 2].rotate(3 * index + 11 * turn)))
        for index in range(count)
    ]


def conversation(photos: Photographs, turns: int, look: int = 0) -> Messages:
    """Four pictures in the first turn, talked about ever after."""
    messages = [user(*pictures(photos, 4, look), text_part("What do these have in common?"))]
    for turn in range(1, turns):
        messages.append({"role": "assistant", "content": f"Something, {turn} times over."})
        messages.append(user(text_part(f"And what sets number {turn % 4 + 1} apart?")))
    return messages


@pytest.fixture(scope="module")
def expected(machine: Machine) -> Callable[[Messages], Any]:
    return lambda messages: machine.reference(_MODEL, messages, TOKENS)


def swapped(photos: Photographs, which: int) -> Messages:
    """Two conversations that differ in the pixels of one picture only."""
    return [user(image_part(data_url(photos[which].rotate(40))), text_part("Which one is it?"))]


@dataclass
class Server:
    """One of the language servers, and what it is compared with."""

    topology: Topology
    role: str
    expected: Callable[[Messages], Any]

    @property
    def client(self) -> Client:
        return self.topology.client(self.role)

    def gap(self, messages: Messages) -> float:
        """How far its log-probabilities are from one server's."""
        actual = self.client.generation(*messages, tokens=TOKENS)
        return actual.distance(self.expected(messages))

    def check(self, messages: Messages, sent: Messages | None = None) -> None:
        """It answers what it is sent, the same messages or their like, as one server does."""
        expected = self.expected(messages)
        self.client.generation(*(sent or messages), tokens=TOKENS).check(expected)

    @property
    def asked(self) -> int:
        """Requests that the encoder has answered, and the language server has heard of: its own
        answer may be faster than the encoder's last word."""
        return answered(self.topology)

    @property
    def moved(self) -> float:
        """Bytes of embeddings that it has received."""
        return total(self.client.url, "receiver_received_bytes_total")

    def flush(self) -> None:
        """Forget the KV, as soon as what clients have left behind has ended."""
        until(self.client.flush)


@pytest.fixture(scope="module", params=SERVERS)
def server(
    machine: Machine, expected: Callable[[Messages], Any], request: pytest.FixtureRequest
) -> Server:
    return Server(machine.use(TOPOLOGY_OF[request.param]), request.param, expected)


def cached_tokens(client: Client, messages: Messages, **options: Any) -> int:
    body = client.chat(*messages, max_tokens=4, **options).json()
    details = body["usage"]["prompt_tokens_details"]
    return 0 if details is None else int(details["cached_tokens"])


def test_a_prefill_server_sends_what_it_has_to_its_decode_server(
    machine: Machine, photographs: Photographs, expected: Callable[[Messages], Any]
) -> None:
    """Of all the servers that know the answers it is the first to be asked."""
    server = Server(machine.use("qwen2_5"), "router", expected)
    for turns in (1, 2, 3):
        server.check(conversation(photographs, turns))
    log = server.topology.log("prefill")
    by_encoders = re.findall(r"Delivered 4 items of \w+ in \S+ ms, (\d) by encoders", log)
    # The first picture may be one of another test's.
    assert by_encoders[-3] in "34"
    assert by_encoders[-2:] == ["0", "0"]


def test_a_language_server_that_was_restarted_finds_all_in_the_encoders_cache(
    machine: Machine, photographs: Photographs, expected: Callable[[Messages], Any]
) -> None:
    server = Server(machine.use("qwen2_5"), "language", expected)
    url, client = server.topology.urls["encoder"], server.client
    client.answer(*conversation(photographs, 1))
    before = work(url)
    server.topology.restart("language")
    for turns, source in ((2, "encoder_cache"), (3, "kv")):
        server.check(conversation(photographs, turns))
        # Four pictures a turn, which the server that has just started counts; its answer may be
        # faster than the last word on them.
        until(lambda one=source: counted(client.url, "dispatch_items_total", "source")[one] == 4)
    body = {"text": f"{IMAGE}What is it?", "image_data": [data_url(photographs[0].rotate(0))]}
    answer = client.generate(**body, sampling_params=LONG).json()
    assert answer["meta_info"]["media_sources"] == {"encoder_cache": 1}
    after = work(url)
    # An item whose payload was late is asked for again, and found again.
    assert after.pop("cached") >= before.pop("cached", 0.0) + 5
    assert after == before


def work(url: str) -> dict[str, float]:
    """What became of the items that an encoder was asked for, and the seconds of its tower."""
    seconds = total(url, "encoder_busy_seconds_total")
    return {**counted(url, "encoder_lookups_total", "source"), "tower": seconds}


def test_a_conversation_asks_encoders_in_its_first_turn_only(
    server: Server, photographs: Photographs
) -> None:
    before: tuple[int, float] = (0, 0.0)
    for turns in range(1, _TURNS + 1):
        server.check(conversation(photographs, turns))
        state = server.asked, server.moved
        if turns == 1:
            assert state[1] > 0
        elif server.role != "language@miss":
            assert state == before, f"turn {turns} asked an encoder, or moved bytes"
        else:
            assert state[0] > before[0], "its match was lost, so the items had to be fetched"
        before = state


def test_pictures_behind_addresses_are_known_when_they_are_offered(
    server: Server, photographs: Photographs, site: Site
) -> None:
    """What they are is told by an encoder, each time; nothing is sent for it again."""
    messages = conversation(photographs, 2, look=3)
    before = 0.0
    for turn in range(3):
        server.check(messages, site.linked(messages))
        if turn and server.role != "language@miss":
            assert server.moved == before
        before = server.moved


def test_without_its_kv_a_server_has_the_embeddings_or_asks_again(
    server: Server, photographs: Photographs
) -> None:
    messages = conversation(photographs, 2, look=1)
    server.client.answer(*messages)
    before = server.asked, server.moved
    server.flush()
    server.check(messages)
    after = server.asked, server.moved
    if server.role == "language":
        assert after == before
    else:
        assert after[0] > before[0]
        assert after[1] > before[1]


def test_answers_stay_right_while_the_kv_cache_is_fought_over(
    server: Server, photographs: Photographs
) -> None:
    """The pool of one of these servers holds two such conversations."""
    conversations = [conversation(photographs, 2, look) for look in range(1, 7)]

    def chatter(number: int) -> str:
        words = " ".join(str(number * 1000 + word) for word in range(200))
        return server.client.answer(user(text_part(words)), max_tokens=32)

    with ThreadPoolExecutor(12) as pool:
        noise = [pool.submit(chatter, number) for number in range(6)]
        assert max(pool.map(server.gap, conversations * 2)) < TOLERANCE
        for one in noise:
            one.result()
    server.topology.check_alive()


def test_a_long_prompt_has_the_memory_that_requests_lock_which_wait(
    machine: Machine, photographs: Photographs
) -> None:
    """SGLang counts on it when it begins the prompt, and ends where a chunk finds none."""
    client = machine.use("reuse").client("language@kv")

    def said(name: str, words: int) -> Any:
        return text_part(" ".join(f"{name}{word % 97}" for word in range(words)))

    def ask(*parts: Any) -> dict[str, Any]:
        answer = client.chat(user(*parts), max_tokens=1)
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    shown = pictures([photo.resize((224, 224)) for photo in photographs], 6, turn=5)
    begun = [(shown[index], said(f"c0x{index}", 150)) for index in range(3)]
    # Their layouts are known then, and their embeddings are nowhere.
    for picture in shown[3:]:
        ask(picture)
    for parts in begun:
        ask(*parts)
    with ThreadPoolExecutor(4) as pool:
        long = pool.submit(ask, said("L0y", 680))
        time.sleep(0.15)  # some of its chunks have run
        more = zip(begun, shown[3:], strict=True)
        waiting = [pool.submit(ask, *parts, picture) for parts, picture in more]
        assert long.result()["prompt_tokens"] > 3900
        for one in waiting:
            one.result()


def test_many_ask_about_one_picture_at_once(server: Server, photographs: Photographs) -> None:
    messages = [user(*pictures(photographs, 1, 20), text_part("What is it?"))]
    for _ in range(2):
        with ThreadPoolExecutor(24) as pool:
            assert max(pool.map(server.gap, [messages] * 24)) < TOLERANCE
        server.flush()
    samples = server.client.chat(*messages, n=3).json()["choices"]
    assert len({sample["message"]["content"] for sample in samples}) == 1


@pytest.mark.parametrize("server", KEEPING, indirect=True)
def test_salts_share_neither_kv_nor_embeddings(server: Server, photographs: Photographs) -> None:
    client = server.client
    messages = [user(*pictures(photographs, 1, 21), text_part("What is it?"))]
    length = server.expected(messages).prompt_tokens
    assert cached_tokens(client, messages, cache_salt="one") == 0
    assert cached_tokens(client, messages, cache_salt="two") == 0
    before = server.asked
    assert cached_tokens(client, messages, cache_salt="one") > length // 2
    assert server.asked == before
    # What comes before the picture is the same in every prompt.
    assert cached_tokens(client, messages) < length // 10
    assert server.asked == before + 1
    salted = client.answer(*messages, cache_salt="two")
    assert salted == client.answer(*messages)
    server.check(messages)


@pytest.mark.parametrize("server", KEEPING, indirect=True)
def test_an_answer_does_not_tell_what_another_tenant_has_sent(
    server: Server, photographs: Photographs
) -> None:
    body = {
        "text": f"{IMAGE} Look at it for a while, and then say what there is to be seen.",
        "image_data": [data_url(photographs[0].rotate(17))],
        "sampling_params": LONG,
        "return_logprob": True,
    }

    def ask(**salts: str) -> tuple[dict[str, int], list[float]]:
        told = server.client.generate(**body, **salts).json()["meta_info"]
        return told["media_sources"], [one[0] for one in told["output_token_logprobs"][:TOKENS]]

    def known(**salts: str) -> list[float]:
        """Asked until it is known that it was here."""

        def again() -> list[float] | None:
            sources, logprobs = ask(**salts)
            return None if "computed" in sources else logprobs

        return until(again)

    first = ask()[1]
    known()
    for salts in ({"extra_key": "b"}, {"cache_salt": "b"}, {"extra_key": "c"}):
        sources, logprobs = ask(**salts)
        assert sources == {"computed": 1}
        assert logprobs == pytest.approx(first, abs=TOLERANCE)
        assert known(**salts) == pytest.approx(first, abs=TOLERANCE)


def test_another_picture_of_the_same_layout_is_another_picture(
    server: Server, photographs: Photographs
) -> None:
    for which in (0, 1, 0, 1):
        server.check(swapped(photographs, which))
    first, second = (server.expected(swapped(photographs, which)) for which in (0, 1))
    assert first.prompt_tokens == second.prompt_tokens
    assert first.top != second.top


def test_clients_that_leave_take_nothing_along(server: Server, photographs: Photographs) -> None:
    messages = conversation(photographs, 2, look=2)
    # More than can be said in the time that the most patient of them has.
    for after_s in (0.02, 0.05, 0.1, 0.2, 0.4):
        server.flush()
        server.client.leaves(*messages, after_s=after_s, max_tokens=512, ignore_eos=True)
    server.check(messages)
    server.topology.check_alive()


@pytest.mark.parametrize("server", KEEPING, indirect=True)
def test_answers_say_where_their_pictures_came_from(
    server: Server, photographs: Photographs
) -> None:
    first, second = (data_url(photo.rotate(-7)) for photo in photographs)
    # More than a page of text after a picture: pages are cached whole.
    text = " Look at it for a while, and then say in a few words what there is to be seen."
    one = {"text": f"{IMAGE}{text}", "image_data": [first]}
    both = {"text": f"{IMAGE}{text}{IMAGE}{text}", "image_data": [first, second]}

    def sources(body: dict[str, Any]) -> dict[str, int]:
        answer = server.client.generate(**body, sampling_params=LONG).json()
        return dict(answer["meta_info"]["media_sources"])

    def soon(body: dict[str, Any], wanted: dict[str, int]) -> None:
        """An answer may be faster than the encoder's word on the layout."""
        until(lambda: sources(body) == wanted)

    assert sources(one) == {"computed": 1}
    soon(one, {"kv": 1})
    server.flush()
    # Where none is kept, one may still be held by the request before.
    without_kv = "language_cache" if server.role == "language" else "computed"
    assert sources(one) in ({without_kv: 1}, {"language_cache": 1})
    assert sources(both)["computed"] >= 1
    soon(both, {"kv": 2})
    if server.role == "language":
        counts = counted(server.client.url, "dispatch_items_total", "source")
        assert counts.keys() >= {"kv", "language_cache", "computed"}


@pytest.mark.parametrize("server", ["language"], indirect=True)
def test_a_request_is_taken_for_no_other_one_whatever_its_user_names(
    server: Server, photographs: Photographs
) -> None:
    """`http_worker_ipc` is a field for users, too: with another's id one could read like both."""
    first, second = (data_url(photo.rotate(-13)) for photo in photographs)
    asked = {"sampling_params": {"max_new_tokens": 4, "temperature": 0}}

    def one(number: int) -> dict[str, Any]:
        return {"text": f"{number} at {IMAGE}", "image_data": [first], **asked}

    def both(number: int) -> dict[str, Any]:
        return {"text": f"{number} {IMAGE} {IMAGE}", "image_data": [first, second], **asked}

    def tokens(body: dict[str, Any], **names: str) -> int:
        """Of its prompt, its pictures' among them."""
        answer = server.client.generate(**body, **names)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["meta_info"]["prompt_tokens"])

    rounds = range(20)
    alone = [(tokens(one(number)), tokens(both(number))) for number in rounds]
    server.flush()
    with ThreadPoolExecutor(3) as pool:
        for number in rounds:
            # What keeps the scheduler busy, so that it meets both at a time.
            busy = pool.submit(tokens, {"text": f"{number} " * 200, **asked})
            plain = pool.submit(tokens, one(number), rid=f"{number} of W")
            named = pool.submit(tokens, both(number), rid=f"{number}", http_worker_ipc="W")
            assert (plain.result(), named.result()) == alone[number]
            busy.result()
    server.topology.check_alive()


@pytest.mark.extended
def test_kv_comes_back_from_the_host(
    machine: Machine, photographs: Photographs, expected: Callable[[Messages], Any]
) -> None:
    """The device has room for two of the prompts. Pictures are encoded again all the same."""
    small = "--enable-hierarchical-cache --hicache-ratio 4 --max-total-tokens 1500 --enable-metrics"
    topology = Topology(
        _MODEL,
        ("encoder", "language"),
        {"SGLANG_EPD_EMBEDDING_CACHE_MB": "0"},
        {"language": small},
    )
    questions = [
        [user(*pictures(photographs, 2, turn), text_part(f"What is number {turn}?"))]
        for turn in range(6)
    ]
    with machine.lend(topology):
        for messages in (*questions, *questions):
            topology.client().generation(*messages, tokens=TOKENS).check(expected(messages))
        cached = dict.fromkeys(("host", "device"), 0.0)
        for labels, tokens in samples(topology.urls["language"], "cached_tokens_total", "sglang:"):
            cached[labels["cache_source"]] += tokens
        assert cached["host"] > 100
        assert delivered(topology) > 2 * len(questions)
