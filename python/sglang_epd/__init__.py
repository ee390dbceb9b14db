"""Encode-prefill-decode disaggregation for SGLang.

The way of an image to its prefill lives here: planning and dispatch on the
language server, encoding on the encoder server, and the channel between the two.
Models, attention, scheduling and HTTP stay SGLang's. `plugin.py` is the only
place that decides which functions are hooked and when.
"""
