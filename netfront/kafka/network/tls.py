"""Encrypted connections of the Kafka port, and the contexts that they are made with.

Owner: one gateway.

Invariants:
- A handshake never blocks the loop: it goes on when the socket is ready.
- Certificates stay in use until a reload finds others that can be used.
- A connection keeps the certificates that it was made with.

Source: Python's ssl, which is OpenSSL. TLS 1.2 and 1.3.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

from netfront.kafka.login.login import Login
from netfront.kafka.network.connection import Connection
from shm.rights.kafka_tls import NONE, REQUESTED, REQUIRED, server_context

_FILE_SETTINGS = ("kafka.tls.certificate", "kafka.tls.key", "kafka.tls.client_ca")
_CHUNK_BYTES = 64 << 10


class TlsContexts:
    """The context for new connections, made of the files that the settings name."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Raises TlsError."""
        self._files: tuple[Any, ...] = ()
        self._use(settings)

    def _use(self, settings: dict[str, Any]) -> None:
        certificate, key, authority = (str(settings[name]) for name in _FILE_SETTINGS)
        contexts = {
            auth: server_context(certificate, key, authority, auth)
            for auth in (NONE, REQUESTED, REQUIRED)
        }
        self._files = _versions(settings)
        self._contexts = contexts
        self._chosen = str(settings["kafka.tls.client_auth"])

    def context(self, *, requires_certificate: bool) -> ssl.SSLContext:
        """The context for a connection. `requires_certificate`: its user is that of it."""
        return self._contexts[REQUIRED if requires_certificate else self._chosen]

    def reload(self, settings: dict[str, Any]) -> bool:
        """Use the files again if they have changed. Returns True if they have. Raises TlsError, and
        goes on with the former ones.
        """
        if _versions(settings) == self._files:
            return False
        self._use(settings)
        return True


def _versions(settings: dict[str, Any]) -> tuple[Any, ...]:
    found: list[Any] = [settings["kafka.tls.client_auth"]]
    for name in _FILE_SETTINGS:
        path = settings[name]
        try:
            status = os.stat(path) if path else None
        except OSError:
            status = None
        found.append((path, status and (status.st_ino, status.st_size, status.st_mtime_ns)))
    return tuple(found)


# ---- connections ---------------------------------------------------------------------------------


class TlsConnection(Connection):
    """A client's encrypted socket."""

    reads_records = True

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        now_ns: int,
        context: ssl.SSLContext,
        login: Login | None,
        protocol: str,
    ) -> None:
        super().__init__(sock, address, now_ns, login, protocol)
        self.sock: ssl.SSLSocket = context.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )
        self.is_secure = False
        """True once the handshake is done."""
        self.on_secure: Callable[[], None] = lambda: None
        """Called then."""
        self._is_write_due = False
        self._chunk = b""
        """Bytes that OpenSSL has been given and has not taken: it wants the same again."""

    @property
    def is_stranger(self) -> bool:
        return not self.is_secure or super().is_stranger

    @property
    def is_write_due(self) -> bool:
        return self._is_write_due or super().is_write_due

    def certificate(self) -> dict[str, Any]:
        """The client's certificate, which an authority of the settings has signed. Empty: none."""
        return dict(self.sock.getpeercert() or {})

    def _shake(self) -> bool:
        """Go on with the handshake. Returns True once it is done. Raises OSError."""
        if self.is_secure:
            return True
        self._is_write_due = False
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._is_write_due = True
            return False
        self.is_secure = True
        self.on_secure()
        return not self.is_closed

    def _receive(self, scratch: memoryview) -> int:
        if not self._shake():
            raise BlockingIOError
        try:
            return self.sock.recv_into(scratch)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def _transmit(self, pieces: list[memoryview]) -> int:
        if not self._shake():
            raise BlockingIOError
        if not self._chunk:
            size, some = 0, []
            for piece in pieces:
                some.append(piece[: _CHUNK_BYTES - size])
                size += len(some[-1])
                if size >= _CHUNK_BYTES:
                    break
            self._chunk = b"".join(some)
        try:
            sent = self.sock.send(self._chunk)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        self._chunk = self._chunk[sent:]
        return sent

    def send(self) -> None:
        """Send what the socket takes, or go on with the handshake. Raises OSError."""
        if self._shake():
            super().send()
