"""Reachability of the appliance: since when a connection has found none, and what its user is told.

Owner: one connection.
Invariants: a connected client is neither warned nor refused. Time in which the connection was not
used does not count as waiting.
"""

from __future__ import annotations

from tailrace.client.connections import ipc_socket
from tailrace.client.connections.runtime import NEVER_NS
from tailrace.core.errors import NotReachableError, TailraceError
from tailrace.core.log import logger

WARN_AFTER_NS = 1_000_000_000
"""Time without an appliance after which the log says so. A program that blocks silently looks hung.
"""
UNREACHABLE_AFTER_NS = 60_000_000_000
"""Time without an appliance after which a poll raises."""
AWAY_AFTER_NS = 2_000_000_000
"""Time without an appliance after which a client that ends has nothing more to tell it. A restart
takes less.
"""


class Reachability:
    """The appliance at one address, as its connection has found it."""

    def __init__(self, address: str, owner: str, now_ns: int) -> None:
        """`owner`: the client's name in messages."""
        self._address = address
        self._owner = owner
        self.gives_up = False
        """True if the connection's user waits for an appliance for a bounded time."""
        self.is_silent = False
        """True for a further connection of a client, whose first one warns."""
        self.away_since_ns = 0
        """Time since when polls find no appliance. 0: the last one found it."""
        self._unready_since_ns = now_ns
        """Time since when requests cannot be sent. 0: they can."""
        self._waited_since_ns = 0
        """Time since when its user waits for an appliance. 0: it is connected, or was not used."""
        self._has_warned = False
        self._was_ready = False
        self._protocol_error = ""
        """The error of a peer at the address that is not an appliance."""
        self._quota_refusal = ""
        """The reason why the appliance has refused the last handshake for a quota."""

    def on_ready(self) -> None:
        """The handshake has its response."""
        self._unready_since_ns = self._waited_since_ns = 0
        self._has_warned = False
        self._was_ready = True
        self._protocol_error = self._quota_refusal = ""

    def on_lost(self, now_ns: int) -> None:
        """The socket was given up."""
        self._unready_since_ns = self._unready_since_ns or now_ns

    def on_protocol_error(self, error: str) -> None:
        """A message of the peer is not of this protocol, or inconsistent."""
        self._protocol_error = error

    def on_quota_refusal(self, reason: str) -> None:
        """The appliance refuses the handshake for a quota."""
        self._quota_refusal = reason

    def check(self, now_ns: int) -> None:
        """A poll finds no appliance. Raises NotReachableError after UNREACHABLE_AFTER_NS of it."""
        if not self.away_since_ns:
            self.away_since_ns = now_ns
        elif now_ns - self.away_since_ns > UNREACHABLE_AFTER_NS:
            raise NotReachableError(
                f"no appliance answers at {self._address}{self.peer_error_suffix()}"
            )

    def away_at_ns(self) -> int:
        """The time from which the end of a client waits no longer for the appliance: it has been
        away for AWAY_AFTER_NS. NEVER_NS while it is connected.
        """
        return self._unready_since_ns + AWAY_AFTER_NS if self._unready_since_ns else NEVER_NS

    def warning_at_ns(self) -> int:
        """The time when `warn` has something to do. NEVER_NS: it has warned, or nobody waits."""
        return (
            self._waited_since_ns + WARN_AFTER_NS
            if self._waited_since_ns and not self._has_warned
            else NEVER_NS
        )

    def warn(self, now_ns: int) -> TailraceError | None:
        """Log once that the client has waited for an appliance for WARN_AFTER_NS. Returns an error
        that ends the connection: without permission for the socket, only a client that was
        connected goes on.
        """
        if self.is_silent:
            return None
        if not self._waited_since_ns:
            self._waited_since_ns = now_ns
        elif not self._has_warned and now_ns - self._waited_since_ns >= WARN_AFTER_NS:
            self._has_warned = True
            error = ipc_socket.permission_error(self._address)
            if error is not None and not self._was_ready:
                return error
            if not self.gives_up:  # else the error that its user raises says it
                reason = self.peer_error_suffix() if error is None else f": {error.detail}"
                message = "the %s gets no answer at %s%s; it goes on trying"
                logger.warning(message, self._owner, self._address, reason)
        return None

    def peer_error_suffix(self) -> str:
        """A clause about a peer that is no appliance, or refuses the connection, or about a socket
        without one; or "".
        """
        if self._quota_refusal:
            return f": it refuses the connection, for {self._quota_refusal}"
        return (
            f"; the peer there does not speak Tailrace's protocol ({self._protocol_error[:200]})"
            if self._protocol_error
            else ipc_socket.absence(self._address)
        )
