"""The configuration of a tiny MiMo-V2, as its checkpoint carries it.

MiMo-V2's own is published as code beside the weights. SGLang reads plain attributes of it.
"""

from transformers import PretrainedConfig


class MiMoV2Config(PretrainedConfig):
    model_type = "mimo_v2"
