"""Reads data files: typed, and without keys that nobody knows."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


class DataFileError(ValueError):
    """A data file cannot be used; the message begins with its name and says why."""


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that data files hold."""


def read(path: Path, kind: type[T]) -> T:
    """The contents of a TOML file as a `kind`, whose `name` is the file's.

    Raises:
        DataFileError: it cannot be read, is no TOML, or does not fit the type.
    """
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), kind)
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"{path.name}: {error}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        raise DataFileError(f"{path.name}: {error}") from None
    if (name := getattr(found, "name", path.stem)) != path.stem:
        raise DataFileError(f"{path.name}: its name is {name!r}, not the file's")
    return found


def read_all(folder: Path, kind: type[T], names: list[str] | None = None) -> list[T]:
    """Those of a folder that are named, in that order; all, by name, if none is.

    Raises:
        DataFileError: there is none of a name, or one cannot be used.
    """
    known = sorted(path.stem for path in folder.glob("*.toml"))
    for name in names or []:
        if name not in known:
            raise DataFileError(f"{name}: none of {folder.name}/: {', '.join(known)}")
    return [read(folder / f"{name}.toml", kind) for name in (names or known)]
