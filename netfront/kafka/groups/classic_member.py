"""Members of a classic group, and their requests to join."""

from __future__ import annotations

from dataclasses import dataclass

from netfront.kafka.exchange.waiter import Waiter
from netfront.kafka.wire.errors import KafkaError

MS = 1_000_000


class GroupError(Exception):
    """A request that is answered with an error."""

    def __init__(self, code: KafkaError) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(slots=True)
class Join:
    """A JoinGroup request."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: list[tuple[str, bytes]]
    requires_known_id: bool
    """True since version 4: a new member asks again with the id that it is given."""
    can_skip_assignment: bool
    """True since version 9."""
    user: str = ""
    """"": the appliance has no users."""


@dataclass(slots=True)
class Member:
    """A member of a group."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    session_timeout_ns: int
    rebalance_timeout_ns: int
    protocols: list[tuple[str, bytes]]
    expires_ns: int
    user: str = ""
    """The user whose member it is."""
    assignment: bytes = b""
    joining: Waiter | None = None
    syncing: Waiter | None = None
    was_synced: bool = False
    """True if it asked for the assignment of this generation."""

    def metadata(self, protocol: str) -> bytes:
        """Metadata of the member for a protocol."""
        return next((data for name, data in self.protocols if name == protocol), b"")

    def check_user(self, user: str) -> None:
        """Raises GroupError for another user's member."""
        if self.user != user:
            raise GroupError(KafkaError.GROUP_AUTHORIZATION_FAILED)
