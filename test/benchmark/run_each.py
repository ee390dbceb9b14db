"""Runs benchmarks one after the other, in one process: it imports what they share once.

    run_each.py COMMANDS.json ERRORS.json

COMMANDS is a list of benchmarks with their arguments; ERRORS will have the traceback or exit
status of each, empty where all is well.
"""

import json
import runpy
import sys
import traceback
from pathlib import Path


def run(command: list[str]) -> str:
    sys.argv = command
    # As Python does for a script; the folder's names hide none that others import.
    folder = str(Path(command[0]).parent)
    sys.path.insert(0, folder)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        return str(end.code or "")
    except Exception:
        return traceback.format_exc()
    finally:
        sys.path.remove(folder)
    return ""


if __name__ == "__main__":
    given, told = map(Path, sys.argv[1:])
    told.write_text(json.dumps([run(command) for command in json.loads(given.read_text())]))
