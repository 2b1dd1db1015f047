"""Membership in a share group: the member's state (sans-IO) and the thread of its heartbeats.

It is a consumer group's membership without an assignment: a member acquires records one by one.

Owner: one share consumer. `HeartbeatManager.lock` guards the state (`tailrace.group.heartbeat`).

Invariants: those of `tailrace.group.membership`; `taken` stays empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from tailrace.client.connections.runtime import Runtime
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.group.heartbeat import HeartbeatThread
from tailrace.group.membership import MemberIdentity, Membership, Phase
from tailrace.share.settings import ShareConsumerSettings

NO_POLL_LIMIT_MS = 0x7FFFFFFF
"""A share group has no max_poll_interval_ms: the locks of records expire instead."""


class ShareMembership(Membership):
    """The state of one member. `has_events` is also set when the member has joined."""

    def __init__(self, identity: MemberIdentity, offset_reset: str, now_ns: int) -> None:
        """`offset_reset` is "earliest" or "latest": the group's start in partitions new to it."""
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


class ShareMember:
    """A share consumer as a member of its group."""

    def __init__(self, settings: ShareConsumerSettings, runtime: Runtime) -> None:
        group = settings.group_id
        assert group is not None
        self._now_ns = runtime.monotonic_ns
        self._has_thread = runtime.has_threads
        identity = MemberIdentity(
            group,
            uuid4().hex,
            None,
            settings.client_id,
            "",
            settings.session_timeout_ms,
            settings.heartbeat_interval_ms,
            NO_POLL_LIMIT_MS,
        )
        self.membership = ShareMembership(identity, settings.auto_offset_reset, self._now_ns())
        self.thread = HeartbeatThread(
            self.membership, settings.bootstrap_servers, settings.client_id, runtime
        )
        self.wakeup: Callable[[], None] = self._wakeup
        """Called when a heartbeat may be due."""

    def _wakeup(self) -> None:
        if self._has_thread:
            self.thread.start()
            self.thread.wakeup()
        else:
            self.thread.beats.step()

    @property
    def is_joined(self) -> bool:
        return self.membership.phase is Phase.MEMBER

    @property
    def is_joining(self) -> bool:
        """True until the group has answered a join, or the leave before; poll raises a refusal."""
        return self.membership.phase in (Phase.JOINING, Phase.LEAVING)

    def leaves_until_ns(self, until_ns: int) -> int:
        """See `HeartbeatManager.leaves_until_ns`."""
        return self.thread.beats.leaves_until_ns(until_ns)

    @property
    def wake_fd(self) -> int:
        """Readable when the membership has events, or where no thread makes heartbeats, when the
        heartbeats' connection has input.
        """
        return self.thread.events.fd if self._has_thread else self.thread.beats.connection.fileno()

    def wait_until_ns(self, until_ns: int) -> int:
        """Limit a wait to the next heartbeat, where no thread makes heartbeats."""
        return until_ns if self._has_thread else min(until_ns, self.thread.beats.next_ns())

    def subscribe(self, names: list[str]) -> None:
        """Join the group, or replace the member's topics."""
        with self.thread.beats.lock:
            self.membership.subscribe(names, False, self._now_ns())

    def step(self) -> None:
        """Make the heartbeat that is due, where no thread makes heartbeats."""
        if not self._has_thread:
            self.wakeup()

    def pop_events(self) -> tuple[str | None, TailraceError | None]:
        """Return the events since the last call: the reason why the membership was lost (None: it
        was not), and the error that keeps the consumer from joining.
        """
        membership = self.membership
        if not membership.has_events:
            return None, None
        lost_reason = None
        with self.thread.beats.lock:
            self.thread.events.clear()
            membership.has_events = False
            if membership.phase is Phase.LOST:
                change = membership.next_change()
                lost_reason = "" if change is None else change.reason
                lost_reason = lost_reason or "the group has removed this consumer"
                membership.ack_lost(self._now_ns())
            error = membership.pop_error(self._now_ns())
        self.wakeup()
        return lost_reason, error

    def leave(self) -> None:
        """Begin to leave the group; `leaves_until_ns` tells when it is done."""
        with self.thread.beats.lock:
            self.membership.leave(self._now_ns())
        self.wakeup()

    def heartbeat_step(self) -> None:
        """Go on joining or leaving after a wait."""
        if self._has_thread:
            self.thread.events.clear()
        else:
            self.wakeup()
