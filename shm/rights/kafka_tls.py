"""TLS of the Kafka port: the server's context, made of the files that the settings name.

Owner: pure. The gateway serves with the contexts, a dry run of `serve` only makes them.

Invariants:
- TLS 1.2 or newer, without compression and renegotiation.
- The key has no passphrase; an encrypted one is refused.

Source: Python's ssl, which is OpenSSL. It is imported with the first context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

NONE, REQUESTED, REQUIRED = "none", "requested", "required"
"""Values of kafka.tls.client_auth."""


class TlsError(Exception):
    """Certificates that cannot be used."""


def server_context(certificate: str, key: str, authority: str, client_auth: str) -> ssl.SSLContext:
    """The context of a server. `key` is "" if it is in the file of the certificate; `authority`
    signs the certificates of clients, "" for none. Raises TlsError.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(certificate, key or None, password=_no_password)
    except (OSError, ValueError) as error:
        raise TlsError(
            f"the certificate {certificate} (kafka.tls.certificate) with the key "
            f"{key or certificate} (kafka.tls.key) cannot be used: {_reason(error)}"
        ) from None
    if client_auth == NONE or not authority:
        return context
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise TlsError(
            f"{authority} (kafka.tls.client_ca) cannot be used: {_reason(error)}"
        ) from None
    context.verify_mode = ssl.CERT_REQUIRED if client_auth == REQUIRED else ssl.CERT_OPTIONAL
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted: store it without a passphrase, with mode 0600")


def _reason(error: Any) -> str:
    """The clause of an OSError, which SSLError is too, or of a ValueError."""
    reason = getattr(error, "reason", None)  # of an SSLError
    return str(reason or getattr(error, "strerror", None) or error)
