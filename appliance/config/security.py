"""Security of an appliance: on, or off, by its settings.

Owner: pure.

Invariants:
- An address that other hosts reach has security, unless the operator calls the network trusted.
"""

from __future__ import annotations

from collections.abc import Iterable

ON, OFF, AUTO = "true", "false", "auto"
CHOICES = (AUTO, ON, OFF)


def is_local(address: str) -> bool:
    """True if only processes of this host reach the address."""
    if not address.startswith("tcp://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].lower()
    return host == "localhost" or host == "[::1]" or host.startswith("127.")


def open_addresses(listen: Iterable[str]) -> list[str]:
    """The addresses that other hosts reach."""
    return [address for address in listen if not is_local(address)]


def is_secured(enabled: str, listen: Iterable[str], *, is_trusted_network: bool) -> bool:
    """True if the appliance requires users."""
    if enabled == AUTO:
        return bool(open_addresses(listen)) and not is_trusted_network
    return enabled == ON
