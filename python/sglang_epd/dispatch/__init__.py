"""Which encoder an item goes to, and where it goes when that encoder fails.

`policies` choose, by what `work` tells them of the items; `client` speaks to one encoder,
`dispatcher` runs one request's items to their end. `pool` holds the known encoders; `watcher`
keeps it true with `registry` (encoders announce themselves), `prober` (their state) and `names`
(the addresses of a name). Knows nothing of SGLang.
"""
