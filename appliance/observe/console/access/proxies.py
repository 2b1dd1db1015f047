"""Proxies before the console: the address of the client that a request comes from.

Invariants:
- Pure: a function of a request's headers, its peer's address and the setting `http.proxies`.
- X-Forwarded-For counts only in what a configured proxy sends: anybody can write that header.
- A proxy appends the address that it was asked from. So the last one that is no proxy's counts:
  what stands before it was written by the client.

Source: RFC 7239, section 5.2; `set_real_ip_from` and `real_ip_recursive` of nginx.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

from shm.rights.client_hosts import plain_host

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks_of(texts: Iterable[str]) -> list[Network]:
    """Addresses and networks. Raises ValueError, with the first that is none."""
    return [ipaddress.ip_network(text) for text in texts]


def client_address(environ: Mapping[str, Any], proxies: list[Network]) -> str:
    """The client's address: the peer's, or the one that proxies name."""
    found = str(environ.get("REMOTE_ADDR", ""))
    named = str(environ.get("HTTP_X_FORWARDED_FOR", "")).split(",")
    while named and _is_of(found, proxies):
        before = _address_in(named.pop().strip())
        if not before:
            break
        found = before
    return found


def _is_of(address: str, networks: list[Network]) -> bool:
    try:
        found = ipaddress.ip_address(plain_host(address))
    except ValueError:
        return False
    return any(found in network for network in networks)


def _address_in(text: str) -> str:
    """The address of an entry, which may have a port; "" if there is none."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(plain_host(text)))
    except ValueError:
        return ""
