"""Processes that hold a tower each, for `--dp-size` and `--tp-size`."""
