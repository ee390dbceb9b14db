"""How an embedding gets from an encoder into a language server's scheduler.

`ledger` decides (plain data, no clock, no socket), `receiver` is the thread around
it in the scheduler process, `control` the tokenizer's end of it, `sender` the
encoder's end, `mooncake` the engine that writes into another process's registered memory.
Knows nothing of HTTP or models, and of SGLang only that the engine is its own.
"""
