"""Model families that SGLang serves and its in-tree EPD does not know.

Nothing here lists them: `adapter` drives SGLang's own processor of the model that is
served, and `proof` finds out at start-up whether a prompt can be laid out without its
media. The families that differ from the others are in `family`, each with the reason.
The encoder and the seams import this; it imports `media` and `errors`, and SGLang.
"""

from __future__ import annotations

from sglang_epd.families.family import DIFFERING, IN_TREE, Family

__all__ = ["IN_TREE", "Family", "family_of"]


def family_of(architecture: str) -> Family | None:
    """How a model outside SGLang's own list is driven; None for those that are on it."""
    if architecture in IN_TREE:
        return None
    differing = (one for one in DIFFERING if architecture in one.architectures)
    return next(differing, Family())
