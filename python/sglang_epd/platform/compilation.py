"""No just-in-time compilation."""

from __future__ import annotations

import os


def run_eagerly() -> None:
    """Turn the `torch.compile` decorators in SGLang's layers into no-ops.

    They fuse a few element-wise operations, which a CPU does not notice, and compile
    them with a C++ compiler at the first request and again for new shapes: 15 s of
    start-up on two cores, and a failure where no compiler is installed. Read when a
    module is decorated, so it has to be set before SGLang's layers are imported. A
    value set by the user stays.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
