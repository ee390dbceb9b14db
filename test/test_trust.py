from __future__ import annotations

import ssl
from types import SimpleNamespace

import pytest

import certificates
from sglang_epd.errors import ConfigError
from sglang_epd.trust import Trust


def serving(**changes):
    flags = ("api_key", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")
    return SimpleNamespace(**{**dict.fromkeys(flags), **changes})


def test_without_a_token_everybody_is_admitted():
    trust = Trust.of("", serving())
    assert trust.admits(b"")
    assert trust.admits(b"Bearer x")
    assert trust.headers() == {}
    assert trust.scheme == "http"
    assert trust.server_ssl() is None


@pytest.mark.parametrize(
    ("token", "key", "shown"), [("a", "b", "a"), ("", "b", "b"), ("a", None, "a"), ("a", "a", "a")]
)
def test_the_api_key_counts_where_there_is_no_token(token, key, shown):
    """With one, users of chat, who have the key, are no servers."""
    trust = Trust.of(token, serving(api_key=key))
    assert trust.headers() == {"Authorization": f"Bearer {shown}"}
    for one in filter(None, (token, key)):
        assert trust.admits(f"Bearer {one}".encode()) == (one == shown)


@pytest.mark.parametrize(
    "header", [b"", b"a", b"Bearer", b"Bearer ", b"Bearer ab", b"bearer a", b"Basic a", b"\xff\x00"]
)
def test_nothing_else_is_admitted(header):
    assert not Trust("a").admits(header)


@pytest.mark.parametrize("token", ["é", "a\nb", " a", "a ", "\x00"])
def test_a_token_that_no_header_can_carry_is_refused(token):
    with pytest.raises(ConfigError, match="SGLANG_EPD_TOKEN"):
        Trust.of(token, serving())
    with pytest.raises(ConfigError, match="--api-key"):
        Trust.of("", serving(api_key=token))


def test_secrets_are_not_shown():
    shown = repr(Trust("s3cret", keyfile_password="passw0rd"))
    assert "s3cret" not in shown
    assert "passw0rd" not in shown


def test_a_key_is_opened_by_its_password_and_no_other(tmp_path):
    made = certificates.make(tmp_path, password="open sesame")
    Trust("", made.certfile, made.keyfile, "open sesame").server_ssl()
    for wrong in ("", "open"):
        with pytest.raises(ConfigError, match="--ssl-certfile"):
            Trust("", made.certfile, made.keyfile, wrong).server_ssl()


def test_files_that_cannot_be_used_are_named(tmp_path):
    nothing = str(tmp_path / "nothing.pem")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("garbage")
    for path in (nothing, str(garbage)):
        with pytest.raises(ConfigError, match="--ssl-certfile"):
            Trust("", certfile=path, keyfile=path).server_ssl()
        with pytest.raises(ConfigError, match="--ssl-ca-certs"):
            Trust(ca_certs=path).client_ssl()


def test_others_are_always_verified(tmp_path):
    made = certificates.make(tmp_path)
    for trust in (Trust(), Trust(ca_certs=made.certfile), Trust("", made.certfile, made.keyfile)):
        context = trust.client_ssl()
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
