"""Certificates that believe in themselves, made by the openssl program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    certfile: str
    keyfile: str


def make(folder: Path, name: str = "server", password: str = "") -> Certificate:
    """For `localhost` and 127.0.0.1; valid for a day."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificate(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    key = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:prime256v1", "-days", "1", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", *key),
            *("-keyout", made.keyfile, "-out", made.certfile),
        ],
        check=True,
        capture_output=True,
        timeout=20,
    )
    return made
