"""Leases of groups whose members speak Kafka's classic protocol to a gateway.

The gateway has these members, and renews a lease while there are some. Meanwhile no member joins
the group by another protocol, deletes it, or changes its offsets from outside.

Owner: the service. Leases are in memory: after a restart of this process they are renewed within
seconds, by the heartbeats of the members.

Invariants:
- A lease is given only for a group without members of another protocol.
"""

from __future__ import annotations

from typing import Any

import orjson

from appliance.groups.base.request_validation import shown
from tailrace.core.errors import GroupNotEmptyError, InvalidGroupError, InvalidRequestError

CLASSIC = "classic"
LEASE_MAX_MS = 300_000
LEASES_MAX = 100_000


class ClassicLeases:
    """Until when each group has classic members."""

    def __init__(self) -> None:
        self._until_ns: dict[str, int] = {}

    def handle(self, name: str, request: dict[str, Any], now_ns: int, members: int) -> bytes:
        """Handle a heartbeat of kind "classic": epoch -1 ends the lease. Returns the answer's body.

        `members`: those of another protocol. Raises TailraceError.
        """
        epoch = request.get("member_epoch")
        if epoch == -1:
            self._until_ns.pop(name, None)
        else:
            duration_ms = request.get("session_timeout_ms")
            if type(duration_ms) is not int or not 0 < duration_ms <= LEASE_MAX_MS:
                raise InvalidRequestError(
                    f"session_timeout_ms is {shown(duration_ms)}; a lease takes 1 to {LEASE_MAX_MS}"
                )
            if members:
                raise InvalidGroupError(
                    f"{shown(name)} has {members} members that do not speak Kafka's classic "
                    "protocol: stop them first, or use another group"
                )
            if len(self._until_ns) >= LEASES_MAX:
                self._forget(now_ns)
            self._until_ns[name] = now_ns + duration_ms * 1_000_000
        return orjson.dumps({"member_id": "", "member_epoch": 0})

    def _forget(self, now_ns: int) -> None:
        self._until_ns = {name: at for name, at in self._until_ns.items() if at > now_ns}
        if len(self._until_ns) >= LEASES_MAX:
            raise InvalidGroupError(f"there are {LEASES_MAX} classic groups; use fewer")

    def has(self, name: str, now_ns: int) -> bool:
        """True if the group has classic members."""
        until_ns = self._until_ns.get(name)
        if until_ns is None:
            return False
        if until_ns <= now_ns:
            del self._until_ns[name]
            return False
        return True

    def check_join(self, name: str, now_ns: int) -> None:
        """Raises InvalidGroupError for a group with classic members."""
        if self.has(name, now_ns):
            raise InvalidGroupError(
                f"{shown(name)} has members that speak Kafka's classic protocol: stop them and "
                "wait a minute, or use another group"
            )

    def check_empty(self, name: str, now_ns: int) -> None:
        """Raises GroupNotEmptyError for a group with classic members."""
        if self.has(name, now_ns):
            raise GroupNotEmptyError(
                f"the group {name} has members that speak Kafka's classic protocol"
            )
