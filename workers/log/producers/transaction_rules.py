"""Rules of transactions that hold in the log, shared by worker, flusher and recovery.

- A batch of a transactional producer opens the transaction of its (producer id, epoch) in the
  partition, unless it is open.
- A marker ends it: everything of it becomes visible at once, or is left out for ever. The
  producer's sequences are forgotten with it (`ProducerTable.end_transaction`).

Owner: pure.

Invariants: applying batches of the log again, in order, gives the same state.
"""

from __future__ import annotations

from typing import NamedTuple

from shm.queues.ring import Descriptor
from tailrace.format.record_batch.batch_header import CONTROL_ABORT, BatchHeader
from workers.log.producers.producer_state import ProducerTable


class EndedTransaction(NamedTuple):
    """A transaction that a marker has ended. `first_offset` is -1 if it was not known as open."""

    producer_id: int
    epoch: int
    first_offset: int
    marker_offset: int
    is_aborted: bool


def note_header(known: ProducerTable, header: BatchHeader) -> EndedTransaction | None:
    """Record a transactional batch or a marker that is in the log. Returns the transaction that a
    marker has ended.
    """
    control_type = header.control_type if header.is_control else 0
    return _note(known, header.producer_id, header.producer_epoch, header.base_offset, control_type)


def note_descriptor(known: ProducerTable, descriptor: Descriptor) -> EndedTransaction | None:
    """Record a batch whose descriptor is transactional and that is in the log, as `note_header`
    does.
    """
    return _note(
        known,
        descriptor.producer_id,
        descriptor.producer_epoch,
        descriptor.base_offset,
        descriptor.control_type,
    )


def _note(
    known: ProducerTable, producer_id: int, epoch: int, base_offset: int, control_type: int
) -> EndedTransaction | None:
    if not control_type:
        known.transactions.append(producer_id, epoch, base_offset)
        return None
    ended = known.end_transaction(producer_id, epoch)
    return EndedTransaction(
        producer_id,
        epoch,
        -1 if ended is None else ended.first_offset,
        base_offset,
        control_type == CONTROL_ABORT,
    )
