"""The architectures that SGLang's in-tree EPD knows.

They say themselves what an encoder-only and a language-only server leave out
(`encoder_only` and `language_only` of their configuration), and their processors lay a
prompt out from grids (`get_validated_mm_data`). A contract test compares this with
`arg_groups.pd_disaggregation_hook.handle_encoder_disaggregation`.
"""

from __future__ import annotations

IN_TREE = frozenset(
    {
        "Dots3NoteForCausalLM",
        "Glm5NextForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "MiMoV2ForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "MuseSparkForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3OmniMoeForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
