"""Published comparisons on emulated machines: their files, their profiles, their page."""

import msgspec
import pytest
import reproduce
from comparison.figures import Outcome, Run

from demo_emulated import Counted
from sglang_epd.profile import load_profile

NAMES = [path.stem for path in reproduce.HERE.glob("*.toml")]


@pytest.mark.parametrize("name", NAMES)
def test_a_smaller_picture_costs_what_a_published_one_does(name: str) -> None:
    results = reproduce.empty(name, None, None)
    told, (first, *others) = results.comparison, results.arms
    assert (first.family, {arm.family for arm in others}) == (
        "colocated",
        {"in-tree", "sglang-epd"},
    )
    whole, shrunk = load_profile(told.profile), told.shrunk()
    side = whole.pixels.patch_px
    patches = (told.size.width // side) * (told.size.height // side)
    for of in ("encoder", "language"):
        tower, smaller = getattr(whole, of).tower, getattr(shrunk, of).tower
        expected = tower.seconds([patches * told.shrink])
        assert smaller.seconds([patches]) == pytest.approx(expected)
    prompt = 5 * patches / whole.pixels.merge
    assert shrunk.language.prefill_s([(prompt, 100)]) == pytest.approx(
        whole.language.prefill_s([(prompt * told.shrink, 100 * told.shrink)])
    )
    assert shrunk.language.step_s(3, 1000) == pytest.approx(
        whole.language.step_s(3, 1000 * told.shrink)
    )


def test_times_are_divided_by_what_passes_were_stretched() -> None:
    results = reproduce.empty("sglang-blog", ["one", "epd-2e1p"], [1.0])
    results.comparison = msgspec.structs.replace(results.comparison, dilation=4.0)
    for arm, ttft_ms, seconds in (("one", 8000.0, 80.0), ("epd-2e1p", 2000.0, 40.0)):
        outcomes = [Outcome("media", ttft_ms, 200.0, 128), Outcome("media", None, None, 0, "lost")]
        results.runs.append(Run(arm, "sglang-blog", 0, 1.0, seconds, "", "", outcomes))
        encoders, encoder_s = (2, 20.0) if arm == "epd-2e1p" else (0, 0.0)
        spent = {"prefill": 20.0, "decode": 10.0}
        results.busy.append(reproduce.Busy(arm, 0, 1.0, encoders, encoder_s, spent, 1.0))
    one, epd = (reproduce.row(results, arm, 1.0) for arm in results.arms)
    assert one == [
        *("1", "one server", "1 of 2", "2.00", "2.00", "2.00", "50", "0.050"),
        *("", "0%", "25%", "12%", "3.3%"),
    ]
    assert epd[-5:] == ["25%", "0%", "50%", "25%", "2.0%"]
    assert reproduce.ratios(results)[-1] == ["1", "sglang-epd 2E1P", "4.0x", "1.0x", "2.0x"]
    page = reproduce.page(results)
    assert load_profile("h20-qwen3-vl-235b").source[0] in page and "| 4.0x |" in page


def test_what_an_accelerator_did_in_a_run_is_the_difference() -> None:
    before, after = Counted({"tower": 1.0}, 0.5, 2), Counted({"tower": 4.0, "decode": 1.0}, 0.5, 9)
    assert after.since(before) == Counted({"tower": 3.0, "decode": 1.0}, 0.0, 7)
