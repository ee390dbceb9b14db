"""Who is told that a tokenizer manager has its parts, by what its server is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_epd.seams import decode, identities, parts


@pytest.mark.parametrize(
    ("language_only", "mode", "told"),
    [
        (False, "null", ["identities"]),
        (True, "null", ["identities", "receiver"]),
        (True, "prefill", ["identities", "receiver"]),
        (False, "prefill", ["identities"]),
        (False, "decode", ["identities", "decode"]),
    ],
)
def test_who_is_told(sglang, monkeypatch, language_only, mode, told):
    disagg = SimpleNamespace(language_only=language_only, disaggregation_mode=mode)
    context = sglang("runtime_context")
    monkeypatch.setattr(context, "get_disagg", lambda: disagg)
    seen = []
    manager = SimpleNamespace(
        mm_receiver=SimpleNamespace(attach=lambda _manager: seen.append("receiver"))
    )
    monkeypatch.setattr(identities, "set_up", lambda _manager: seen.append("identities"))
    monkeypatch.setattr(decode, "set_up", lambda _manager: seen.append("decode"))
    parts.made(None, manager, start_pd_bootstrap_service=True)
    assert seen == told
