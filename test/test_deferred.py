"""A change waits for the import that it is about."""

import importlib
import importlib.util
import inspect
import sys

import pytest

from sglang_epd.deferred import when_imported


@pytest.fixture
def module_name(tmp_path, monkeypatch):
    (tmp_path / "epd_deferred_example.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "epd_deferred_example"
    sys.modules.pop("epd_deferred_example", None)


def raise_value(module):
    module.value += 1


def test_a_change_waits_for_the_import(module_name):
    finders = len(sys.meta_path)
    when_imported(module_name, raise_value)
    assert module_name not in sys.modules
    module = importlib.import_module(module_name)
    assert module.value == 2
    assert len(sys.meta_path) == finders
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_other_imports_are_untouched(module_name):
    when_imported(module_name, raise_value)
    import colorsys

    assert type(colorsys.__spec__.loader).__name__ == "SourceFileLoader"
    importlib.import_module(module_name)


def test_asking_whether_a_module_exists_does_not_lose_its_change(module_name):
    when_imported(module_name, raise_value)
    assert importlib.util.find_spec(module_name) is not None
    assert module_name not in sys.modules
    assert importlib.import_module(module_name).value == 2


def test_an_import_that_fails_does_not_lose_the_change(module_name, tmp_path):
    path = tmp_path / f"{module_name}.py"
    path.write_text("raise OSError('not now')\n")
    when_imported(module_name, raise_value)
    with pytest.raises(OSError, match="not now"):
        importlib.import_module(module_name)
    path.write_text("value = 1  # of another length, so that no cached code is used\n")
    assert importlib.import_module(module_name).value == 2


def test_a_change_is_made_once(module_name):
    when_imported(module_name, raise_value)
    module = importlib.import_module(module_name)
    assert importlib.import_module(module_name).value == 2
    assert importlib.reload(module).value == 1


def test_changes_of_one_module_are_made_in_their_order(module_name):
    order = []
    for number in range(3):
        when_imported(module_name, lambda _module, number=number: order.append(number))
    importlib.import_module(module_name)
    assert order == [0, 1, 2]


def test_a_module_in_a_package_is_changed_without_importing_its_parents(tmp_path, monkeypatch):
    folder = tmp_path / "epd_deferred_package" / "inner"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "target.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "epd_deferred_package.inner.target"
    try:
        when_imported(name, raise_value)
        assert "epd_deferred_package" not in sys.modules
        assert importlib.import_module(name).value == 2
    finally:
        for loaded in [key for key in sys.modules if key.startswith("epd_deferred_package")]:
            del sys.modules[loaded]


def test_a_module_that_does_not_exist_is_still_not_found():
    when_imported("epd_deferred_missing", raise_value)
    try:
        with pytest.raises(ModuleNotFoundError, match="epd_deferred_missing"):
            importlib.import_module("epd_deferred_missing")
    finally:
        del sys.meta_path[0]


def test_a_changed_module_keeps_its_source(module_name, tmp_path):
    (tmp_path / f"{module_name}.py").write_text("def function():\n    return 'here'\n")
    when_imported(module_name, lambda _module: None)
    module = importlib.import_module(module_name)
    assert "return 'here'" in inspect.getsource(module.function)
