from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.context import Context

from sglang_epd.seams import tracing
from sglang_epd.spans import OFF
from spans import is_part_of

STATE = SimpleNamespace(obj=SimpleNamespace(rid="r1"))


def language_server(**accounts: dict[str, int]) -> SimpleNamespace:
    return SimpleNamespace(
        mm_receiver=SimpleNamespace(frontend=SimpleNamespace(account=accounts.get))
    )


def test_a_span_says_where_media_came_from() -> None:
    attributes = {"gen_ai.usage.prompt_tokens": 7}
    manager = language_server(r1={"kv": 2, "encoder_cache": 1}, r2={"store": 1})
    tracing.add_sources(attributes, manager, STATE, "output", 0)
    assert attributes == {
        "gen_ai.usage.prompt_tokens": 7,
        "sglang.epd.media_sources.kv": 2,
        "sglang.epd.media_sources.encoder_cache": 1,
    }


@pytest.mark.parametrize("manager", [SimpleNamespace(), language_server(r2={"kv": 1})])
def test_other_requests_and_servers_have_nothing_to_say(manager: SimpleNamespace) -> None:
    attributes: dict[str, int] = {}
    tracing.add_sources(attributes, manager, STATE, "output", 0)
    assert not attributes


def traced(root: object, enabled: bool = True) -> SimpleNamespace:
    """A request as SGLang's processes have it."""
    context = SimpleNamespace(tracing_enable=enabled, root_span_context=root)
    return SimpleNamespace(time_stats=SimpleNamespace(trace_ctx=context))


def test_our_spans_are_parts_of_sglangs(recorded):
    sglangs = recorded.provider.get_tracer("SGLang").start_span("Req")
    request = traced(trace.set_span_in_context(sglangs))
    tracing.span_of(request).child("epd_assemble").end()
    tracing.span_of(request).child("epd_media").end()
    sglangs.end()
    for name in ("epd_assemble", "epd_media"):
        assert is_part_of(recorded.only(name), recorded.only("Req"))


@pytest.mark.parametrize(
    "request_",
    [
        SimpleNamespace(),
        SimpleNamespace(time_stats=None),
        traced(None),
        traced(Context(), enabled=False),
    ],
)
def test_who_is_not_traced_has_none(request_):
    assert tracing.span_of(request_) is OFF
    assert tracing.span_of(None) is OFF
    assert tracing.resume("") is OFF


def test_a_scheduler_continues_what_its_tokenizer_told(recorded):
    with recorded.root.child("epd_media") as span:
        tracing.resume(span.headers["traceparent"]).child("epd_wait_for_items").end()
    assert is_part_of(recorded.only("epd_wait_for_items"), recorded.only("epd_media"))


ROOM = 0x1234_5678_9ABC_DEF0


@pytest.fixture
def rooted(sglang, monkeypatch):
    """Begins SGLang's root span of a request, under our hooks; returns what it is named by."""
    from opentelemetry.sdk.trace import TracerProvider
    from sglang.srt.observability import trace as sglangs
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

    generator = sglangs.TraceCustomIdGenerator
    draw = generator.generate_trace_id
    monkeypatch.setattr(generator, "generate_trace_id", lambda self: tracing.trace_id(draw, self))
    provider = TracerProvider(id_generator=generator(), shutdown_on_exit=False)
    monkeypatch.setattr(sglangs, "tracer", provider.get_tracer("SGLang"), raising=False)
    monkeypatch.setattr(sglangs, "opentelemetry_initialized", True)
    monkeypatch.setattr(sglangs, "threads_info", {})

    def begin(role: str, room: int | None, **headers: str) -> trace.SpanContext:
        stats = APIServerReqTimeStats()
        stats.trace_ctx = sglangs.TraceReqContext(
            "r1", room, role, module_name="request", external_trace_header=headers
        )
        tracing.begin_root(APIServerReqTimeStats.set_created_time, stats, 1.0)
        assert stats.created_time == 1.0
        return stats.trace_ctx.root_span.get_span_context()

    return begin


def test_a_prefill_and_a_decode_server_have_one_trace_of_a_request(rooted):
    prefill, decode = rooted("prefill", ROOM), rooted("decode", ROOM)
    assert prefill.trace_id == decode.trace_id
    assert prefill.span_id != decode.span_id
    assert rooted("decode", ROOM + 1).trace_id != decode.trace_id


def test_a_clients_trace_goes_on_in_both(rooted):
    theirs = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    for role in ("prefill", "decode"):
        assert rooted(role, ROOM, **theirs).trace_id == int("1" * 32, 16)
    # And is not taken for the next one's.
    assert rooted("decode", None).trace_id not in (0, rooted("decode", ROOM).trace_id)


@pytest.mark.parametrize(("role", "room"), [("unified", ROOM), ("prefill", None), ("decode", 0)])
def test_who_shares_a_request_with_nobody_has_a_trace_of_its_own(rooted, role, room):
    assert rooted(role, room).trace_id != rooted(role, room).trace_id


def test_the_asynchronous_exporter_is_told_the_same(rooted):
    context = SimpleNamespace(
        tracing_enable=True,
        _init_args={"role": "decode", "bootstrap_room": ROOM, "external_trace_header": None},
    )
    assert tracing._trace_of_room(context) == rooted("prefill", ROOM).trace_id


def test_without_tracing_a_request_is_as_it_was(sglang):
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

    stats = APIServerReqTimeStats()
    tracing.begin_root(APIServerReqTimeStats.set_created_time, stats, ts=2.0)
    assert stats.created_time == 2.0


def test_sglang_names_what_we_lean_on(sglang) -> None:
    """The root span's context, in the processes that have it and in those it is sent to."""
    from sglang.srt.observability import trace as sglangs
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

    assert APIServerReqTimeStats().trace_ctx.tracing_enable is False
    for cls in (sglangs.TraceReqContext.__init__, sglangs.TraceReqContext.__setstate__):
        assert "root_span_context" in inspect.getsource(cls)
    told = inspect.signature(sglangs.process_tracing_init).parameters
    assert list(told) == ["otlp_endpoint", "server_name", "trace_modules"]


def test_it_is_added_to_what_sglang_says(sglang, hooked) -> None:
    hooked("TokenizerManager.convert_to_span_attrs")
    manager = language_server(r1={"store": 3})
    manager.enable_trace, manager.served_model_name = True, "model"
    obj = SimpleNamespace(rid="r1", sampling_params={"temperature": 0.5})
    output = SimpleNamespace(
        completion_tokens=[2], prompt_tokens=[7], cached_tokens=[5], finished_reasons=[None]
    )
    convert = sglang("managers.tokenizer_manager").TokenizerManager.convert_to_span_attrs
    found = convert(manager, SimpleNamespace(obj=obj), output, 0)
    assert found["sglang.epd.media_sources.store"] == 3
    assert found["gen_ai.usage.prompt_tokens"] == 7
