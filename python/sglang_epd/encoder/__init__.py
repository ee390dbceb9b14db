"""The `--encoder-only` server.

`server` starts it, `serving` ends it, `app` is its HTTP surface, and `service` takes a request
through its stages. `tower` is the contract of a tower; `towers` decides whether the towers are
in this process or in workers. Three rooms: `pipeline` (items from their bytes to their embedding),
`model` (SGLang's tower and media processor) and `workers` (towers in processes of their own).
"""
