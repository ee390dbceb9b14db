from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_epd.seams import requests


class Receiver:
    def __init__(self, part=None) -> None:
        self.adaptive = part
        self.cancelled = []

    def cancel(self, *args, **options) -> None:
        self.cancelled.append((args, options))

    def tell(self, original, manager, *args, **options):
        return "ours", original(manager, *args, **options)


def original(*args, **options):
    return args, options


@pytest.mark.parametrize("manager", [SimpleNamespace(), SimpleNamespace(mm_receiver=None)])
def test_a_manager_without_a_receiver_is_as_sglang_has_it(manager):
    """Whatever the parameters are."""
    hook = requests.around("tell")
    assert hook(original, manager, 1, some="more") == ((manager, 1), {"some": "more"})
    assert requests.after("cancel")("result", manager, 1, some="more") is None


def test_the_receiver_is_called_in_place_of_the_original():
    manager = SimpleNamespace(mm_receiver=Receiver())
    assert requests.around("tell")(original, manager, 1, some="more") == (
        "ours",
        ((manager, 1), {"some": "more"}),
    )


def test_the_receiver_is_told_when_the_original_has_returned():
    manager = SimpleNamespace(mm_receiver=Receiver())
    requests.after("cancel")("result", manager, "rid", abort_all=False)
    assert manager.mm_receiver.cancelled == [(("rid",), {"abort_all": False})]


def test_a_part_that_is_not_there_leaves_the_original():
    hook = requests.around("adaptive.tell")
    manager = SimpleNamespace(mm_receiver=Receiver())
    assert hook(original, manager) == ((manager,), {})
    manager.mm_receiver.adaptive = Receiver()
    assert hook(original, manager) == ("ours", ((manager,), {}))
