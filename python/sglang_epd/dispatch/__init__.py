"""Which encoder an item goes to, and what happens when that one fails.

`policies` are pure functions, `client` speaks to one encoder, `dispatcher` runs one
request's items to their end. May import `wire`, `errors`; knows nothing of SGLang.
"""
