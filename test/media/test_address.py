from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.media import AddressPolicy

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
PUBLIC = ["8.8.8.8", "1.1.1.1", "192.0.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111"]
PUBLIC_BEHIND = ["::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]
PRIVATE_V4 = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
]
PRIVATE_V6 = [
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:0:127.0.0.1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "100::1",
    "64:ff9b:1::1",
    "2001::1",
    "2001:2::1",
    "2001:10::1",
    "2001:20::1",
    "2001:db8::1",
    "3fff::1",
    "4000::1",
    "5f00::1",
]
NO_ADDRESS = [
    "",
    "127.1",
    "2130706433",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "localhost",
    "8.8.8.8 ",
    "[::1]",
]


@pytest.mark.parametrize("host", PUBLIC + PUBLIC_BEHIND)
def test_public_addresses_are_open(host: str) -> None:
    assert AddressPolicy().permits(host)


@pytest.mark.parametrize("host", PRIVATE_V4 + PRIVATE_V6 + NO_ADDRESS)
def test_everything_else_is_closed(host: str) -> None:
    assert not AddressPolicy().permits(host)


@pytest.mark.parametrize("host", PRIVATE_V4)
def test_an_embedded_address_is_judged_in_its_stead(host: str) -> None:
    number = int(ipaddress.IPv4Address(host))
    for embedded in (0xFFFF << 32 | number, 0x64FF9B << 96 | number, 0x2002 << 112 | number << 80):
        assert not AddressPolicy().permits(str(ipaddress.IPv6Address(embedded)))


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",  # AWS, Azure, Google, Oracle, DigitalOcean, Hetzner, OpenStack
        "168.63.129.16",  # Azure's host agent (WireServer)
        "169.254.170.2",  # credentials of AWS containers
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle, older shapes
        "169.254.0.23",  # Tencent
        "169.254.42.42",  # Scaleway
        "fd00:ec2::254",  # AWS
        "fd20:ce::254",  # Google
        "fd00:c1::a9fe:a9fe",  # Oracle
        "fd00:42::42",  # Scaleway
        "fe80::a9fe:a9fe",  # OpenStack
    ],
)
def test_metadata_of_clouds_is_closed(host: str) -> None:
    assert not AddressPolicy().permits(host)


def test_networks_are_opened_one_by_one() -> None:
    policy = AddressPolicy(("127.0.0.0/8", "fd00:1::/32"))
    assert policy.permits("127.0.0.1")
    assert policy.permits("::ffff:127.0.0.1")
    assert policy.permits("fd00:1::7")
    assert not policy.permits("::1")
    assert not policy.permits("fd00:2::7")
    assert not policy.permits("127.1")


@given(st.ip_addresses(v=4))
def test_what_python_calls_private_is_closed(address: ipaddress.IPv4Address) -> None:
    if not address.is_global or address.is_multicast or address.is_reserved:
        assert not AddressPolicy().permits(str(address))


@given(st.ip_addresses(v=6))
def test_what_python_calls_private_is_closed_in_ipv6(address: ipaddress.IPv6Address) -> None:
    embeds = address.ipv4_mapped or address.sixtofour or address in NAT64
    if not embeds and (not address.is_global or address.is_multicast or address.is_reserved):
        assert not AddressPolicy().permits(str(address))
