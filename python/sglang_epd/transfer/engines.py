"""Transfer engines: they write payloads into memory that another process has registered.

An engine has the name of an `--encoder-transfer-backend`; an encoder tells it in its offers,
and a receiver with the same engine answers with an address. A new one is a module like
`mooncake`, and a row of the table.
"""

from __future__ import annotations

from typing import Protocol

from sglang_epd.transfer import mooncake


class PayloadEngine(Protocol):
    """This process's end of an engine. Any thread may call it.

    Attributes:
        name: its row in the table.
        session: by which peers reach it.
        staged: whether it sends from registered memory only, as network cards want it.
    """

    name: str
    session: str

    @property
    def staged(self) -> bool: ...

    def register(self, address: int, nbytes: int) -> None:
        """Let peers write to this memory.

        Args:
            address: of the first byte, in this process.
        """

    def contact(self, session: str, deadline: float) -> None:
        """Wait until a peer that was not written to before answers.

        Args:
            deadline: in seconds of `time.monotonic()`.

        Raises:
            UnavailableError: it does not.
        """

    def write(
        self,
        session: str,
        local_address: int,
        remote_address: int,
        nbytes: int,
        timeout_s: float,
        *,
        keep: object = None,
    ) -> None:
        """Copy to a peer, and return when it has the bytes.

        Args:
            keep: owner of the source memory, held until the engine is done with it.

        Raises:
            UnavailableError: they were not written; some may yet be, until its `ended`, where it
                has one, says otherwise.
        """


_ENGINES = {mooncake.NAME: mooncake.started}


def started(backend: str) -> PayloadEngine | None:
    """This process's engine for a transfer backend; None where that has none.

    Args:
        backend: of `--encoder-transfer-backend`.

    Raises:
        ConfigError: it cannot be used here.
    """
    start = _ENGINES.get(backend)
    return start() if start else None
