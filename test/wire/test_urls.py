from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.errors import ProtocolError
from sglang_epd.wire.urls import ENCODERS, host_port, server_url


@pytest.mark.parametrize(
    ("raw", "url"),
    [
        ("http://encoder:30000", "http://encoder:30000"),
        ("HTTP://Encoder-0.EPD.svc:30000/", "http://encoder-0.epd.svc:30000"),
        ("https://10.0.0.7:1", "https://10.0.0.7:1"),
        ("http://[::1]:30000", "http://[::1]:30000"),
        ("http://[2001:DB8:0::7]:30000/", "http://[2001:db8::7]:30000"),
        ("http://encoder", "http://encoder"),
        ("http://my_host:00080", "http://my_host:80"),
    ],
)
def test_a_servers_url_has_one_form(raw, url):
    assert server_url(raw) == url
    assert server_url(url) == url


def test_an_encoders_url_may_be_of_grpc_with_a_port():
    assert server_url("grpc://Encoder:30000/", ENCODERS) == "grpc://encoder:30000"
    assert server_url("https://encoder", ENCODERS) == "https://encoder"
    for raw in ("grpc://encoder", "grpcs://encoder:1", "grpc://a@encoder:1"):
        with pytest.raises(ProtocolError):
            server_url(raw, ENCODERS)
    with pytest.raises(ProtocolError, match="http:// or https://"):
        server_url("grpc://encoder:1")


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "encoder:30000",
        "//encoder:30000",
        "ftp://encoder:30000",
        "file:///etc/passwd",
        "http://",
        "http://:30000",
        "http://user:secret@encoder:30000",
        "http://@encoder:30000",
        "http://encoder:30000/v1",
        "http://encoder:30000//",
        "http://encoder:30000/../admin",
        "http://encoder:30000?x",
        "http://encoder:30000/?x=1",
        "http://encoder:30000#x",
        "http://encoder:99999",
        "http://encoder:-1",
        "http://encoder:0",
        "http://encoder:x",
        "http://enc oder:1",
        "http://encoder:1\r\nHost: x",
        "http://encoder\t:1",
        "http://encod\xe9r:1",
        "http://encoder\\@evil:1",
        "http://encoder%2f:1",
        "http://-encoder:1",
        "http://encoder..x:1",
        "http://[::1:1",
        "http://[encoder]:1",
        "http://::1:1",
        "http://0.0.0.0:30000",
        "http://[::]:30000",
        "http://224.0.0.1:30000",
        "http://2130706433:1",
        "http://0x7f000001:1",
        "http://127.1:1",
        "http://" + "a" * 600,
    ],
)
def test_anything_else_is_refused(raw):
    with pytest.raises(ProtocolError):
        server_url(raw)


@given(st.text(max_size=60) | st.text(max_size=60).map("http://".__add__))
def test_it_is_one_form_or_an_error(raw):
    try:
        url = server_url(raw)
    except ProtocolError:
        return
    assert server_url(url) == url
    assert url.startswith(("http://", "https://"))
    assert not set(url) & set("@?#\\ \r\n")


@pytest.mark.parametrize(
    ("host", "written"),
    [("::1", "[::1]:7"), ("[::1]", "[::1]:7"), ("10.0.0.1", "10.0.0.1:7"), ("a.b", "a.b:7")],
)
def test_an_address_of_ipv6_is_in_brackets_before_a_port(host, written):
    assert host_port(host, 7) == written
