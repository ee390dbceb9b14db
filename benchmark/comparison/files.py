"""Finds data files by their names; `sglang_epd.schema` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from sglang_epd.errors import ConfigError
from sglang_epd.schema import Data, load

_T = TypeVar("_T", bound=Data)


def read(path: Path, kind: type[_T]) -> _T:
    """The contents of a file as a `kind`, whose `name` is the file's.

    Raises:
        ConfigError: it cannot be read, or does not fit the type.
    """
    found = load(path, kind)
    if (name := getattr(found, "name", path.stem)) != path.stem:
        raise ConfigError(f"{path}: its name is {name!r}, not the file's")
    return found


def read_all(folder: Path, kind: type[_T], names: list[str] | None = None) -> list[_T]:
    """Those of a folder that are named, in that order; all, by name, if none is.

    Raises:
        ConfigError: there is none of a name, or one cannot be used.
    """
    known = sorted(path.stem for path in folder.glob("*.toml"))
    for name in names or []:
        if name not in known:
            raise ConfigError(f"{name}: none of {folder.name}/: {', '.join(known)}")
    return [read(folder / f"{name}.toml", kind) for name in (names or known)]
