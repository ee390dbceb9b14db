#!/usr/bin/env python3
"""Real photographs that need no download: they ship inside the wheel of scikit-image.

The files are opened where they are installed, without importing the package.

    scripts/photographs.py coffee    # prints where it lies
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from PIL import Image

_FILES = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
}
NAMES = tuple(_FILES)


def path(name: str) -> Path:
    """Where the photograph `name` lies.

    Raises:
        KeyError: no photograph has that name.
        FileNotFoundError: the package that holds it is not installed.
    """
    package, relative = _FILES[name]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(f"photograph {name!r} needs the package {package!r}")
    return Path(found.submodule_search_locations[0]) / relative


def load(name: str) -> Image.Image:
    """The photograph `name`, decoded, in RGB."""
    return Image.open(path(name)).convert("RGB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=NAMES)
    print(path(parser.parse_args().name))


if __name__ == "__main__":
    main()
