"""Due rows of a partition: those that are released, in their order, and the batch of them that is
on its way to the worker.

A delivered batch carries the key of its last row and the key delivered before its first. The worker
refuses a batch that does not follow, is not closed, or is not due by its clock.

Owner: the scheduler, one for each partition.

Invariants:
- `ready` ascends by (tick, offset), and all of it comes behind what is in flight.
- One batch at a time is in flight. Its rows are delivered, or ready again.
- Rows behind the closed tick are not here (see `delivery_marks`).

Crash: the partition table has the last delivered row. Rows up to there are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shm.crash_points import crash_point
from shm.messages.lane_messages import Assignment
from tailrace.core.schedule.delays import TICK_BITS, TICK_MASK, TICK_US
from workers.delays.dead_delays import DeadDelays
from workers.delays.delay_log.ingest import Counters
from workers.delays.delivery.delivered_batches import Deliveries
from workers.delays.delivery.delivery_marks import RETRY_NS, DeliveryMarks
from workers.delays.store.array_wheel import Rows, no_rows
from workers.delays.store.bucket_files import is_above
from workers.delays.store.pending_store import PendingStore
from workers.delays.store.recurring_rows import RecurringRows

logger = logging.getLogger(__name__)

STUCK_TRIES = 10

Write = Callable[[Assignment, Any], bool]
"""(partition, batch) -> True if the batch was written to its worker's lane."""


@dataclass(slots=True)
class Sent:
    """A batch in flight to the partition."""

    key: tuple[int, int]
    """Key of its last row."""
    previous: tuple[int, int]
    """Key of the row before its first."""
    data: bytearray
    rows: Rows
    at_ns: int
    schema_id: int
    tries: int = 1


class DueRows:
    """Released rows of one partition."""

    def __init__(
        self,
        store: PendingStore,
        recurring: RecurringRows,
        marks: DeliveryMarks,
        deliveries: Deliveries,
        aside: DeadDelays,
        counters: Counters,
        delivered: Callable[[], tuple[int, int]],
        write: Write,
        now_ns: int,
        wall_us: int,
    ) -> None:
        """`delivered` returns the key of the last delivered row."""
        self.ready = no_rows()
        self.sent: Sent | None = None
        self._store = store
        self._recurring = recurring
        self._marks = marks
        self._deliveries = deliveries
        self._aside = aside
        self._counters = counters
        self._delivered = delivered
        self._write = write
        self._applied_delivered = (0, 0)
        self._now_ns = now_ns
        self._wall_us = wall_us

    def set_time(self, now_ns: int, wall_us: int) -> None:
        """The clocks of this step."""
        self._now_ns, self._wall_us = now_ns, wall_us

    @property
    def is_settled(self) -> bool:
        """True if everything that was released is delivered."""
        return self.sent is None and not len(self.ready)

    def release(self, tick: int) -> None:
        """Release rows up to the closed `tick` for delivery, except those delivered before."""
        rows = self._store.release(tick)
        if self._recurring and len(rows):
            rows = self._recurring.expand(rows, tick)
        self.ready = np.concatenate([self.ready, rows]) if len(self.ready) else rows
        self._drop_delivered(self._delivered())

    def take_back(self, delivered: tuple[int, int]) -> Rows:
        """Return the ready rows behind `delivered`, as they were before their release."""
        ready, self.ready = self._recurring.take_back(self.ready, delivered), no_rows()
        return ready

    def apply_delivered(self) -> int:
        """Count off the batch in flight when it is appended, or take its rows back."""
        sent = self.sent
        if sent is None or (delivered := self._delivered()) == sent.previous:
            return 0
        self.sent = None
        if delivered == sent.key:
            self._applied_delivered = delivered
            self._store.rows.done(sent.rows)
            self._counters.delivered += len(sent.rows)
            return 1
        # ours was refused, because a predecessor's batch was in flight
        self.ready = np.concatenate([sent.rows, self.ready])
        return 1

    def settle_altered(self, topic: Assignment) -> None:
        """Take the batch in flight back if the topic has another schema now."""
        if self.sent is not None and self.sent.schema_id != topic.schema_id:
            self.ready = np.concatenate([self.sent.rows, self.ready])
            self.sent = None

    def deliver(self, topic: Assignment, *, waits_for_mark: bool) -> int:
        """Send the next batch, if none is in flight. `waits_for_mark`: a mark of a new epoch was
        read and is not applied yet.
        """
        if self.sent is not None:
            return self._resend(self.sent, topic)
        previous, now_tick = self._delivered(), self._wall_us // TICK_US
        if previous != self._applied_delivered:
            self._drop_delivered(previous)
            self._applied_delivered = previous
        if (
            not len(self.ready)
            or self.ready[0, 0] > now_tick
            or previous[0] >> TICK_BITS > self._marks.epoch
        ):
            return 0  # none ready; not due any more; or an epoch is being read again
        if not self._marks.is_fenced or self._marks.asks_for_epoch or waits_for_mark:
            # A mark of a new epoch may be in flight. It names the last delivered row.
            return 0
        due = self.ready[: int(np.searchsorted(self.ready[:, 0], now_tick, "right"))]
        epoch_bits = self._marks.epoch << TICK_BITS
        rows, data, reason = self._deliveries.next_of(
            due, self._store.rows, topic, epoch_bits, previous, self._wall_us
        )
        if data is None:
            self._aside.keep_row(int(rows[0, 1]), self._store.rows.columns_of(rows), reason)
            self._store.rows.done(rows)
            self.ready = self.ready[1:]
            return 1
        if not self._write(topic, data):
            return 0
        crash_point("scheduler.after_delivery")
        self._counters.lateness_us = self._wall_us - int(rows[0, 0]) * TICK_US
        self.sent = Sent(
            (epoch_bits | int(rows[-1, 0]), int(rows[-1, 1])), previous, data, rows, self._now_ns,
            topic.schema_id,
        )  # fmt: skip
        self.ready = self.ready[len(rows) :]
        return 1

    def _resend(self, sent: Sent, topic: Assignment) -> int:
        """Resend a batch that is not settled: it was refused, or lost with a worker. Take it back
        if it is not due any more.
        """
        if self._now_ns - sent.at_ns < RETRY_NS:
            return 0
        if sent.rows[-1, 0] > self._wall_us // TICK_US:
            self.ready = np.concatenate([sent.rows, self.ready])
            self.sent = None
        elif not self._write(topic, sent.data):
            return 0
        sent.at_ns = self._now_ns
        sent.tries += 1
        if sent.tries % STUCK_TRIES == 0:
            logger.warning(
                "delivery_refused topic=%s partition=%d tries=%d rows=%d advice=%r",
                topic.topic, topic.partition, sent.tries, len(sent.rows),
                "run `tailrace status`: the disk may be full or broken, or "
                "max.message.bytes below the record's size",
            )  # fmt: skip
        return 1

    def _drop_delivered(self, delivered: tuple[int, int]) -> None:
        """Drop ready rows that a predecessor has delivered."""
        if delivered[0] >> TICK_BITS == self._marks.epoch and len(self.ready):
            left = is_above(
                self.ready[:, 0], self.ready[:, 1], (delivered[0] & TICK_MASK, delivered[1])
            )
            self._store.rows.done(self.ready[~left])
            self.ready = self.ready[left]
