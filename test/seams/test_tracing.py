from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_epd.seams import tracing

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


def test_it_is_added_to_what_sglang_says(sglang) -> None:
    """By SGLang's own registry, on SGLang's own method."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    cls = sglang("managers.tokenizer_manager").TokenizerManager
    original = cls.convert_to_span_attrs
    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager.convert_to_span_attrs"
    try:
        HookRegistry.register(target, tracing.add_sources, HookType.AFTER)
        HookRegistry.apply_hooks()
        manager = language_server(r1={"store": 3})
        manager.enable_trace, manager.served_model_name = True, "model"
        obj = SimpleNamespace(rid="r1", sampling_params={"temperature": 0.5})
        output = SimpleNamespace(
            completion_tokens=[2], prompt_tokens=[7], cached_tokens=[5], finished_reasons=[None]
        )
        found = cls.convert_to_span_attrs(manager, SimpleNamespace(obj=obj), output, 0)
    finally:
        cls.convert_to_span_attrs = original
        HookRegistry._hooks.pop(target, None)
        HookRegistry._patched.discard(target)
    assert found["sglang.epd.media_sources.store"] == 3
    assert found["gen_ai.usage.prompt_tokens"] == 7
