"""Prompts of every family that SGLang's own EPD lists: as its encoder and its language server
make them, and as one server does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints.families import FAMILIES
from families.in_tree import (
    BEGUN_CASES,
    CASES,
    FEW,
    FEW_CASES,
    MODALITIES,
    OPTION_CASES,
    OTHERS,
    SPELT_CASES,
)
from sglang_epd.families import FOLLOWED, IN_TREE, family_of, takes_options

# Of the script, which takes three quarters of a minute of a core.
pytestmark = pytest.mark.timeout(1000)
SCRIPT = Path(__file__).with_name("in_tree.py")
LISTED = {family.name: family for family in FAMILIES.values() if family.architecture in IN_TREE}
VIDEO_OPTIONS = [case for case in OPTION_CASES if "video" in case or "two" in case]
# Whose answers depend on options of items, on one server.
OPTIONED = {"glm5_next", "mimo_v2", "minimax_m3_vl"}
# Some of whose tokenizers put a token before each text.
BEGUN = {"muse_spark", "minimax_m3_vl"}
PROMPT = {"input_ids", "offsets", "positions", "delta", "names"}

# Where SGLang's own EPD makes another prompt than one server: the family, a modality or a case,
# and what differs, or its error. One server's answers are the measure.
IN_TREE_DIFFERS: dict[tuple[str, str], set[str] | str] = {
    # Its figure is of the rate that frames were asked for at.
    ("qwen2_5_vl", "VIDEO"): {"positions"},
    # One server asks the processor of the whole model, which has other sizes.
    ("qwen3_omni_moe", "VIDEO"): {*PROMPT, "features of VIDEO"},
    # It has no positions, and no times and marks of a video's frames.
    ("glm5_next", "IMAGE"): {"positions", "delta"},
    ("glm5_next", "VIDEO"): PROMPT,
    ("glm5_next", "images in spelt text"): PROMPT,
    # It neither turns an image nor lays it over a background.
    ("glm5_next", "images that are not plain"): {"positions", "delta", "features of IMAGE"},
    # It looks for a processor of `transformers`.
    ("dots3_note", "IMAGE"): "ValueError: No image processor available",
    ("intern_s2_preview", "VIDEO"): "NotImplementedError: Video processing is not supported",
    ("mimo_v2", "sound in a video"): "RuntimeError: EPD processor returned an unexpected",
    **{("mimo_v2", case): "ValueError: Unsupported video input type" for case in VIDEO_OPTIONS},
    ("minimax_m3_vl", "options that are none"): "ValueError: max_long_side_pixel must be",
    # It tokenizes a text without that token, and the time of a video's first frame apart.
    ("minimax_m3_vl", "a text without it"): {"input_ids", "offsets", "names"},
    ("minimax_m3_vl", "a video after text"): {"input_ids", "offsets", "names"},
}
# What is refused, with which words, and how one server ends if it does not answer either.
REFUSED = {
    ("dots3_note", "images in spelt text"): ("as text only", "ValueError: Dots note omni requires"),
    ("intern_s2_preview", "VIDEO"): ("this encoder does not take video input", "IndexError: "),
    ("mimo_v2", "sound in a video"): ("this model hears the sound of a video", ""),
    **{("mimo_v2", case): ("takes no such options for its media: ", "") for case in OPTION_CASES},
    # One server follows none of these, or those of one video for both.
    ("glm5_next", "options of images"): ("media: max_long_side_pixel, max_pixels", ""),
    ("glm5_next", "options that are none"): ("media: max_long_side_pixel", ""),
    ("glm5_next", "sizes of videos"): ("media: max_long_side_pixel", ""),
    ("glm5_next", "bounds of one of two"): ("media: max_image_tokens, max_tokens_per_frame", ""),
    ("minimax_m3_vl", "options that are none"): (
        "max_long_side_pixel must be a multiple of 28",
        "ValueError: max_long_side_pixel must be a multiple of 28",
    ),
}
# Where one server fails at what this package answers, or makes another prompt.
ONE_SERVER_DIFFERS: dict[tuple[str, str], set[str] | str] = {
    ("glm5_next", "images in spelt text"): "IndexError: The shape of the mask",
    ("muse_spark", "images in spelt text"): "ValueError: missing '<image>' placeholder",
    # It makes text of token ids, and tokenizes that.
    ("qwen3_omni_moe", "images in spelt text"): PROMPT - {"delta"},
}


def _cases() -> Iterator[Any]:
    for name, family in LISTED.items():
        marks = {modality.upper() for modality in family.marks}
        optioned = OPTION_CASES if name in OPTIONED else {}
        begun = BEGUN_CASES if name in BEGUN else {}
        few = FEW_CASES if name in FEW else {}
        for case, (_, items) in (CASES | SPELT_CASES | optioned | begun | few).items():
            if {MODALITIES[item] for item in items} <= marks:
                yield pytest.param(name, case, id=f"{name}-{case}")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[tuple[str, str], dict[str, Any]]:
    """What the script says of all cases of the families that are tested."""
    tests = [item for item in request.session.items if item.path == Path(__file__)]
    chosen = [name for name in (*LISTED, *OTHERS) if any(name in item.name for item in tests)]
    path = os.pathsep.join(part for part in sys.path if part)
    # One thread each, as everything is small; forks would wait for others.
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, *chosen],
        capture_output=True,
        text=True,
        timeout=900,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"fam')]
    found = {(line.pop("family"), line.pop("case")): line for line in lines}
    answered = {name for name, _ in found}
    missing = {name for name in chosen if name not in answered}
    assert not missing, done.stderr[-8000:]
    return found


def _of(table: dict[tuple[str, str], Any], family: str, case: str) -> Any:
    """The entry of a case, or else of the last of its modalities that has one."""
    items = (CASES | SPELT_CASES | OPTION_CASES | BEGUN_CASES | FEW_CASES)[case][1]
    names = [case, *sorted((MODALITIES[item] for item in items), reverse=True)]
    return next((table[family, name] for name in names if (family, name) in table), None)


@pytest.mark.parametrize(("family", "case"), list(_cases()))
def test_prompts_and_features_are_one_servers(results, family: str, case: str) -> None:
    told = results[family, case]
    refused = _of(REFUSED, family, case)
    if refused is not None:
        words, end = refused
        assert words in told["ours"]
        assert told["one_server"].startswith(end) if end else told["one_server"] == ["answers"]
    else:
        assert told["ours"] > 30
        differs = ONE_SERVER_DIFFERS.get((family, case), set())
        if isinstance(differs, str):
            assert told["one_server"].startswith(differs)
        else:
            # SGLang fills up the sounds of a prompt to one length, and an encoder sees each alone.
            assert set(told["one_server"]) - {"features of AUDIO"} == differs
    differs = _of(IN_TREE_DIFFERS, family, case) or set()
    if refused is not None and not isinstance(differs, str):
        differs = {"answers"}
    if isinstance(differs, str):
        assert told["in_tree"].startswith(differs)
    else:
        assert set(told["in_tree"]) == differs


@pytest.mark.parametrize("family", LISTED)
def test_options_that_one_server_follows_are_followed_or_refused(results, family: str) -> None:
    follows = any(results[family, "options"].values())
    architecture = LISTED[family].architecture
    expected = family_of(architecture) is None and (not follows or architecture in FOLLOWED)
    assert takes_options(architecture) == expected
    assert follows == (family in OPTIONED)


@pytest.mark.parametrize(
    ("family", "case"), [(name, case) for name, one in OTHERS.items() for case in one.cases]
)
def test_prompts_and_features_of_the_other_families(results, family: str, case: str) -> None:
    told = results[family, case]
    assert told["ours"] > 30
    assert told["one_server"] == []
