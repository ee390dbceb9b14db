"""The `sglang-epd` command and the processes that it starts.

It starts SGLang as child processes and never imports SGLang itself.
"""
