"""Runs `sglang.bench_serving` once for each list of arguments that comes on stdin.

To import it takes as long as a short run. Says after each run, on stdout, why it failed, or
nothing, as a line of JSON; and once before the first that it is ready.
"""

import json
import os
import sys

# What bench_serving prints goes to the log.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from sglang.benchmark import serving  # noqa: E402


def run(arguments: list[str]) -> str:
    sys.argv = ["sglang.bench_serving", *arguments]
    try:
        serving.cli_main()
    except (Exception, SystemExit) as error:
        return f"bench_serving: {type(error).__name__}: {error}"
    return ""


print(json.dumps(""), file=answers, flush=True)
for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), file=answers, flush=True)
