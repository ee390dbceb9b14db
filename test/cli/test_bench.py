"""`sglang-epd bench` hands on to the comparison of the source tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_epd.cli import bench
from sglang_epd.errors import ConfigError


def test_a_package_without_its_source_tree_says_so(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "site-packages" / "sglang_epd" / "__init__.py"
    with pytest.raises(ConfigError, match="clone its source tree"):
        bench.entry(package)
