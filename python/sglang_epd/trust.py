"""Authentication between servers: a bearer token and TLS, from SGLang's flags and one variable.

`SGLANG_EPD_TOKEN` is the secret of this package's servers. `--api-key`, which users of chat have,
counts where it is not set.
`--ssl-certfile`, `--ssl-keyfile` and `--ssl-keyfile-password` are a server's certificate,
`--ssl-ca-certs` names the authorities that it believes. Certificates are always verified.
"""

from __future__ import annotations

import hmac
import os
import ssl
from dataclasses import dataclass, field
from typing import Any

from sglang_epd.errors import ConfigError


@dataclass(frozen=True)
class Trust:
    """What one server shows and accepts.

    Attributes:
        token: this server shows it to others, and accepts it from them. Empty: every request
            is accepted.
        certfile, keyfile, keyfile_password: this server's certificate; empty for no TLS.
        ca_certs: whose certificates are believed; empty for those that the system believes
            (`SSL_CERT_FILE` names others).
    """

    token: str = field(default="", repr=False)
    certfile: str = ""
    keyfile: str = ""
    keyfile_password: str = field(default="", repr=False)
    ca_certs: str = ""

    @classmethod
    def of(cls, token: str, serving: Any) -> Trust:
        """From the settings' token and SGLang's flags of serving.

        Raises:
            ConfigError: a token that cannot be sent in a header.
        """
        token = token or serving.api_key or ""
        if not (token.isascii() and token.isprintable() and token == token.strip()):
            raise ConfigError(
                "SGLANG_EPD_TOKEN and --api-key are printable ASCII without a blank at either end"
            )
        return cls(
            token,
            serving.ssl_certfile or "",
            serving.ssl_keyfile or "",
            serving.ssl_keyfile_password or "",
            serving.ssl_ca_certs or "",
        )

    @property
    def scheme(self) -> str:
        """`https` where this server has a certificate."""
        return "https" if self.certfile else "http"

    def headers(self) -> dict[str, str]:
        """Headers for servers that are trusted with the token."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def admits(self, authorization: bytes) -> bool:
        """Whether this `Authorization` header has the token; takes the same time always."""
        expected = f"Bearer {self.token}".encode()
        return not self.token or hmac.compare_digest(authorization, expected)

    def server_ssl(self) -> ssl.SSLContext | None:
        """For a socket that listens; None where this server has no certificate.

        Raises:
            ConfigError: the files cannot be used.
        """
        if not self.certfile:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.load(context)
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Have new connections of a socket that listens get the certificate that is in the files
        now.

        Raises:
            ConfigError: the files cannot be used.
        """
        # First elsewhere: a certificate whose key is not there yet would leave `context` without.
        attempt = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            for one in (attempt, context):
                # Without a password OpenSSL would ask on the terminal.
                one.load_cert_chain(
                    self.certfile, self.keyfile or None, lambda: self.keyfile_password
                )
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(f"--ssl-certfile {self.certfile}: {error}") from None

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Of the files of the certificate: another when they have been replaced.

        Raises:
            OSError: there is none.
        """
        found = [os.stat(path) for path in (self.certfile, self.keyfile) if path]
        return tuple((one.st_ino, one.st_mtime_ns) for one in found)

    def client_ssl(self) -> ssl.SSLContext:
        """For connections to https:// servers.

        Raises:
            ConfigError: the file cannot be used.
        """
        try:
            return ssl.create_default_context(cafile=self.ca_certs or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-ca-certs {self.ca_certs}: {error}") from None
