"""Connector: makes the connection of an accepted socket, by the protocol of its listener.

Owner: one gateway.

Invariants:
- Where the appliance has users, a connection has a login, or a certificate that says who it is.
- Certificates are read again when the settings are published. Connections keep theirs.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from netfront.kafka.network.connection import Connection
from shm.rights.kafka_listeners import KafkaListener, kafka_listener
from shm.rights.kafka_tls import TlsError

if TYPE_CHECKING:
    from netfront.kafka.login.login import Logins
    from netfront.kafka.network.tls import TlsConnection, TlsContexts

logger = logging.getLogger(__name__)


class Connector:
    """See the module's docstring."""

    def __init__(self, settings: dict[str, Any], logins: Logins | None) -> None:
        """`logins`: of an appliance that has users. Raises TlsError."""
        self.logins = logins
        self.on_secure: Callable[[Connection, str | None, str], None] = lambda *_: None
        """Gets a connection whose client is who its certificate says: the user, or None, and the
        subject of the certificate.
        """
        self.listeners: list[KafkaListener] = [
            kafka_listener(
                text,
                has_users=logins is not None,
                has_certificate=bool(settings["kafka.tls.certificate"]),
            )
            for text in settings["kafka.listen"]
        ]
        self._tls: TlsContexts | None = None
        if any(listener.has_tls for listener in self.listeners):
            from netfront.kafka.network.tls import TlsConnection, TlsContexts
            from shm.rights.certificate_names import PrincipalRules

            self._tls = TlsContexts(settings)
            self._make = TlsConnection
            self._rules = PrincipalRules(settings["kafka.tls.principal.mapping.rules"])

    def connect(self, sock: socket.socket, address: str, now_ns: int, number: int) -> Connection:
        """The connection of a socket that the listener of this number has accepted. Raises
        OSError.
        """
        listener = self.listeners[number]
        login = None
        if self.logins is not None and listener.has_sasl:
            host = address.rpartition(":")[0]
            login = self.logins.login(host, has_tls=listener.has_tls)
        if not listener.has_tls:
            return Connection(sock, address, now_ns, login, listener.protocol)
        assert self._tls is not None
        is_user = self.logins is not None and login is None
        context = self._tls.context(requires_certificate=is_user)
        made = self._make(sock, address, now_ns, context, login, listener.protocol)
        if is_user:
            made.on_secure = lambda: self._identify(made)
        return made

    def _identify(self, connection: TlsConnection) -> None:
        from shm.rights.certificate_names import distinguished_name

        subject = distinguished_name(connection.certificate())
        self.on_secure(connection, self._rules.user(subject), subject)

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings, and certificates and keys that have been replaced."""
        if self.logins is not None and self.logins.tokens is not None:
            self.logins.tokens.apply_settings(settings)
        if self._tls is None:
            return
        try:
            if self._tls.reload(settings):
                logger.info("kafka_certificates_reloaded")
        except TlsError as error:
            logger.error("kafka_certificates_not_reloaded reason=%r", str(error))
