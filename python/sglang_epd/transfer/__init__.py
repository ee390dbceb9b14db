"""How an embedding gets from an encoder into a language server's scheduler.

`ledger` decides (plain data, no clock, no socket), `receiver` is the thread around
it in the scheduler process, `control` the tokenizer's end of it, `sender` the
encoder's end. `mooncake` writes into another process's registered memory; the package
behind it is optional, and loaded when an engine is made. May import `wire`, `errors`;
knows nothing of SGLang, HTTP or models.
"""
