"""Loads a tower without the language model behind it, on one accelerator.

Some of SGLang's models know `--encoder-only` and build none; others build it in any case.
These are given a configuration in which it has one layer, the least that SGLang's models
take, and next to no vocabulary, so that the model's own code stays as it is, whatever it
calls its parts; what was built of it is given back. Of the checkpoint no tensor of the
language model is read, and files that have no other are not opened. A loader that asks for each
parameter loads the whole model, whose language model is given back. With `--load-format presharded`
the checkpoint's own files are read.

`MMEncoder` makes its process groups on the accelerator of its rank's number. That is another than
its own where there are several towers, or `--base-gpu-id`.

Leans on `disaggregation.encoder.server.load_model`, the name under which `MMEncoder` calls
`model_loader.get_model(model_config=, load_config=, device_config=)`, on
`init_distributed_environment(..., local_rank=)` there, and on `families.reading`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from sglang_epd.families.reading import BY_PARAMETER, changed, tensors_other_than
from sglang_epd.namespace import LANGUAGE_CONFIGS, of_language_model

# Of a language model that says nothing; the id of its padding has to be in its vocabulary.
_NOTHING = {"num_hidden_layers": 1, "vocab_size": 64, "pad_token_id": 0}


@contextmanager
def without_language_model() -> Iterator[None]:
    """While `MMEncoder` is made, what it loads is a tower alone."""
    from sglang.srt.disaggregation.encoder import server

    load = server.load_model

    def load_tower(*, model_config: Any, load_config: Any, device_config: Any) -> nn.Module:
        hf_config = getattr(model_config.hf_config, "thinker_config", model_config.hf_config)
        if load_config.load_format == "presharded":
            # It finds its files by the shapes of tensors, and not by their content. Towers that
            # start side by side would write the same files.
            load_config.load_format, load_config.model_loader_extra_config = "auto", {}
        whole = load_config.load_format == BY_PARAMETER
        # SGLang says so of the whole model only, and a thinker is asked by itself.
        hf_config.encoder_only = not whole
        smaller = nullcontext() if whole else _nothing_to_say(hf_config)
        with smaller, tensors_other_than(of_language_model):
            model: nn.Module = load(
                model_config=model_config, load_config=load_config, device_config=device_config
            )
        _empty(model)
        return model

    server.load_model = load_tower
    try:
        yield
    finally:
        server.load_model = load


def follow_custom_all_reduce() -> None:
    """Have process groups follow `--disable-custom-all-reduce`, as those of SGLang's other servers
    do: `MMEncoder` makes its groups by itself."""
    from sglang.srt.distributed.parallel_state import set_custom_all_reduce
    from sglang.srt.runtime_context import get_exec

    set_custom_all_reduce(not get_exec().comm.disable_custom_all_reduce)


@contextmanager
def groups_on(gpu_id: int) -> Iterator[None]:
    """While `MMEncoder` is made, its process groups are on that accelerator.

    On another one they would keep a context, and all-reduces would use memory there.
    """
    from sglang.srt.disaggregation.encoder import server

    init = server.init_distributed_environment

    def on_its_own(*, local_rank: int, **told: Any) -> None:
        init(local_rank=gpu_id, **told)

    server.init_distributed_environment = on_its_own
    try:
        yield
    finally:
        server.init_distributed_environment = init


def _nothing_to_say(hf_config: Any) -> AbstractContextManager[None]:
    """The language model's configuration, next to nothing while the model is built."""
    found = [getattr(hf_config, name, None) for name in LANGUAGE_CONFIGS]
    # SGLang may have copied its fields to the whole model's, and some models read those.
    configs = [config for config in (hf_config, *found) if hasattr(config, "num_hidden_layers")]
    return changed((one, field, value) for one in configs for field, value in _NOTHING.items())


def _empty(model: nn.Module) -> None:
    """Give back the tensors that the language model has all the same."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if of_language_model(name):
            tensor.data = tensor.data.new_empty(0)
