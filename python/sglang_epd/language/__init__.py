"""The language server's side of a request.

`planner` turns a request's media into items, `frontend` (tokenizer process) sends
them to encoders, `backend` (scheduler process) waits for them, `assembly` makes the
model's inputs of them, `uploads` copies their rows to the device. `layouts` keeps the layouts
that a prefill server's encoders sent, and `layout_exchange` takes them to the decode server.
SGLang's objects come in through `seams/`, which builds these classes.
"""
