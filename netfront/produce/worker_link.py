"""Links of a front to the workers: a lane, the doorbell at its end, and the ring that answers.

Owner: one front, as `ProduceService` connects them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from netfront.produce.ring_acks import AckWalker
from netfront.session.sessions import Session
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneWriter
from shm.queues.outbox import Outbox
from shm.queues.ring import Ring
from tailrace.format.crc32c import Readable


class WaitingBatch(NamedTuple):
    """A batch that waits for space in its worker's lane."""

    kind: int
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

    outbox: Outbox[WaitingBatch]
    ring: Ring
    acks: AckWalker
