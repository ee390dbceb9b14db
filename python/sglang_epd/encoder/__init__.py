"""The `--encoder-only` server.

`server` starts it, `app` is its HTTP surface, `service` takes a request through the
stages, `engine` drives SGLang's model and media processor. `towers` decides whether that
is in this process or in worker processes; `workers` is the front's side of those,
`worker` theirs, `channel` what is between them. May import `transfer`, `media`, `wire`,
`observability`, `config` and `errors`; only `engine`, `towers` and `server` touch SGLang.
"""
