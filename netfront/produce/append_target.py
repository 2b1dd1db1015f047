"""Append targets of a front: the lanes to the workers, and the lane and limits of each partition.

Owner: one front; values that `ProduceService` derives from routes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from netfront.produce.ring_acks import AckWalker
from netfront.session.sessions import Session
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneWriter
from shm.queues.outbox import Outbox
from shm.queues.ring import Ring
from tailrace.core.error_codes import ErrorCode
from tailrace.core.hash_slots import VERSION_MAX
from tailrace.format.crc32c import Readable


class Batch(NamedTuple):
    """A batch that waits for space in its worker's lane."""

    slot: int
    flags: int
    session: Session
    batch_token: int
    arrival_ns: int
    batch: Readable


@dataclass(slots=True)
class WorkerLink:
    """Lane to one worker, and the worker's ring."""

    lane: LaneWriter
    bell: Doorbell
    ring: Ring
    acks: AckWalker


class ConnectedWorker(NamedTuple):
    """A connected worker."""

    outbox: Outbox[Batch]
    ring: Ring
    acks: AckWalker


class AppendTarget(NamedTuple):
    """Append target of a partition, derived once from its route."""

    outbox: Outbox[Batch]
    write: Callable[[int, int, int, int, int, int, tuple[Readable]], bool]
    """Write function of the lane."""
    slot: int
    bytes_max: int
    has_slot_maps: bool
    refuses: int
    """Error code if nothing may be appended: to the delay log of a topic with delay.enabled=false,
    and beyond a quota. Else 0.
    """


def refusal_code(target: AppendTarget, length: int, slot_map_version: int) -> ErrorCode:
    """Return the error code for a batch of this length and slot map version."""
    if length > target.bytes_max:
        return ErrorCode.RECORD_TOO_LARGE
    if target.refuses:
        return ErrorCode(target.refuses)
    is_routed = not target.has_slot_maps or 0 < slot_map_version <= VERSION_MAX
    return ErrorCode.UNSUPPORTED_BATCH if is_routed else ErrorCode.INVALID_REQUEST
