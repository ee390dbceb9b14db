"""Mistral 3 and LLaVA: SGLang registers a wrapper that holds the processor of the vision
tower, without the attributes that every processor has."""

from __future__ import annotations

from typing import Any

from sglang_epd.families.family import Family


class Wrapped(Family):
    architectures = ("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration")

    def processor(self, registered: Any) -> Any:
        return registered.inner


FAMILY = Wrapped()
