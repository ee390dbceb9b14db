"""The `sglang-epd` command and the processes that it starts.

This package stands at the top: it may import everything below it, and nothing but
`plugin` and scripts may import it. It starts SGLang as child processes and never
imports SGLang itself.
"""
