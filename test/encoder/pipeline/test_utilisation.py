from __future__ import annotations

import pytest

from sglang_epd.encoder.pipeline.utilisation import Utilisation


def test_it_is_a_share_of_the_last_minute():
    utilisation = Utilisation(towers=2)
    assert utilisation.share(now=100.0) == 0
    utilisation.note(100.0, 130.0)
    utilisation.note(100.0, 130.0)
    assert utilisation.share(now=130.0) == pytest.approx(0.5)
    assert utilisation.share(now=175.0) == pytest.approx(0.25), "half of it is too long ago"
    assert utilisation.share(now=200.0) == 0


def test_it_is_never_more_than_all_of_it():
    utilisation = Utilisation(towers=1)
    utilisation.note(0.0, 100.0)
    utilisation.note(50.0, 100.0)
    assert utilisation.share(now=100.0) == 1
