"""Memberships of transformers in a consumer group, past the SDK.

A member heartbeats over a connection of its own, takes what it is assigned and gives back what it
is not. It leaves and joins again at random, also while a transaction is open with offsets of what
it had: these the appliance has to refuse.

Owner: one life of a transactional program.
Invariants: `identity` names the member and the epoch of its latest assignment.
"""

from __future__ import annotations

import random
from typing import Any

from tailrace.client.connections.connection import Connection
from tailrace.core.error_codes import ErrorCode
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response
from tests.sim.actors import Inbox
from tests.sim.machine.machine_parts import ADDRESS, MS
from tests.sim.machine.world import World

HEARTBEAT_NS = 50 * MS
LOST = frozenset({ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER, ErrorCode.PARTITION_NOT_OWNED})
"""Errors of a commit whose partition another member may have."""
_REPEATED = frozenset({
    ErrorCode.NOT_READY, ErrorCode.TIMED_OUT, ErrorCode.STORAGE_ERROR, ErrorCode.DISK_FULL,
    ErrorCode.TOO_MANY_REQUESTS, ErrorCode.SHUTTING_DOWN,
})  # fmt: skip


class Membership:
    """One member, subscribed to one topic."""

    def __init__(self, world: World, rng: random.Random, group: str, topic: str, name: str) -> None:
        self._rng = rng
        self._group = group
        self._topic = topic
        self._name = name
        self.connection = Connection(ADDRESS, f"{name} member", world.runtime)
        self._inbox = Inbox()
        self._member_id = ""
        self._epoch = 0
        self._owned: dict[str, list[int]] = {}
        self._is_reported = False
        """The group knows what it owns."""
        self._is_asking = False
        self._heartbeat_at_ns = 0

    @property
    def identity(self) -> dict[str, Any]:
        """The member as offsets name it."""
        return {"member_id": self._member_id, "member_epoch": self._epoch}

    def owns(self, place: TopicPartition) -> bool:
        """True if it may read the partition."""
        return self._is_reported and any(place.partition in one for one in self._owned.values())

    def pump(self) -> None:
        """Heartbeat when it is due."""
        self.connection.process()
        now_ns = self.connection.now_ns()
        self.connection.tick(now_ns)
        self._inbox.handle()
        if not self._is_asking and self.connection.is_ready and now_ns >= self._heartbeat_at_ns:
            self._heartbeat()

    def leave(self) -> None:
        """Leave, and join again as another member. What was read stays with the program."""
        if self._epoch and not self._is_asking and self.connection.is_ready:
            self._send({"group": self._group, "member_id": self._member_id, "member_epoch": -1})
            self._epoch, self._owned, self._is_reported = 0, {}, False

    def close(self) -> None:
        """SIGKILL."""
        self.connection.close()

    def _heartbeat(self) -> None:
        request: dict[str, Any] = {"group": self._group}
        if not self._epoch:
            self._member_id = f"{self._rng.getrandbits(128):032x}"
            request |= {
                "kind": "consumer", "topics": [self._topic], "session_timeout_ms": 6_000,
                "rebalance_timeout_ms": 60_000, "heartbeat_interval_ms": HEARTBEAT_NS // MS,
                "client_id": self._name,
            }  # fmt: skip
        request |= {"member_id": self._member_id, "member_epoch": self._epoch}
        if not self._is_reported:
            request["owned"] = self._owned
        self._send(request)

    def _send(self, request: dict[str, Any]) -> None:
        sent = self._member_id

        def answered(response: Response | None) -> None:
            self._is_asking = False
            if sent == self._member_id and request["member_epoch"] >= 0:
                self._on_response(response, "owned" in request)

        self._is_asking = self.connection.request(
            Api.GROUP_HEARTBEAT, [requests.encode_json(request)], self._inbox.later(answered)
        )
        self._heartbeat_at_ns = self.connection.now_ns() + HEARTBEAT_NS

    def _on_response(self, response: Response | None, has_said: bool) -> None:
        if response is not None and response.code in LOST:
            self._epoch, self._owned, self._is_reported = 0, {}, False
        elif response is not None and response.code is ErrorCode.OK:
            answer = requests.decode_json(response.body[0])
            self._epoch = answer["member_epoch"]
            assigned = answer.get("assignment", self._owned)
            self._is_reported = "assignment" not in answer or (has_said and assigned == self._owned)
            self._owned = assigned
            if not self._is_reported:
                self._heartbeat_at_ns = 0
        else:
            assert response is None or response.code in _REPEATED, response.detail()
            self._is_reported = False

    def next_wake_ns(self, now_ns: int) -> int:
        """The time of the next heartbeat."""
        tick_ns = self.connection.next_tick_ns()
        wake_ns = now_ns + HEARTBEAT_NS if tick_ns is None else tick_ns
        return wake_ns if self._is_asking else min(wake_ns, max(self._heartbeat_at_ns, now_ns + MS))
