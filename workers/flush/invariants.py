"""Invariant checks of workers and flushers, called by test kits and simulation after each step.

`shm.tables.invariants` checks what is published in shared memory. The state here is private to one
process.

Owner: tests and simulation.

Invariants: a check changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from shm.tables.invariants import InvariantError
from workers.append.partitions import NO_EPOCH, Partition
from workers.append.worker import Worker
from workers.flush.commit.ring_follower import RingFollower
from workers.flush.flusher_agent import Flusher
from workers.log.partition_log import PartitionLog
from workers.log.producers.producer_state import ProducerTable


def _need(is_true: bool, context: str) -> None:
    if not is_true:
        raise InvariantError(context)


def check_flusher(flusher: Flusher) -> None:
    """Check a flusher between two steps. Raises InvariantError."""
    for follower in [*flusher._followers, *flusher._old]:
        _check_stage(follower)
    for log in flusher._logs.all():
        if log.is_open:
            check_log(log)
    _check_dirty(flusher)


def _check_stage(follower: RingFollower) -> None:
    settled, producer_position = (
        follower.ring.settled.load(),
        follower.ring.producer_position.load(),
    )
    _need(
        settled <= follower.cursor <= producer_position,
        f"stage: settled {settled}, cursor {follower.cursor}, producer_position "
        f"{producer_position}",
    )
    group = follower.group
    if group is not None:
        numbers = [number for number, _, _ in group.entries]
        _need(
            numbers == list(range(follower.cursor, group.end)),
            f"stage at {follower.cursor}: a group of {numbers}, end {group.end}",
        )
        for slot, placed in group.placed.items():
            log = group.touched[slot]
            _need(
                bool(log.refusal) or len(log.group) == len(placed),
                f"{log.directory}: {len(log.group)} batches of {len(placed)} descriptors",
            )


def check_log(log: PartitionLog) -> None:
    """Check an open log. Raises InvariantError."""
    where, live = log.directory, log.live
    _need(log.log_start_offset <= log.high_watermark <= log.next_offset,
          f"{where}: start {log.log_start_offset}, high watermark {log.high_watermark}, next "
          f"{log.next_offset}")  # fmt: skip
    first_open = log.producers.transactions.first_offset
    _need(
        log.last_stable_offset <= log.high_watermark
        and (
            first_open is None
            or log.last_stable_offset <= max(first_open, log.log_start_offset)
            or bool(log.refusal)
        ),
        f"{where}: last stable offset {log.last_stable_offset}, high watermark "
        f"{log.high_watermark}, first open transaction at {first_open}",
    )
    bases = sorted(log.sealed)
    if live is not None:
        _need(
            live.synced_end <= live.end and live.synced_next <= log.next_offset,
            f"{where}: synced to {live.synced_end}, written to {live.end}",
        )
        _need(
            not bases or bases[-1] < live.base,
            f"{where}: segment {bases[-1:]} is closed, {live.base} is live",
        )
        _need(
            live.base <= log.next_offset,
            f"{where}: segment {live.base} is live, next {log.next_offset}",
        )
    epochs, damage = log.file.epochs, log.file.damage
    _need(
        all(a.number < b.number and a.start <= b.start for a, b in itertools.pairwise(epochs)),
        f"{where}: epochs {epochs}",
    )
    _need(all(a.end <= b.start for a, b in itertools.pairwise(damage)), f"{where}: damage {damage}")
    for earlier, later in zip(log.group, log.group[1:], strict=False):
        _need(
            earlier.next_offset == later.base_offset,
            f"{where}: {later.base_offset} is placed behind {earlier.next_offset}",
        )
    # after a disk failure, producers are remembered until the log is opened again
    if not log.refusal:
        check_producers(log.producers, log.next_offset, where)


def _check_dirty(flusher: Flusher) -> None:
    """Check that a journaled log is in `dirty` or completely synced."""
    commit = flusher._commit
    for half in commit._dirty:
        for log in half.values():
            _need(
                log.is_durable or not log.is_unsynced,
                f"{log.directory}: journaled, and its topic does not promise the disk",
            )


def check_worker(worker: Worker) -> None:
    """Check a worker between two steps. Raises InvariantError."""
    partitions: Iterable[Partition] = worker._partitions.values()
    for partition in partitions:
        where = f"{partition.assignment.topic}-{partition.assignment.partition}"
        if partition.leader_epoch != NO_EPOCH:  # otherwise the log's end is unknown
            check_producers(partition.producers, partition.next_offset, where)
        open_here = partition.producers.transactions
        indexed = worker._opened.open_transactions.of_slot(partition.assignment.slot)
        _need(
            indexed == sorted((producer, found.epoch) for producer, found in open_here),
            f"{where}: transactions {open_here.to_snapshot()} are open, the index has {indexed}",
        )
    for (topic_id, number), log in worker._opened.delay_logs.items():
        _need(
            (log.assignment.delay_of, log.assignment.partition) == (topic_id, number),
            f"delay log {log.assignment.topic} under {topic_id}-{number}",
        )


def check_producers(table: ProducerTable, next_offset: int, where: str) -> None:
    """Check that remembered batches ascend in sequence and offset and lie in the log.

    Raises InvariantError.
    """
    for producer in table.to_snapshot():
        if not isinstance(producer[0], int):
            continue  # the row of delays
        batches = producer[2]
        for _, _, base, following, _ in batches:
            _need(
                base < following <= next_offset,
                f"{where}: producer {producer[0]} has {base} to {following}, the log ends at "
                f"{next_offset}",
            )
        for earlier, later in itertools.pairwise(batches):
            _need(
                earlier[3] <= later[2],
                f"{where}: producer {producer[0]}: offsets {earlier[2:4]} before {later[2:4]}",
            )
