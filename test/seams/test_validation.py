from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import SchemaValidator

from sglang_epd.seams.large_bodies import stop_at_the_first_error

PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}
TEXT = {"type": "text", "text": "x"}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "list"}}}
BODIES = {
    "/v1/chat/completions": [
        chat(PICTURE, TEXT),
        chat(TEXT, tools=[TOOL], stop=["a"], logit_bias={"1": 2.0}, temperature=0.5),
        {"model": "m", "messages": [{"role": "system", "content": "x"}]},
    ],
    "/v1/messages": [chat(TEXT, max_tokens=1)],
    "/v1/responses": [{"model": "m", "input": "x"}, {"model": "m", "input": [{"role": "user"}]}],
    "/generate": [
        {"text": ["a", "b"], "image_data": [["u"], None], "sampling_params": {"n": 2}},
        {"input_ids": [[1, 2], [3]], "stream": True},
    ],
}
ADAPTERS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate")


@pytest.fixture
def adapters(sglang) -> Iterator[dict[str, Any]]:
    """Of the routes of SGLang's server, by path; afterwards they are as they were."""
    routes = [one for one in sglang("entrypoints.http_server").app.routes if hasattr(one, "path")]
    fields = {one.path: one.body_field for one in routes if getattr(one, "body_field", None)}
    adapters = {path: field._type_adapter for path, field in fields.items()}
    as_they_were(adapters)
    yield adapters
    as_they_were(adapters)


def as_they_were(adapters: dict[str, Any]) -> None:
    for adapter in adapters.values():
        adapter.validator = SchemaValidator(adapter.core_schema)


def errors(adapter: Any, body: Any) -> list[Any]:
    with pytest.raises(ValidationError) as refused:
        adapter.validate_python(body)
    return refused.value.errors(include_url=False)


@pytest.mark.parametrize("part", [{}, 1, {"type": "x"}, {"type": "image_url"}], ids=str)
def test_a_list_of_bad_parts_has_the_errors_of_one(adapters, part):
    adapter = adapters["/v1/chat/completions"]
    one = errors(adapter, chat(part))
    assert len(errors(adapter, chat(*[part] * 100))) > 50 * len(one) / 2
    stop_at_the_first_error()
    assert len(errors(adapter, chat(*[part] * 100))) <= len(one)


def test_lists_of_the_responses_api_stop_too(adapters):
    before = len(errors(adapters["/v1/responses"], {"model": "m", "input": [1] * 100}))
    stop_at_the_first_error()
    assert len(errors(adapters["/v1/responses"], {"model": "m", "input": [1] * 100})) < before / 50


@pytest.mark.parametrize("path", ADAPTERS)
def test_good_bodies_are_read_as_before(adapters, path):
    bodies = BODIES[path]
    before = [adapters[path].validate_python(copy.deepcopy(body)) for body in bodies]
    stop_at_the_first_error()
    after = [adapters[path].validate_python(copy.deepcopy(body)) for body in bodies]
    # Ids are drawn for some requests.
    assert [_told(one) for one in after] == [_told(one) for one in before]


def _told(read: Any) -> dict[str, Any]:
    values = vars(read)
    return {name: value for name, value in values.items() if name not in ("rid", "request_id")}


def test_every_route_stops(adapters, caplog):
    before = {path: adapter.validator for path, adapter in adapters.items()}
    stop_at_the_first_error()
    assert not [path for path, adapter in adapters.items() if adapter.validator is before[path]]
    assert not caplog.records


def test_another_fastapi_is_told_and_served(adapters, caplog):
    adapters["/generate"].validator = object()
    stop_at_the_first_error()
    (record,) = caplog.records
    assert record.getMessage().startswith("Errors in bodies of /generate may be long answers")


def test_a_process_without_the_http_server_is_left_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.entrypoints.http_server", raising=False)
    stop_at_the_first_error()
    assert "sglang.srt.entrypoints.http_server" not in sys.modules
