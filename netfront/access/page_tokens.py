"""Page tokens that do not tell names which their reader may not see: sealed, and opened again.

Owner: none; a function of the appliance's secret. All fronts, and those after a restart, open each
other's tokens.

Invariants:
- A sealed token tells only about how long the name is, to 64 bytes.
- A token that was not sealed here is refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os

from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import WireError

SEALED = "\x00"
"""Begins a sealed token."""
_NONCE_BYTES = _MAC_BYTES = 16
_PADDED_TO = 64


class PageTokens:
    """Seals and opens tokens."""

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"tailrace-pages").digest()

    def seal(self, name: str) -> str:
        """The token of a page that ends with a name."""
        plain = name.encode()
        plain = len(plain).to_bytes(4, "big") + plain
        plain += bytes(-len(plain) % _PADDED_TO)
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + self._mixed(nonce, plain)
        return SEALED + base64.urlsafe_b64encode(sealed + self._mac(sealed)).decode()

    def open(self, token: str) -> str:
        """The name of a sealed token. Raises WireError."""
        try:
            raw = base64.urlsafe_b64decode(token.removeprefix(SEALED))
        except ValueError:
            raw = b""
        sealed, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(sealed)):
            raise WireError(
                ErrorCode.INVALID_REQUEST,
                "the page token is not one of this appliance: begin the list again without it",
            )
        plain = self._mixed(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:])
        return plain[4 : 4 + int.from_bytes(plain[:4], "big")].decode()

    def _mixed(self, nonce: bytes, text: bytes) -> bytes:
        """Encrypt, or decrypt."""
        stream = hashlib.shake_256(self._key + nonce).digest(len(text))
        return bytes(a ^ b for a, b in zip(text, stream, strict=True))

    def _mac(self, sealed: bytes) -> bytes:
        return hashlib.blake2b(sealed, key=self._key, digest_size=_MAC_BYTES).digest()
