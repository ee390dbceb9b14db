"""The `--encoder-only` server.

`server` starts it, `app` is its HTTP surface, `service` takes a request through the
stages, `engine` drives SGLang's model and media processor. May import `transfer`,
`media`, `wire`, `observability`, `config` and `errors`; only `engine` and `server`
touch SGLang.
"""
