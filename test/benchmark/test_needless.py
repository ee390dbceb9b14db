"""Needless encoding: what is sent, and that the page has what was counted."""

import needless
import pytest
import tokenizers

from make_checkpoint import ensure


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(f"{ensure(needless.CHECKPOINT)}/tokenizer.json")


def _pictures(name: str, tokenizer: tokenizers.Tokenizer) -> list[str]:
    talks = needless.sent(needless.workloads()[name], tokenizer)
    turns = [turn for talk in talks for turn in talk.turns]
    return [part["image_url"]["url"] for turn in turns for part in turn if "image_url" in part]


@pytest.mark.parametrize(("name", "again"), [("zipf", True), ("repeats", True), ("chat", False)])
def test_pictures_come_again_where_the_page_says_so(
    name: str, again: bool, tokenizer: tokenizers.Tokenizer
) -> None:
    urls = _pictures(name, tokenizer)
    assert (len(set(urls)) < len(urls)) == again


def test_the_same_pictures_stand_before_and_behind_the_text(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    def parts(name: str) -> list[str]:
        talks = needless.sent(needless.workloads()[name], tokenizer)
        return [part["type"] for part in talks[0].turns[0]]

    assert parts("zipf") == ["image_url", "text"]
    assert parts(needless.TEXT_FIRST) == ["text", "image_url"]


def test_one_in_many_with_pictures_is_sent_as_often_as_others(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    talks = needless.sent(needless.workloads()["interference"], tokenizer)
    assert sum(talk.kind == "media" for talk in talks) == needless.FEW


def test_shares_are_of_all_pictures() -> None:
    counted = needless.Counted("turns", 4, {"kv": 3, "computed": 1})
    row = dict(zip(needless.SHOWN, counted.row()[3:], strict=True))
    assert counted.row()[:3] == ["turns", "4", "4"]
    assert row.pop("kv") == "75%" and row.pop("computed") == "25%"
    assert set(row.values()) == {"0%"}


def test_the_page_has_all_that_was_counted() -> None:
    page = (needless.RESULTS / "needless_encoding.md").read_text()
    runs = needless.kept(needless.RESULTS / "needless_encoding.json")
    assert runs
    for one in runs.values():
        assert f"| {' | '.join(one.row())} |" in page
