"""Random vision-language checkpoints, small enough for a laptop and built in seconds.

Tests, benchmarks and the demo serve these instead of downloading weights. Only
`make_checkpoint.py` beside this folder is meant to be called from outside; nothing
here imports `sglang` or `sglang_epd`.
"""
