"""Which encoder an item goes to, and what happens when that one fails.

`policies` choose, by what `work` tells them of the items; `client` speaks to one encoder,
`dispatcher` runs one request's items to their end. `pool` is who there is; `watcher` keeps
it true: `registry` (who announces itself), `prober` (how they are), `names` (who is behind
a name). May import `wire`, `media`, `trust`, `errors`; knows nothing of SGLang.
"""
