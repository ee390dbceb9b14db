from __future__ import annotations

import importlib
import sys

import pytest

from sglang_epd.seams.hooks import hook

TARGET = """
def function(value):
    return [value]

class Class:
    def method(self, value):
        return [value]

    @staticmethod
    def static(value):
        return [value]
"""


@pytest.mark.parametrize(
    ("kind", "function", "result"),
    [
        ("replace", lambda value: ["mine", value], ["mine", 1]),
        ("after", lambda result, value: [*result, "after", value], [1, "after", 1]),
        ("around", lambda original, value: original(value + 1), [2]),
        ("before", lambda value: ((value + 2,), {}), [3]),
    ],
)
def test_a_function_is_hooked_when_its_module_is_imported(sglang, source, kind, function, result):
    name, user = f"hooked_{kind}", f"user_of_{kind}"
    source(**{name: TARGET, user: f"from {name} import function"})
    hook(name, "function", function, kind)
    assert name not in sys.modules
    imported_by_name = importlib.import_module(user).function
    assert importlib.import_module(name).function(1) == result
    assert imported_by_name(1) == result


def test_a_hook_on_a_method_gets_its_object(sglang, source):
    source(hooked_class=TARGET)

    def around(original, self, value):
        return [type(self).__name__, *original(self, value)]

    hook("hooked_class", "Class.method", around, "around")
    module = importlib.import_module("hooked_class")
    assert module.Class().method(1) == ["Class", 1]
    assert module.Class.static(1) == [1]


def test_a_hook_on_what_is_there_reaches_who_imported_it_by_name(sglang, source):
    source(hooked_there=TARGET, user_of_there="from hooked_there import function")
    user = importlib.import_module("user_of_there")
    hook("hooked_there", "function", lambda value: "mine", "replace")
    assert user.function(1) == "mine"
