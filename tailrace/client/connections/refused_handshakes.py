"""Refused handshakes: why the appliance does not let a connection in, and which key it tries next.

A connection proves its user by the keys of a context. The appliance may rotate its own key, so a
context has several server keys, and the connection tries them in turn.

Owner: one `Connection`.
Invariants:
- A probe runs only while a handshake has no response (see `handshake_probe`).
- Each server key of the context is tried once before a refusal counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.client.connections.runtime import NEVER_NS

if TYPE_CHECKING:
    from tailrace.client.connections.credentials import Credentials
    from tailrace.client.connections.handshake_probe import HandshakeProbe

PROBE_AFTER_NS = 250_000_000
"""Time after which a handshake without a response is probed."""
PROBE_INTERVAL_NS = 25_000_000


class RefusedHandshakes:
    """The credentials of one connection, and the probe of its handshake."""

    def __init__(self, address: str, has_probes: bool) -> None:
        """`address` may name a context. Raises InvalidSettingError."""
        self.address = address
        self.credentials: Credentials | None = None
        self.acting_for = ""
        if address.startswith("context:"):
            from tailrace.client.connections.credentials import resolve

            self.address, self.credentials, self.acting_for = resolve(address)
            if self.address.startswith("ipc://"):
                self.credentials = None  # the account of this process counts there
        self._has_probes = has_probes
        self._probe: HandshakeProbe | None = None
        self._probed_ns = 0
        self._tried_keys = 0
        """Server keys of the context that the appliance does not have, since it was reached."""

    def probe_at_ns(self, opened_ns: int) -> int:
        """The time of the next `refusal` for the handshake of a socket opened then. NEVER_NS: it
        has been probed, or there are no probes.
        """
        if not self._has_probes:
            return NEVER_NS
        if self._probe is None:
            is_done = self._probed_ns >= opened_ns
            return NEVER_NS if is_done else opened_ns + PROBE_AFTER_NS
        return self._probed_ns + PROBE_INTERVAL_NS

    def refusal(self, now_ns: int) -> str | None:
        """The reason why the appliance refuses this client. None: it is not known yet."""
        self._probed_ns = now_ns
        if self._probe is None:
            from tailrace.client.connections.handshake_probe import begin_probe

            self._probe = begin_probe(self.address, self.credentials)
            return None
        reason = self._probe.refusal()
        if reason is not None:
            self.end_probe()
        return reason

    def tries_next_key(self, reason: str) -> bool:
        """True if the appliance may have another server key of the context, which is tried now: it
        rotates its key.
        """
        from tailrace.client.connections.handshake_probe import OTHER_SERVER

        credentials = self.credentials
        if reason != OTHER_SERVER or credentials is None:
            return False
        self._tried_keys += 1
        if self._tried_keys >= len(credentials.server_keys):
            return False
        first, *others = credentials.server_keys
        self.credentials = credentials._replace(server_keys=(*others, first))
        return True

    def on_accepted(self, server_keys: tuple[str, ...]) -> None:
        """The appliance has let the connection in, and has these keys. Store new ones."""
        self.end_probe()
        self._tried_keys = 0
        if server_keys and self.credentials is not None:
            from tailrace.client.connections.credentials import learn

            self.credentials = learn(self.credentials, server_keys)

    def end_probe(self) -> None:
        """Close the probe, if there is one."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def release_probe(self) -> HandshakeProbe | None:
        """Forget the probe, and return it open."""
        probe, self._probe = self._probe, None
        return probe
