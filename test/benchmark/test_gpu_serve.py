"""What the benchmark of one GPU says of log-probabilities, and the shapes that it serves."""

from __future__ import annotations

from typing import Any

import pytest
from gpu import serve_checkpoints
from gpu.serve_parity import ALONE, BATCHED, IN_TREE, OURS, WRONG, Gaps, differences, verdict

from integration.client import Generation


def generation(*gaps: float, tokens: str = "aaa", prompt_tokens: int = 9) -> Generation:
    """An answer whose two likeliest tokens are less likely by `gaps`."""
    top = [{"a": -1.0 - gap, "b": -2.0 - gap} for gap in gaps]
    return Generation(list(tokens[: len(gaps)]), top, prompt_tokens)


REFERENCE = generation(0.0, 0.0, 0.0)


def gaps(*apart: float, **different: Any) -> Gaps:
    found = Gaps()
    found.add(generation(*apart, **different), REFERENCE)
    return found


def good() -> dict[str, Gaps]:
    found = {name: gaps(0.0, 0.01, 0.02) for name in (ALONE, BATCHED, IN_TREE, *OURS)}
    return {**found, WRONG: gaps(1.0, 1.0, 1.0)}


def test_a_token_that_is_not_listed_counts_by_the_least_that_it_differs() -> None:
    assert differences({"a": -1.0, "b": -3.0}, {"a": -1.5, "c": -2.0}) == [0.5, 1.0]
    assert differences({"a": -1.0, "b": -3.0}, {"a": -1.0, "c": -4.0}) == [0.0, 0.0]


def test_nothing_is_compared_after_the_first_token_that_differs() -> None:
    assert gaps(0.0, 0.1, 5.0, tokens="aba").figures["max"] == pytest.approx(0.1)
    assert gaps(0.0, 0.1, 5.0).figures["max"] == pytest.approx(5.0)


def test_prompts_of_different_lengths_are_not_compared() -> None:
    found = gaps(0.0, prompt_tokens=8)
    assert found.failures and not found.all


def test_what_is_within_twice_the_yardstick_is_right() -> None:
    assert verdict(good(), "float32") == []
    assert verdict(good() | {OURS[1]: gaps(0.0, 0.019, 0.04)}, "float32") == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({OURS[1]: gaps(0.0, 0.02, 0.05)}, "max 0.0500, 0.0400 is allowed"),
        ({OURS[2]: gaps(0.03, 0.03, 0.03)}, "mean 0.0300, 0.0200 is allowed"),
        ({OURS[0]: Gaps(failures=["AssertionError: 503"])}, "503"),
        ({OURS[0]: gaps(0.0, prompt_tokens=8)}, "could be compared"),
        ({WRONG: gaps(0.05, 0.05, 0.05)}, "the comparison shows nothing"),
        ({WRONG: Gaps()}, "the comparison shows nothing"),
    ],
)
def test_what_is_not_right_is_said(changed: dict[str, Gaps], said: str) -> None:
    assert any(said in one for one in verdict(good() | changed, "float32"))


def test_an_arm_that_was_not_up_is_said() -> None:
    left = {name: one for name, one in good().items() if name != OURS[0]}
    assert any(OURS[0] in one for one in verdict(left, "bfloat16"))


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.767), ("7b", 8.292)])
def test_large_checkpoints_have_the_released_sizes(
    name: str, billions: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.initialization import no_init_weights

    from checkpoints.tokenizer import build_tokenizer

    family, spec = serve_checkpoints.CHECKPOINTS[name]
    monkeypatch.setattr(family, "device", "meta", raising=False)
    tokenizer = build_tokenizer(family.special_tokens, family.marks, family.named_tokens)
    with no_init_weights():
        model = family.model(spec, tokenizer)
    assert sum(one.numel() for one in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)
