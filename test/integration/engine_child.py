"""A process with `sglang.Engine`s: does what standard input says, a line of JSON at a time, and
answers each with a line.

start NAME OPTIONS        an engine of these options
generate NAME BODY        its answer; an error as its text
stream NAME BODY          the texts of its pieces
at_once NAME BODIES       the answers of requests that are made together
encode NAME BODY          its answer
shutdown NAME
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import sglang
from fastapi import HTTPException


def answer(engines: dict[str, Any], verb: str, name: str, told: Any = None) -> Any:
    if verb == "start":
        engines[name] = sglang.Engine(**told)
        return None
    engine = engines[name]
    if verb == "at_once":

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(engine.async_generate(**one) for one in told))

        return engine.loop.run_until_complete(all_of_them())
    if verb == "stream":
        return [piece["text"] for piece in engine.generate(**told, stream=True)]
    if verb == "shutdown":
        return engines.pop(name).shutdown()
    return getattr(engine, verb)(**told)


def main() -> None:
    engines: dict[str, Any] = {}
    # Whatever else is printed goes where errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            said = {"answer": answer(engines, *json.loads(line))}
        # By another backend SGLang raises the latter, here as on a server.
        except (ValueError, HTTPException) as error:
            said = {"error": str(error)}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
