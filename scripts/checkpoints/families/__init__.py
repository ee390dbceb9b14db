"""One file a family of models; a file that is put here is a family that is made and tested."""

from __future__ import annotations

import importlib
import pkgutil

from checkpoints.family import Family
from checkpoints.spec import CheckpointSpec

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        importlib.import_module(f"{__name__}.{module.name}").FAMILY
        for module in pkgutil.iter_modules(__path__)
    )
}

SPECS: dict[str, CheckpointSpec] = {
    spec.name: spec for family in FAMILIES.values() for spec in family.specs
}


def family_of(checkpoint: str) -> Family:
    """The family of the checkpoint of that name.

    Raises:
        KeyError: no checkpoint has it.
    """
    spec = SPECS[checkpoint]
    return next(family for family in FAMILIES.values() if spec in family.specs)
