"""Listeners of the Kafka port: an address, and the security protocol that it speaks.

    [PROTOCOL://]HOST:PORT

Owner: pure. The supervisor checks them, the gateway listens on them.

Source: Kafka's listeners and security protocols.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL = "PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"
PROTOCOLS: Final = (PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL)


class KafkaListener(NamedTuple):
    """One address of `kafka.listen`."""

    protocol: str
    address: str
    """HOST:PORT."""

    @property
    def has_tls(self) -> bool:
        return self.protocol in (SSL, SASL_SSL)

    @property
    def has_sasl(self) -> bool:
        """True if clients log in by SASL."""
        return self.protocol in (SASL_PLAINTEXT, SASL_SSL)


def kafka_listener(text: str, *, has_users: bool, has_certificate: bool) -> KafkaListener:
    """The listener of a setting's text. Without a protocol it is SASL_... where clients must be
    users, and ...SSL where there is a certificate. Raises ValueError for an unknown protocol.
    """
    name, separator, address = text.rpartition("://")
    if not separator:
        if has_users:
            protocol = SASL_SSL if has_certificate else SASL_PLAINTEXT
        else:
            protocol = SSL if has_certificate else PLAINTEXT
        return KafkaListener(protocol, address)
    if name.upper() not in PROTOCOLS:
        raise ValueError(
            f"kafka.listen has the protocol {name!r:.40}; it takes {', '.join(PROTOCOLS)}"
        )
    return KafkaListener(name.upper(), address)


def advertised_for(text: str, protocol: str) -> str:
    """The HOST:PORT that clients of a protocol are told, of the setting's list `HOST:PORT` or
    `PROTOCOL://HOST:PORT,...`. "": the one that each has connected to.
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part.upper().startswith(f"{protocol}://"):
            return without_protocol(part)
    return next((part for part in parts if "://" not in part), "")


def without_protocol(text: str) -> str:
    """HOST:PORT of a listener's text."""
    return text.rpartition("://")[2]
