from __future__ import annotations

import asyncio
import contextvars
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers

from sglang_epd.errors import EncoderChoiceError
from sglang_epd.observability.language import HeaderMetrics
from sglang_epd.seams import headers
from sglang_epd.seams.headers import HEADER, EncoderHeader

MANAGER = SimpleNamespace(mm_receiver="ours")
URLS = ["http://10.0.0.1:30000", "http://10.0.0.2:30000/", "https://Enc.example", "http://[::1]:5"]


@pytest.fixture
def metrics():
    return HeaderMetrics(CollectorRegistry())


@pytest.fixture
def choose(metrics):
    """What a request that has these headers may use."""
    header = EncoderHeader(lambda: URLS, metrics)

    def run(*values: str):
        raw = [(HEADER.encode(), value.encode("latin-1")) for value in values]
        request = SimpleNamespace(headers=Headers(raw=raw))
        context = contextvars.copy_context()
        context.run(headers.note, lambda *_: None, MANAGER, None, request)
        return context.run(header.chosen_encoders)

    return run


def unknown(metrics) -> float:
    return metrics.unknown_encoders._value.get()


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("10.0.0.1:30000", [0]),
        (" 10.0.0.2:30000 ,10.0.0.1:30000", [0, 1]),
        ("10.0.0.1:30000,10.0.0.1:30000", [0]),
        ("ENC.example:443", [2]),
        ("https://enc.example", [2]),
        ("[::1]:5", [3]),
    ],
)
def test_known_encoders_are_chosen_by_host_and_port(choose, metrics, value, chosen):
    assert choose(value) == tuple(URLS[index] for index in chosen)
    assert unknown(metrics) == 0


def test_several_headers_are_one_list(choose):
    assert choose("10.0.0.1:30000", "10.0.0.2:30000") == tuple(URLS[:2])


@pytest.mark.parametrize("values", [(), ("",), (" , ,",)])
def test_a_request_that_names_none_may_use_all(choose, values):
    assert choose(*values) is None


def test_unknown_encoders_are_ignored_and_counted(choose, metrics, caplog):
    for _ in range(2):
        assert choose("10.0.0.9:1, 10.0.0.1:30000, 10.0.0.1:30001") == (URLS[0],)
    assert unknown(metrics) == 4
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "value",
    [
        "10.0.0.9:30000",
        "10.0.0.1",  # a port is part of it
        "10.0.0.1:99999999",
        "10.0.0.1:-1",
        "10.0.0.1:thirty",
        "[::1:5",
        "user@10.0.0.1:30000",
        "10.0.0.1:30000@10.0.0.3:30000",
        "\xff\xfe",
        "a" * 60_000,
    ],
)
def test_a_request_that_names_no_known_one_is_at_fault(choose, value):
    with pytest.raises(EncoderChoiceError, match=HEADER) as raised:
        choose(value)
    assert raised.value.status == 400
    assert isinstance(raised.value, ValueError)  # which SGLang answers with 400
    assert value not in str(raised.value)


def test_a_list_without_an_end_is_cut(choose, metrics):
    assert choose("10.0.0.1:30000," + "x:1," * 100_000) == (URLS[0],)
    many = ",".join(f"h{index}:1" for index in range(1000))
    with pytest.raises(EncoderChoiceError):
        choose(f"{many},10.0.0.1:30000")
    assert unknown(metrics) < 1000


def test_without_a_request_there_is_no_choice(metrics):
    header = EncoderHeader(lambda: URLS, metrics)
    assert contextvars.Context().run(header.chosen_encoders) is None


@pytest.mark.parametrize("manager", [SimpleNamespace(), SimpleNamespace(mm_receiver=None)])
def test_a_server_without_a_receiver_of_ours_notes_nothing(manager):
    context = contextvars.Context()
    seen = []
    context.run(headers.note, lambda *args: seen.append(args), manager, "obj", "request")
    assert seen == [(manager, "obj", "request")]
    assert context.run(headers.current_request) is None


def test_without_the_setting_nobody_looks():
    assert headers.chooser(False, lambda: URLS)() is None


async def test_requests_side_by_side_have_each_their_own(metrics):
    """As a server serves them: a task each, and tasks of tasks."""
    header = EncoderHeader(lambda: URLS, metrics)

    async def serve(url: str | None) -> object:
        if url is not None:
            raw = [(HEADER.encode(), url.encode())]
            request = SimpleNamespace(headers=Headers(raw=raw))
            headers.note(lambda *_: None, MANAGER, None, request)
            # The copies that SGLang makes of a sampled request come without it.
            headers.note(lambda *_: None, MANAGER, None, None)
        await asyncio.sleep(0)
        return await asyncio.create_task(asyncio.to_thread(header.chosen_encoders))

    tasks = [serve("10.0.0.1:30000"), serve(None), serve("10.0.0.2:30000")]
    assert await asyncio.gather(*tasks) == [(URLS[0],), None, (URLS[1],)]
