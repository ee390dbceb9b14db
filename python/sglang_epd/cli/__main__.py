"""`python -m sglang_epd.cli`: the `sglang-epd` command without its script."""

from sglang_epd.cli.main import run

run()
