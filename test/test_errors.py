from __future__ import annotations

import re

import pytest

from sglang_epd import errors
from sglang_epd.errors import ConfigError, EpdError, MediaError, from_code

ALL = errors._tree(EpdError)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_crosses_the_wire_by_its_code(kind):
    back = from_code(kind("what went wrong").code, "what went wrong")
    assert type(back) is kind
    assert (back.message, str(back)) == ("what went wrong", "what went wrong")


@pytest.mark.parametrize("code", ["", "AddedLaterError", "KeyError", "__init__"])
def test_an_unknown_code_is_a_plain_error(code):
    error = from_code(code, "x")
    assert type(error) is EpdError
    assert (error.status, error.retry_elsewhere) == (500, False)


def test_the_drawing_names_every_error_with_its_status():
    drawn = dict(re.findall(r"─ (\w+Error) +(\d{3})?", errors.__doc__))
    assert set(drawn) == {kind.__name__ for kind in ALL} - {"EpdError"}
    for kind in ALL:
        if drawn.get(kind.__name__):
            assert kind.status == int(drawn[kind.__name__]), kind


def test_what_the_media_did_wrong_is_never_tried_elsewhere():
    kinds = errors._tree(MediaError)
    assert len(kinds) == 4
    assert not any(kind.retry_elsewhere for kind in kinds)
    assert all(400 <= kind.status < 500 for kind in kinds)


def test_only_a_servers_fault_is_tried_elsewhere():
    assert {kind.__name__ for kind in ALL if kind.retry_elsewhere} == {
        "EncodeError",
        "EncoderLostError",
        "NamespaceError",
        "OverloadedError",
        "TokenError",
        "UnavailableError",
        "UnreachableError",
    }
    assert all(kind.status >= 500 for kind in ALL if kind.retry_elsewhere)


def test_a_wrong_setting_is_a_value_error_too():
    with pytest.raises(ValueError, match="x"):
        raise ConfigError("x")
