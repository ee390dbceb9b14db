"""With SGLang's own processors: what reaches tower and language model is what one server has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.families import FAMILIES
from checkpoints.family import VIDEO
from make_checkpoint import ensure
from sglang_epd.families import IN_TREE

SCRIPT = Path(__file__).with_name("real_processor.py")
WATCHING = [
    family
    for family in FAMILIES.values()
    if VIDEO in family.marks and family.architecture not in IN_TREE and not family.stopped
]


@pytest.mark.servers
@pytest.mark.extended  # twenty seconds of a core each
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", WATCHING, ids=lambda family: family.name)
def test_tokens_positions_and_pixels_are_one_servers(family) -> None:
    command = [sys.executable, SCRIPT, "--model-path", str(ensure(family.specs[0].name))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"tok')]
    assert len(results) == 4
    for result in results:
        assert result.pop("tokens") > 100
        assert all(result.values()), result
