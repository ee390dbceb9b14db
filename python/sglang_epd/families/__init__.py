"""Model families that SGLang serves and its in-tree EPD does not know.

Nothing here lists them: `adapter` drives SGLang's own processor of whatever model is
served, and `proof` finds out at start-up whether a prompt can be laid out without its
media. A family that differs from the others has a file of its own here, with the
reason. The encoder and the seams import this; it imports `media` and `errors`,
and SGLang.
"""

from __future__ import annotations

import importlib
import pkgutil

from sglang_epd.families.family import Family
from sglang_epd.families.in_tree import IN_TREE

__all__ = ["IN_TREE", "Family", "family_of"]


def family_of(architecture: str) -> Family | None:
    """How a model outside SGLang's own list is driven; None for those that are on it."""
    if architecture in IN_TREE:
        return None
    for module in pkgutil.iter_modules(__path__):
        # What is common to all has none.
        found = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", Family())
        if architecture in found.architectures:
            return found
    return Family()
