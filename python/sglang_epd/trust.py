"""Authentication between servers: bearer tokens and TLS, from SGLang's flags and one variable.

`SGLANG_EPD_TOKEN` is the secret of this package's servers; `--api-key` counts beside it.
`--ssl-certfile`, `--ssl-keyfile` and `--ssl-keyfile-password` are a server's certificate,
`--ssl-ca-certs` names the authorities that it believes. Certificates are always verified.
"""

from __future__ import annotations

import hmac
import ssl
from dataclasses import dataclass, field
from typing import Any

from sglang_epd.errors import ConfigError


@dataclass(frozen=True)
class Trust:
    """What one server shows and accepts.

    Attributes:
        tokens: accepted from others; the first is what this server shows. None: every
            request is accepted.
        certfile, keyfile, keyfile_password: this server's certificate; empty for no TLS.
        ca_certs: whose certificates are believed; empty for those that the system believes
            (`SSL_CERT_FILE` names others).
    """

    tokens: tuple[str, ...] = field(default=(), repr=False)
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
        tokens = tuple(dict.fromkeys(one for one in (token, serving.api_key) if one))
        for one in tokens:
            if not (one.isascii() and one.isprintable() and one == one.strip()):
                raise ConfigError(
                    "SGLANG_EPD_TOKEN and --api-key are printable ASCII without a blank "
                    "at either end"
                )
        return cls(
            tokens,
            serving.ssl_certfile or "",
            serving.ssl_keyfile or "",
            serving.ssl_keyfile_password or "",
            serving.ssl_ca_certs or "",
        )

    @property
    def token(self) -> str:
        """The token that this server shows to others; empty for none."""
        return self.tokens[0] if self.tokens else ""

    @property
    def scheme(self) -> str:
        """`https` where this server has a certificate."""
        return "https" if self.certfile else "http"

    def headers(self) -> dict[str, str]:
        """Headers for servers that are trusted with the token."""
        return {"Authorization": f"Bearer {self.token}"} if self.tokens else {}

    def admits(self, authorization: bytes) -> bool:
        """Whether this `Authorization` header has an accepted token; takes the same time always."""
        matches = [
            hmac.compare_digest(authorization, f"Bearer {token}".encode()) for token in self.tokens
        ]
        return not matches or any(matches)

    def server_ssl(self) -> ssl.SSLContext | None:
        """For a socket that listens; None where this server has no certificate.

        Raises:
            ConfigError: the files cannot be used.
        """
        if not self.certfile:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Without a password OpenSSL would ask on the terminal.
            context.load_cert_chain(
                self.certfile, self.keyfile or None, lambda: self.keyfile_password
            )
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(f"--ssl-certfile {self.certfile}: {error}") from None
        return context

    def client_ssl(self) -> ssl.SSLContext:
        """For connections to https:// servers.

        Raises:
            ConfigError: the file cannot be used.
        """
        try:
            return ssl.create_default_context(cafile=self.ca_certs or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-ca-certs {self.ca_certs}: {error}") from None
