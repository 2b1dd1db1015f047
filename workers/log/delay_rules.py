"""The rules of delayed records that worker, flusher, recovery and retention share: what may be appended next, what is remembered of it, what is kept.

How delivery works as a whole is in `workers.delays.delay_partition`. Here is what holds in the log:

    a delay log     marks close ordinals; a mark is appended if it closes more. One that begins an epoch of the clock must know the last row delivered
                    before, else a delivery that it does not know would be repeated.
    its topic       a delivered batch names the key that it follows: it is appended if that is the last one, what it has is closed in the delay log,
                    in the same epoch, and due by the wall clock. So a batch that is sent again is appended once.
    retention       a delay log is kept from the scheduler's cursor on; on a topic with delays a record's age counts from its delivery, since by
                    its own timestamp a record that waited for a month would go as soon as it comes.

Owner: pure. Invariants: `open_ordinal` and `delivered` of a `ProducerTable` only grow.
"""

from __future__ import annotations

from collections.abc import Sequence

from shm.catalog_messages import Assignment
from shm.layout import FLAG_CLOSED, FLAG_DELIVERED
from shm.ring import Descriptor
from tailrace.delays import NONE_DELIVERED, TICK_BITS, TICK_MASK, TICK_US
from tailrace.formats.batch_header import ATTRIBUTE_CONTROL, ATTRIBUTE_DELAYED, BatchHeader
from workers.producer_state import ProducerTable

SPECIAL_ATTRIBUTES = ATTRIBUTE_CONTROL | ATTRIBUTE_DELAYED
"""A batch with neither is a producer's: nothing here is about it."""
SPECIAL_FLAGS = FLAG_CLOSED | FLAG_DELIVERED
"""The same of a descriptor."""


def flags_of(header: BatchHeader) -> int:
    """What a descriptor says of a batch with SPECIAL_ATTRIBUTES."""
    if header.is_delay_mark:
        return FLAG_CLOSED
    return FLAG_DELIVERED if header.attributes & ATTRIBUTE_DELAYED and not header.is_control else 0


def note_header(known: ProducerTable, header: BatchHeader) -> None:
    """A batch with SPECIAL_ATTRIBUTES is in the log."""
    _note(known, flags_of(header), header.min_tick, header.delay_position)


def note_descriptor(known: ProducerTable, descriptor: Descriptor) -> None:
    """A batch whose descriptor has SPECIAL_FLAGS is in the log."""
    _note(known, descriptor.flags, descriptor.delay_ordinal, descriptor.delay_position)


def _note(known: ProducerTable, flags: int, ordinal: int, position: int) -> None:
    if flags & FLAG_CLOSED:
        known.close_below(ordinal)
    elif flags & FLAG_DELIVERED:
        known.deliver(ordinal, position)


def is_next_delivery(header: BatchHeader, topic: ProducerTable, delay_log: ProducerTable | None, now_us: int) -> bool:
    """Whether a delivered batch is appended to its topic. `delay_log` None: it is gone."""
    open_ordinal = delay_log.open_ordinal if delay_log is not None else 0
    if header.min_tick >= open_ordinal or header.min_tick >> TICK_BITS != open_ordinal >> TICK_BITS:
        return False
    if (header.min_tick & TICK_MASK) * TICK_US > now_us:
        return False  # the wall clock was set back since it was sent
    return (header.due_us, header.previous_position) == topic.delivered < (header.min_tick, header.delay_position)


def begins_epoch(header: BatchHeader, delay_log: ProducerTable) -> bool:
    """Whether a mark begins an epoch of the clock: then `is_next_mark` needs the topic."""
    return header.min_tick >> TICK_BITS > delay_log.open_ordinal >> TICK_BITS


def is_next_mark(header: BatchHeader, delay_log: ProducerTable, topic: ProducerTable | None) -> bool:
    """Whether a mark is appended to a delay log. `topic` None: it is being deleted, and its delay log goes next."""
    open_ordinal = delay_log.open_ordinal
    if not header.is_delay_mark or header.min_tick <= open_ordinal:
        return False
    if header.min_tick >> TICK_BITS == open_ordinal >> TICK_BITS:
        return True
    if topic is None:
        return False
    ordinal, position = topic.delivered
    done = (ordinal & TICK_MASK, position) if ordinal >> TICK_BITS == open_ordinal >> TICK_BITS else NONE_DELIVERED
    return (header.due_us, header.delay_position) == done


def newest_us(assignment: Assignment, max_timestamp_us: int, last_append_us: int) -> int:
    """The time of the newest record of a segment, for retention."""
    return max(max_timestamp_us, last_append_us) if assignment.delay_log else max_timestamp_us


def kept_from(cursor: int, bases: Sequence[int], log_start_offset: int) -> int:
    """The new log start offset of a delay log: the base of the last segment that begins at or before the scheduler's cursor."""
    return max((base for base in bases if base <= cursor), default=log_start_offset)
