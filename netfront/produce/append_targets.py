"""Append targets of a front: the lane and the limits of each partition. They are kept until routes,
rights or quotas change.

Owner: one front.

Invariants: a target that a principal is given is one that it may write to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from netfront.partition_routes import PartitionRoutes
from netfront.produce.worker_link import ConnectedWorker, WaitingBatch
from shm.queues.outbox import Outbox
from tailrace.core.error_codes import ErrorCode
from tailrace.core.hash_slots import VERSION_MAX
from tailrace.format.crc32c import Readable

if TYPE_CHECKING:
    from shm.rights.authorizer import Principal


class AppendTarget(NamedTuple):
    """Append target of a partition, derived once from its route."""

    outbox: Outbox[WaitingBatch]
    write: Callable[[int, int, int, int, int, int, tuple[Readable]], bool]
    """Write function of the lane."""
    slot: int
    bytes_max: int
    has_slot_maps: bool
    refuses: int
    """Error code if nothing may be appended: to the delay log of a topic with delay.enabled=false,
    and beyond a quota. Else 0.
    """
    owner: int
    """Number of the user to whom delayed records belong that are sent here; 0 for none."""


def refusal_code(target: AppendTarget, length: int, slot_map_version: int) -> ErrorCode:
    """Return the error code for a batch of this length and slot map version."""
    if length > target.bytes_max:
        return ErrorCode.RECORD_TOO_LARGE
    if target.refuses:
        return ErrorCode(target.refuses)
    is_routed = not target.has_slot_maps or 0 < slot_map_version <= VERSION_MAX
    return ErrorCode.UNSUPPORTED_BATCH if is_routed else ErrorCode.INVALID_REQUEST


class AppendTargets:
    """The targets by topic id and partition, and for each principal those that it has used."""

    def __init__(self, routing: PartitionRoutes, workers: dict[int, ConnectedWorker]) -> None:
        self._routing = routing
        self._workers = workers
        self._targets: dict[tuple[bytes, int], AppendTarget] = {}
        """Cleared when routes change."""
        self._targets_of = -1
        """`PartitionRoutes.changes` at the time the targets were made."""
        self._blocked: frozenset[bytes] = frozenset()
        """Ids of topics beyond a quota of stored bytes or delayed records."""
        self._blocked_changes = 0

    def block(self, topic_ids: frozenset[bytes]) -> None:
        """Refuse batches for these topics and delay logs, and for no others."""
        self._blocked = topic_ids
        self._targets.clear()
        self._blocked_changes += 1

    def known(self, principal: Principal | None) -> dict[tuple[bytes, int], AppendTarget]:
        """The targets found so far, of a principal those that it may write to."""
        if principal is None:
            if self._targets_of != self._routing.changes:
                self._targets.clear()
                self._targets_of = self._routing.changes
            return self._targets
        made_after = self._routing.changes, self._blocked_changes
        if principal.targets_of != made_after:
            principal.targets.clear()
            principal.targets_of = made_after
        return principal.targets

    def find(
        self, topic_id: bytes, partition: int, principal: Principal | None
    ) -> AppendTarget | None:
        """Find and keep a target. None: see `refusal`."""
        route = self._routing.find(topic_id, partition)
        if route is None:
            return None
        targets = self._targets
        if principal is not None:
            name = self._routing.topic_name(topic_id) or ""
            if not principal.may("write", "topic", name):
                return None
            targets = principal.targets
        outbox = self._workers[route.worker].outbox
        lane, settings = outbox.lane, route.settings
        refuses = 0
        if topic_id in self._blocked:
            refuses = int(ErrorCode.QUOTA_EXCEEDED)
        elif route.delay_of and not settings["delay.enabled"]:
            refuses = int(ErrorCode.DELAY_NOT_ENABLED)
        target = targets[topic_id, partition] = AppendTarget(
            outbox, lane.try_write, route.slot,
            min(int(settings["max.message.bytes"]), lane.payload_max), bool(route.slot_counts),
            refuses, _owner(principal) if route.delay_of else 0,
        )  # fmt: skip
        return target

    def refusal(self, topic_id: bytes, principal: Principal | None) -> ErrorCode:
        """The error code for a batch without a target."""
        if not self._routing.knows(topic_id):
            return ErrorCode.UNKNOWN_TOPIC
        if principal is not None:
            name = self._routing.topic_name(topic_id) or ""
            if not principal.may("write", "topic", name):
                is_visible = principal.may("describe", "topic", name)
                return ErrorCode.NOT_AUTHORIZED if is_visible else ErrorCode.UNKNOWN_TOPIC
        return ErrorCode.PARTITION_OUT_OF_RANGE


def _owner(principal: Principal | None) -> int:
    """The owner of delayed records that a principal sends. Those of an administrator, and of the
    appliance itself, have none: they are changed by rights alone.
    """
    if principal is None or principal.is_admin:
        return 0
    from netfront.access.delay_owners import owner_number

    return owner_number(principal.user)
