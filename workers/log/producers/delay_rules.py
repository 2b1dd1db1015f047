"""Rules of delayed records, shared by worker, flusher, recovery and retention.

`workers.delays.delay_partition` describes delivery as a whole. These rules hold in the log:

- Delay log: marks close ordinals. A mark is appended if it closes more. A mark that begins an epoch
  of the clock must name the last row delivered before, or an unknown delivery would be repeated.
- Its topic: a delivered batch names its predecessor, which must be the last delivered row. Its own
  rows must be closed in the delay log, in the same epoch, and due by the wall clock. A batch that
  is resent is appended once.
- Retention: a delay log is kept from the scheduler's cursor on. On a topic with delays a record's
  age counts from its delivery. By its own timestamp, a record that waited for a month would expire
  at once.

Owner: pure.

Invariants: `open_ordinal` and `delivered` of a `ProducerTable` only grow.
"""

from __future__ import annotations

from collections.abc import Sequence

from shm.memory.layout import FLAG_CLOSED, FLAG_DELIVERED
from shm.messages.lane_messages import Assignment
from shm.queues.ring import Descriptor
from tailrace.core.schedule.delays import NONE_DELIVERED, TICK_BITS, TICK_MASK, TICK_US
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_DELAYED,
    BatchHeader,
)
from workers.log.producers.producer_state import ProducerTable

SPECIAL_ATTRIBUTES = ATTRIBUTE_CONTROL | ATTRIBUTE_DELAYED
"""Attributes of batches that these rules apply to. A producer's batch has neither."""
SPECIAL_FLAGS = FLAG_CLOSED | FLAG_DELIVERED
"""Flags of descriptors of such batches."""


def flags_of(header: BatchHeader) -> int:
    """Return the descriptor flags of a batch with SPECIAL_ATTRIBUTES."""
    if header.is_delay_mark:
        return FLAG_CLOSED
    return FLAG_DELIVERED if header.attributes & ATTRIBUTE_DELAYED and not header.is_control else 0


def note_header(known: ProducerTable, header: BatchHeader) -> None:
    """Record a batch with SPECIAL_ATTRIBUTES that is in the log."""
    _note(known, flags_of(header), header.min_tick, header.delay_position)


def note_descriptor(known: ProducerTable, descriptor: Descriptor) -> None:
    """Record a batch whose descriptor has SPECIAL_FLAGS and that is in the log."""
    _note(known, descriptor.flags, descriptor.delay_ordinal, descriptor.delay_position)


def _note(known: ProducerTable, flags: int, ordinal: int, position: int) -> None:
    if flags & FLAG_CLOSED:
        known.close_below(ordinal)
    elif flags & FLAG_DELIVERED:
        known.deliver(ordinal, position)


def is_next_delivery(
    header: BatchHeader, topic: ProducerTable, delay_log: ProducerTable | None, now_us: int
) -> bool:
    """True if a delivered batch may be appended to its topic.

    `delay_log` is None if it was deleted.
    """
    open_ordinal = delay_log.open_ordinal if delay_log is not None else 0
    if header.min_tick >= open_ordinal or header.min_tick >> TICK_BITS != open_ordinal >> TICK_BITS:
        return False
    if (header.min_tick & TICK_MASK) * TICK_US > now_us:
        return False  # the wall clock was set back after it was sent
    return (
        (header.due_us, header.previous_position)
        == topic.delivered
        < (header.min_tick, header.delay_position)
    )


def begins_epoch(header: BatchHeader, delay_log: ProducerTable) -> bool:
    """True if a mark begins an epoch of the clock. `is_next_mark` then needs the topic."""
    return header.min_tick >> TICK_BITS > delay_log.open_ordinal >> TICK_BITS


def is_next_mark(
    header: BatchHeader, delay_log: ProducerTable, topic: ProducerTable | None
) -> bool:
    """True if a mark may be appended to a delay log. `topic` is None while it is being deleted."""
    open_ordinal = delay_log.open_ordinal
    if not header.is_delay_mark or header.min_tick <= open_ordinal:
        return False
    if header.min_tick >> TICK_BITS == open_ordinal >> TICK_BITS:
        return True
    if topic is None:
        return False
    ordinal, position = topic.delivered
    done = (
        (ordinal & TICK_MASK, position)
        if ordinal >> TICK_BITS == open_ordinal >> TICK_BITS
        else NONE_DELIVERED
    )
    return (header.due_us, header.delay_position) == done


def newest_us(assignment: Assignment, max_timestamp_us: int, last_append_us: int) -> int:
    """Return the time of a segment's newest record, for retention."""
    return max(max_timestamp_us, last_append_us) if assignment.delay_log else max_timestamp_us


def kept_from(cursor: int, bases: Sequence[int], log_start_offset: int) -> int:
    """Return the new log start offset of a delay log: the base of the last
    segment at or before the cursor.
    """
    return max((base for base in bases if base <= cursor), default=log_start_offset)
