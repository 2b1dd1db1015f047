"""A member's side of a share group, sans-IO: as of a consumer group, without partitions of its own:
what it is given, it asks for record by record.

Owner, invariants: those of `tailrace.group.membership`; `taken` stays empty.
"""

from __future__ import annotations

from typing import Any

from tailrace.core.error_codes import ErrorCode
from tailrace.group.membership import MemberIdentity, Membership, Phase


class ShareMembership(Membership):
    """See the module's docstring. `has_events` also says that it has joined."""

    def __init__(self, identity: MemberIdentity, offset_reset: str, now_ns: int) -> None:
        """`offset_reset`: where the group begins on partitions that it has never seen, "earliest"
        or "latest".
        """
        super().__init__(identity, now_ns)
        self._offset_reset = offset_reset

    def _heartbeat(self, now_ns: int) -> tuple[int, dict[str, Any]]:
        token, request = super()._heartbeat(now_ns)
        request["kind"] = "share"
        if self.phase is Phase.JOINING:
            request["offset_reset"] = self._offset_reset
        for name in ("owned", "follows_catalog", "assignor", "rebalance_timeout_ms"):
            request.pop(name, None)
        return token, request

    def answered(
        self, token: int, code: ErrorCode, detail: str, answer: dict[str, Any], now_ns: int
    ) -> None:
        """See `Membership.answered`."""
        was_joining = self.phase is Phase.JOINING
        super().answered(token, code, detail, answer, now_ns)
        if was_joining and self.phase is Phase.MEMBER:
            self.has_events = True
