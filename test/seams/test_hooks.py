from __future__ import annotations

import importlib
import multiprocessing
import sys

import pytest

from sglang_epd.errors import ConfigError
from sglang_epd.seams import contract, hooks
from sglang_epd.seams.hooks import Hook, install, misfit, require

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


@pytest.fixture(autouse=True)
def state(monkeypatch):
    """Of a process of its own, which is a launcher's child."""
    monkeypatch.setattr(hooks, "_state", hooks._State())
    monkeypatch.setattr(multiprocessing, "parent_process", object)


@pytest.fixture
def registry(sglang, monkeypatch):
    """SGLang's, as it is before plug-ins register."""
    registry = sglang("plugins.hook_registry")
    monkeypatch.setattr(registry.HookRegistry, "_hooks", type(registry.HookRegistry._hooks)(list))
    monkeypatch.setattr(registry.HookRegistry, "_patched", set())
    return registry


def around(original, value):
    return ["ours", *original(value)]


def theirs(original, value):
    return ["theirs", *original(value)]


@pytest.mark.parametrize(
    ("kind", "function", "result"),
    [
        ("replace", lambda value: ["mine", value], ["mine", 1]),
        ("after", lambda result, value: result.append(("after", value)), [1, ("after", 1)]),
        ("around", lambda original, value: original(value + 1), [2]),
    ],
)
def test_a_function_is_hooked_when_its_module_is_imported(source, kind, function, result):
    name, user = f"hooked_{kind}", f"user_of_{kind}"
    source(**{name: TARGET, user: f"from {name} import function"})
    install([Hook(name, "function", kind, function)])
    assert name not in sys.modules
    imported_by_name = importlib.import_module(user).function
    assert importlib.import_module(name).function(1) == result
    assert imported_by_name(1) == result
    require()


def test_a_hook_on_a_method_gets_its_object(source):
    source(hooked_class=TARGET)

    def around(original, self, value):
        return [type(self).__name__, *original(self, value)]

    install([Hook("hooked_class", "Class.method", "around", around)])
    module = importlib.import_module("hooked_class")
    assert module.Class().method(1) == ["Class", 1]
    assert module.Class.static(1) == [1]


def test_a_hook_on_what_is_there_reaches_who_imported_it_by_name(source):
    source(hooked_there=TARGET, user_of_there="from hooked_there import function")
    user = importlib.import_module("user_of_there")
    install([Hook("hooked_there", "function", "replace", lambda value: "mine")])
    assert user.function(1) == "mine"


@pytest.mark.parametrize("attribute", ["renamed", "Renamed.method", "Class.renamed"])
def test_a_target_that_is_gone_is_told_and_refused_where_hooks_are_required(
    source, caplog, attribute
):
    source(hooked_gone=TARGET)
    install([Hook("hooked_gone", attribute, "around", around)])
    importlib.import_module("hooked_gone")
    (told,) = [record for record in caplog.records if record.name == hooks.__name__]
    assert f"hooked_gone.{attribute}, which is hooked, is gone" in told.getMessage()
    with pytest.raises(ConfigError, match=f"hooked_gone.{attribute}, which is hooked, is gone"):
        require()


def test_where_hooks_are_required_the_import_of_a_module_that_lost_one_fails(source):
    source(hooked_later=TARGET)
    install([Hook("hooked_later", "renamed", "around", around)])
    require()
    # A second time, too: somebody may have caught the first.
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"hooked_later\.renamed"):
            importlib.import_module("hooked_later")


def test_a_module_that_was_being_imported_cannot_be_hooked(source, monkeypatch):
    source(hooked_halfway=TARGET)
    module = importlib.import_module("hooked_halfway")
    monkeypatch.setattr(module.__spec__, "_initializing", True, raising=False)
    finders = list(sys.meta_path)
    install([Hook("hooked_halfway", "function", "around", around)])
    monkeypatch.setattr(sys, "meta_path", finders)
    with pytest.raises(ConfigError, match=r"hooked_halfway\.function was being imported before"):
        require()


@pytest.mark.parametrize(
    ("kind", "function", "first", "result"),
    [
        ("AROUND", theirs, True, ["ours", "theirs", 1]),
        # As in `load_plugins`: what imports the module is the registry. Ours is applied once.
        ("AROUND", theirs, False, ["theirs", "ours", 1]),
        ("REPLACE", lambda value: ["theirs"], True, ["ours", "theirs"]),
        # It ends the server.
        ("REPLACE", lambda value: ["theirs"], False, ["theirs"]),
    ],
)
def test_another_plugin_has_the_same_target(registry, source, kind, function, first, result):
    name = f"hooked_{kind.lower()}_{first}"
    source(**{name: TARGET})

    def hook_theirs():
        token = registry._current_plugin_source.set(registry.HookSource("rival", "rival-dist"))
        registry.HookRegistry.register(f"{name}.function", function, registry.HookType[kind])
        registry._current_plugin_source.reset(token)
        registry.HookRegistry.apply_hooks()

    if first:
        hook_theirs()
    install([Hook(name, "function", "around", around)])
    require()
    if not first:
        hook_theirs()
    assert sys.modules[name].function(1) == result
    if "ours" in result:
        require()
    else:
        with pytest.raises(ConfigError, match=rf"{name}\.function.* was replaced by rival\."):
            require()


def test_a_patch_that_does_not_show_ours_ends_the_server(source, monkeypatch):
    source(hooked_patched=TARGET)
    install([Hook("hooked_patched", "function", "around", around)])
    monkeypatch.setattr(importlib.import_module("hooked_patched"), "function", lambda value: value)
    with pytest.raises(ConfigError, match="was replaced by something else"):
        require()


def test_another_version_is_refused_with_both_and_the_ways_out(monkeypatch):
    # How a version was built makes no difference.
    monkeypatch.setattr(contract, "version", lambda name: "0.5.23+cu129")
    assert misfit() == ""
    monkeypatch.setattr(contract, "version", lambda name: "0.5.24")
    with pytest.raises(ConfigError) as raised:
        require()
    assert raised.value.message == (
        "sglang-epd, which is for SGLang 0.5.23, does not fit the installed 0.5.24: the versions "
        "differ. pip install sglang==0.5.23, or set SGLANG_EPD=off to use SGLang's own EPD"
    )


@pytest.mark.parametrize(("parent", "read"), [(None, True), (object(), False)])
def test_the_launcher_reads_sglangs_sources_and_its_children_do_not(monkeypatch, parent, read):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    many = [f"target {number} is gone" for number in range(5)]
    monkeypatch.setattr(hooks, "_violations", lambda: many)
    if not read:
        require()
        return
    with pytest.raises(ConfigError) as raised:
        require()
    assert "target 2 is gone; and 2 more (sglang-epd doctor). Set SGLANG_EPD=off" in str(
        raised.value
    )
