from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from fastapi import HTTPException
from prometheus_client import CollectorRegistry

from sglang_epd import modality
from sglang_epd.errors import MediaError, UnavailableError
from sglang_epd.language.layout_exchange import authorization
from sglang_epd.observability.language import DecodeMetrics
from sglang_epd.seams import bootstrap
from sglang_epd.seams.decode import DecodePrompts
from sglang_epd.seams.requests import StreamError
from sglang_epd.wire.http import ItemLayout, LayoutReply, encode_body
from sglang_epd.wire.messages import Layout, TensorSpec

Modality = Enum("Modality", "IMAGE VIDEO AUDIO")
IMAGE = ItemLayout(b"k" * 32, Layout("IMAGE", TensorSpec("float32", (4, 8)), [[1, 4, 4]]))


@pytest.fixture(autouse=True)
def members(monkeypatch):
    """In place of SGLang's, which take seconds to import."""
    monkeypatch.setattr(modality.Modality, "sglang", property(lambda row: Modality[row.name]))


class Item(SimpleNamespace):
    def set_identity(self, identity):
        self.identity = identity


class Processor:
    """Lays out one image for each "I" of the prompt."""

    def get_validated_mm_data(self, prompt, embeddings, **metadata):
        grids, rows = metadata["img_grid_thw"], embeddings[Modality.IMAGE]
        if prompt.count("I") != len(grids):
            raise IndexError
        if "!" in prompt:
            raise AttributeError("a processor of another kind")
        pieces = rows.split([4] * len(grids))
        items = [Item(modality=Modality.IMAGE, precomputed_embeddings=piece) for piece in pieces]
        return SimpleNamespace(mm_items=items, input_ids=[1, 2])


class Request(SimpleNamespace):
    def __init__(self, **changes):
        values = {
            "rid": "rid",
            "image_data": ["http://images/1"],
            "video_data": None,
            "audio_data": None,
            "bootstrap_host": "prefill",
            "bootstrap_port": 8998,
            "bootstrap_room": 7,
            "stream": False,
        }
        super().__init__(**{**values, **changes})


class Prefill:
    def __init__(self):
        self.asked = []
        self.answer = [IMAGE]
        self.fails = None

    async def ask(self, *where):
        self.asked.append(where)
        if self.fails is not None:
            raise self.fails
        return self.answer


@pytest.fixture
def prefill():
    return Prefill()


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def process(prefill, registry):
    """Process a request as SGLang's tokenizer does; SGLang's own way answers "own"."""
    own = []

    async def original(**options):
        own.append(options)
        return "own"

    prompts = DecodePrompts(
        processor=Processor(),
        original=original,
        ask=prefill.ask,
        default_port=1234,
        context_tokens=64,
        metrics=DecodeMetrics(registry),
        live={},
    )

    async def process(request, prompt="I"):
        options = {
            "image_data": request.image_data,
            "audio_data": request.audio_data,
            "input_text": prompt,
            "request_obj": request,
            "max_req_input_len": 100,
        }
        output = await prompts.process(**options)
        assert own == ([options] if output == "own" else [])
        return output

    return process


@pytest.fixture
def counted(registry):
    def value(layout):
        name = "sglang:epd_decode_prompts_total"
        return registry.get_sample_value(name, {"layout": layout}) or 0

    return value


async def test_behind_a_prefill_that_tells_no_layouts_sglang_finds_them_out(
    process, prefill, counted
):
    prefill.answer = None
    assert await process(Request()) == "own"
    assert counted("own") == 1


@pytest.mark.parametrize("told", [[], [IMAGE, IMAGE]])
async def test_layouts_of_other_media_are_not_believed(process, prefill, counted, told):
    prefill.answer = told
    with pytest.raises(HTTPException, match="other media"):
        await process(Request())
    assert counted("failed") == 1


@pytest.mark.parametrize(
    "named", [{"bootstrap_host": None}, *({"bootstrap_room": room} for room in (None, -1, 1 << 64))]
)
async def test_media_without_a_prefill_are_fetched_by_nobody(process, prefill, named):
    with pytest.raises(HTTPException, match="name their prefill"):
        await process(Request(**named))
    assert not prefill.asked


@pytest.mark.parametrize(
    "images",
    [
        None,
        [{"format": "processor_output", "precomputed_embeddings": torch.ones(4, 8)}],
        [{"format": "processor_output", "pixel_values": torch.ones(16, 8)}],
    ],
)
async def test_a_request_without_media_to_encode_is_sglangs(process, prefill, images):
    assert await process(Request(image_data=images)) == "own"
    assert not prefill.asked


@pytest.mark.parametrize(
    "more",
    [{"format": "processor_output", "precomputed_embeddings": [[1.0]]}, "file:///etc/passwd"],
)
async def test_what_json_says_to_be_an_embedding_is_asked_about(process, prefill, more):
    made = {"format": "processor_output", "precomputed_embeddings": torch.ones(4, 8)}
    with pytest.raises(HTTPException):
        await process(Request(image_data=[made, more]), "II")
    assert prefill.asked


async def test_a_prompt_that_cannot_be_laid_out_is_refused(process, caplog):
    with pytest.raises(HTTPException) as refused:
        await process(Request(), prompt="I!")
    assert refused.value.status_code == 500
    assert "a processor of another kind" in caplog.text


async def test_a_prompt_that_does_not_match_its_media_is_refused(process, counted):
    with pytest.raises(HTTPException) as refused:
        await process(Request(), prompt="II")
    assert refused.value.status_code == 400
    assert "placeholders do not match" in refused.value.detail
    assert counted("refused") == 1


def bootstrap_server(sglang):
    """SGLang's, without its thread."""
    cls = sglang("disaggregation.common.conn").CommonKVBootstrapServer
    server = object.__new__(cls)
    server.app = web.Application()
    cls._setup_routes(server)
    return server


def paths(server):
    return {resource.canonical for resource in server.app.router.resources()}


@pytest.mark.parametrize(
    ("disagg", "workers", "served"),
    [
        ({"language_only": True}, 1, True),
        ({}, 1, False),
        ({"language_only": True, "enable_adaptive_dispatch_to_encoder": True}, 1, False),
        ({"language_only": True}, 2, False),
    ],
)
def test_only_a_prefill_with_encoders_serves_layouts(sglang, flags, disagg, workers, served):
    flags(disagg=disagg, serving={"tokenizer_worker_num": workers})
    server = bootstrap_server(sglang)
    bootstrap.serve_layouts(None, server)
    assert ("/epd/layouts/{room}" in paths(server)) == served
    assert {"/route", "/health"} <= paths(server)
    assert (bootstrap.board_of(server) is not None) == served


def test_a_language_server_that_also_decodes_has_no_board():
    assert bootstrap.board_of(None) is None


async def test_with_an_api_key_alone_strangers_learn_no_layouts(sglang, flags, monkeypatch):
    monkeypatch.delenv("SGLANG_EPD_TOKEN", raising=False)
    flags(disagg={"language_only": True}, serving={"api_key": "key"})
    server = bootstrap_server(sglang)
    bootstrap.serve_layouts(None, server)
    board = bootstrap.board_of(server)
    board.open(5, 60.0).failed(MediaError("of another user"))
    async with TestClient(TestServer(server.app)) as client:
        assert (await client.get("/epd/layouts/5")).status == 401
        headers = {"Authorization": authorization("key", 5)}
        assert (await client.get("/epd/layouts/5", headers=headers)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_what_no_context_holds_is_refused_before_it_is_laid_out(
    process, prefill, counted, monkeypatch, stream
):
    """A few kilobytes of a server that the request names claim hundreds of millions of tokens."""
    claim = ItemLayout(b"k" * 32, Layout("IMAGE", TensorSpec("float32", (1 << 22, 8)), [[1, 4, 4]]))
    prefill.answer = [claim] * 32
    assert len(encode_body(LayoutReply(prefill.answer))) < 4000
    monkeypatch.setattr(Processor, "get_validated_mm_data", None)
    expected = StreamError if stream else HTTPException
    with pytest.raises(expected, match="134217728 tokens") as refused:
        await process(Request(image_data=["a"] * 32, stream=stream), "I" * 32)
    assert stream or refused.value.status_code == 400
    assert counted("refused") == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", None])
async def test_a_failure_has_its_status_in_streams_too(process, prefill, monkeypatch, stream, path):
    http = path and SimpleNamespace(url=SimpleNamespace(path=path))
    monkeypatch.setattr("sglang_epd.seams.requests.client", lambda: http)
    prefill.fails = UnavailableError("no answer")
    event = stream and path != "/v1/chat/completions"
    with pytest.raises(StreamError if event else HTTPException, match="no answer") as refused:
        await process(Request(stream=stream))
    assert refused.value.status_code == 503
