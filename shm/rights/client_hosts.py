"""Client hosts: the address that a client comes from, as rules of access name it.

A socket for IPv6 and IPv4, such as `[::]`, shows clients over IPv4 as `::ffff:10.0.0.1`, and those
of a local link with the zone of an interface (`fe80::1%eth0`). A rule has the plain address. So
that a denial is not passed by, rules and clients are compared without both.

Owner: none; pure functions.
"""

from __future__ import annotations


def plain_host(host: str) -> str:
    """The address without a zone, and of IPv4 where it is a mapped one. Other texts stay."""
    if ":" not in host:
        return host
    import ipaddress  # rare: most clients come over IPv4

    try:
        found = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(found.ipv4_mapped or found)


def network_of(host: str) -> str:
    """The address by which attempts of a client are counted: of IPv6 its first 64 bits, since a
    host has all addresses of its network.
    """
    plain = plain_host(host)
    groups = plain.split(":")
    if len(groups) < 3:
        return plain
    import ipaddress

    try:
        return str(ipaddress.IPv6Network(f"{plain}/64", strict=False))
    except ValueError:
        return plain
