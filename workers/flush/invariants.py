"""The invariants that docstrings of this package state, as checks: test kits and simulation call them after each step, production never.

What is published in shared memory is checked at each store (`shm.invariants`); here is what only one process knows.

Owner: tests and simulation. Invariants: a check reads, and changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from shm.invariants import InvariantError
from workers.flusher import Flusher
from workers.partition_log import PartitionLog
from workers.partitions import NO_EPOCH, Partition
from workers.producer_state import ProducerTable
from workers.stage import Stage
from workers.worker import Worker


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)


def check_flusher(flusher: Flusher) -> None:
    """Between two steps. Raises InvariantError."""
    for stage in [*flusher._stages, *flusher._old]:
        _check_stage(stage)
    for log in flusher._logs.all():
        if log.is_open:
            check_log(log)
    _check_dirty(flusher)


def _check_stage(stage: Stage) -> None:
    settled, head = stage.ring.settled.load(), stage.ring.head.load()
    _need(settled <= stage.cursor <= head, f"stage: settled {settled}, cursor {stage.cursor}, head {head}")
    group = stage.group
    if group is not None:
        numbers = [number for number, _, _ in group.entries]
        _need(numbers == list(range(stage.cursor, group.end)), f"stage at {stage.cursor}: a group of {numbers}, end {group.end}")
        for slot, placed in group.placed.items():
            log = group.touched[slot]
            _need(
                bool(log.refusal) or len(log.group) == len(placed),
                f"{log.directory}: {len(log.group)} batches of {len(placed)} descriptors",
            )


def check_log(log: PartitionLog) -> None:
    """Of an open log. Raises InvariantError."""
    where, live = log.directory, log.live
    _need(log.log_start_offset <= log.high_watermark <= log.next_offset,
          f"{where}: start {log.log_start_offset}, high watermark {log.high_watermark}, next {log.next_offset}")  # fmt: skip
    bases = sorted(log.sealed)
    if live is not None:
        _need(
            live.synced_end <= live.end and live.synced_next <= log.next_offset,
            f"{where}: synced to {live.synced_end}, written to {live.end}",
        )
        _need(not bases or bases[-1] < live.base, f"{where}: segment {bases[-1:]} is closed, {live.base} is live")
        _need(live.base <= log.next_offset, f"{where}: segment {live.base} is live, next {log.next_offset}")
    epochs, damage = log.file.epochs, log.file.damage
    _need(all(a.number < b.number and a.start <= b.start for a, b in itertools.pairwise(epochs)), f"{where}: epochs {epochs}")
    _need(all(a.end <= b.start for a, b in itertools.pairwise(damage)), f"{where}: damage {damage}")
    for earlier, later in zip(log.group, log.group[1:], strict=False):
        _need(earlier.next_offset == later.base_offset, f"{where}: {later.base_offset} is placed behind {earlier.next_offset}")
    if not log.refusal:  # of what a disk refused, producers are remembered until the log is opened again
        check_producers(log.producers, log.next_offset, where)


def _check_dirty(flusher: Flusher) -> None:
    """A log that the journal holds batches of is in `dirty`, or everything of it is synced."""
    commit = flusher._commit
    for half in commit._dirty:
        for log in half.values():
            _need(log.is_durable or not log.is_unsynced, f"{log.directory}: journaled, and its topic does not promise the disk")


def check_worker(worker: Worker) -> None:
    """Between two steps. Raises InvariantError."""
    partitions: Iterable[Partition] = worker._partitions.values()
    for partition in partitions:
        where = f"{partition.assignment.topic}-{partition.assignment.partition}"
        if partition.leader_epoch != NO_EPOCH:  # there nobody knows where the log ends
            check_producers(partition.producers, partition.next_offset, where)
    for (topic_id, number), log in worker._delay_logs.items():
        _need(
            (log.assignment.delay_of, log.assignment.partition) == (topic_id, number),
            f"delay log {log.assignment.topic} under {topic_id}-{number}",
        )


def check_producers(table: ProducerTable, next_offset: int, where: str) -> None:
    """Remembered batches are consecutive in sequence, ascending in offset, and in the log. Raises InvariantError."""
    for producer in table.to_snapshot():
        if not isinstance(producer[0], int):
            continue  # of delays
        batches = producer[2]
        for _, _, base, following, _ in batches:
            _need(
                base < following <= next_offset, f"{where}: producer {producer[0]} has {base} to {following}, the log ends at {next_offset}"
            )
        for earlier, later in itertools.pairwise(batches):
            _need(earlier[3] <= later[2], f"{where}: producer {producer[0]}: offsets {earlier[2:4]} before {later[2:4]}")
