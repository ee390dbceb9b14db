"""The table of IP addresses that media may be fetched from.

The default is the public internet and nothing else. The tables are the special-purpose
registries of IANA (RFC 6890), written out because `ipaddress.is_global` differs
between Python releases and takes NAT64 and 6to4 addresses for public ones, for any
IPv4 address that they lead to.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_DENIED_V4 = tuple(
    ipaddress.IPv4Network(cidr)
    for cidr in (
        "0.0.0.0/8",  # this network, and the unspecified address
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by carriers (RFC 6598); some clouds' metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's host agent, which virtual machines alone reach
        "169.254.0.0/16",  # link-local; most clouds' metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays, gone
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
# Public unicast is carved out of 2000::/3 only. Everything outside is loopback,
# link-local, unique local, multicast, reserved or a translation prefix.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_DENIED_V6 = tuple(
    ipaddress.IPv6Network(cidr)
    for cidr in (
        "2001::/23",  # protocol assignments, Teredo and ORCHID among them
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
# An IPv4 address inside an IPv6 address, by the bits below it: the packet ends up
# at the former, so the former is judged.
_EMBEDDED_V4 = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # IPv4-mapped (RFC 4291)
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64 (RFC 6052)
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4 (RFC 3056)
)


class AddressPolicy:
    """Says of an address whether media may be fetched from it.

    Args:
        allowed_networks: CIDRs that are open in spite of the tables.
    """

    def __init__(self, allowed_networks: Iterable[str] = ()) -> None:
        self._allowed = tuple(map(ipaddress.ip_network, allowed_networks))

    def permits(self, host: str) -> bool:
        """Whether `host`, an address in its canonical text form, may be connected to.

        Anything else, such as the old spellings 127.1 and 2130706433 that a C library
        would still accept, is refused.
        """
        try:
            address = _unwrap(ipaddress.ip_address(host.partition("%")[0]))
        except ValueError:
            return False
        if any(address in network for network in self._allowed):
            return True
        if isinstance(address, ipaddress.IPv4Address):
            return not any(address in network for network in _DENIED_V4)
        return address in _PUBLIC_V6 and not any(address in network for network in _DENIED_V6)


def _unwrap(address: Address) -> Address:
    if isinstance(address, ipaddress.IPv6Address):
        for network, shift in _EMBEDDED_V4:
            if address in network:
                return ipaddress.IPv4Address(int(address) >> shift & 0xFFFFFFFF)
    return address
