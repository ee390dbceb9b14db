"""Model families that SGLang serves and its in-tree EPD does not know, or lays out otherwise
than a colocated server.

Nothing here lists the former: `adapter` drives SGLang's own processor of the model that is
served, and `proof` finds out at start-up whether a prompt can be laid out without its
media. The families that differ from the others are in `family`, each with the reason.
"""

from __future__ import annotations

from sglang_epd.families.family import DIFFERING, FOLLOWED, FOLLOWING_OPTIONS, IN_TREE, Family

__all__ = ["FOLLOWED", "IN_TREE", "Family", "family_of", "takes_options"]


def family_of(architecture: str) -> Family | None:
    """How a model is driven by SGLang's processor of it; None for those on SGLang's own list
    whose prompts the in-tree EPD lays out as one server does."""
    differing = (one for one in DIFFERING if architecture in one.architectures)
    return next(differing, None if architecture in IN_TREE else Family())


def takes_options(architecture: str) -> bool:
    """Whether options of a request's items may be given, whatever they are: encoders follow those
    that one server does."""
    return family_of(architecture) is None and architecture not in FOLLOWING_OPTIONS
