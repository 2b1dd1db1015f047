"""Splits a batch into others that have its records.

A batch that is too large as bytes is split in halves. A batch that was routed by an old slot map is
split by partition. The caller replaces the batch by its parts (`RecordAccumulator.replaced`).

Owner: a Producer, under its lock.
Invariants:
- The parts have the batch's records in their order, its callbacks and its reserved bytes.
- Their places among the producer's batches are within the place of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from tailrace.batch import arrow_codec
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.hash_slots import STAYS, Owners
from tailrace.producer.batches.producer_batch import READY, ProducerBatch

Value = TypeVar("Value")


class Halves(NamedTuple):
    """The parts of a batch that was split before row `middle`."""

    middle: int
    left: ProducerBatch
    right: ProducerBatch

    @property
    def batches(self) -> Sequence[ProducerBatch]:
        return self[1:]

    def place(self, row: int) -> tuple[ProducerBatch, int]:
        return (self.left, row) if row < self.middle else (self.right, row - self.middle)


class SplitBatch(NamedTuple):
    """The parts of a batch that was split by partition."""

    batches: Sequence[ProducerBatch]
    places: Sequence[tuple[int, int]]
    """Row -> (index of its part, row in that part)."""

    def place(self, row: int) -> tuple[ProducerBatch, int]:
        """The batch that has the record of `row`, and the record's row in it."""
        which, there = self.places[row]
        return self.batches[which], there


def split_in_halves(batch: ProducerBatch) -> tuple[ProducerBatch, ProducerBatch] | None:
    """Split a ready batch, encoded or not, into two. None: it has a single row."""
    if batch.count < 2:
        return None
    middle = batch.count // 2
    left, right = _half(batch, 0, middle, 0), _half(batch, middle, batch.count, 1)
    if batch.rows:
        _copy_rows(left, batch, 0, middle)
        _copy_rows(right, batch, middle, batch.count)
    else:
        frame = batch.rebuilt_frame()
        left.frame = arrow_codec.cut_out(frame, 0, middle)
        right.frame = arrow_codec.cut_out(frame, middle, batch.count - middle)
        if batch.exact is not None:
            from tailrace.batch import exact_floats

            left.exact = exact_floats.sliced(batch.exact, 0, middle)
            right.exact = exact_floats.sliced(batch.exact, middle, batch.count - middle)
    for row, callback in batch.callbacks or ():
        if row < middle:
            left.add_callback(row, callback)
        else:
            right.add_callback(row - middle, callback)
    halves = Halves(middle, left, right)
    batch.children = halves
    batch.callbacks = None
    return left, right


def _half(batch: ProducerBatch, start: int, end: int, side: int) -> ProducerBatch:
    """A batch for the rows from `start` to `end`, still without them."""
    half = ProducerBatch(
        batch.completion, batch.info, batch.partition, batch.created_ns, (*batch.order, side)
    )
    half.count = end - start
    half.stamps_us = (
        batch.stamps_us[start:end] if len(batch.stamps_us) == batch.count else batch.stamps_us
    )
    half.dues_us = batch.dues_us[start:end]
    half.slots = None if batch.slots is None else batch.slots[start:end]
    half.reserved_bytes = (
        batch.reserved_bytes // 2 if side else batch.reserved_bytes - batch.reserved_bytes // 2
    )
    half.state = READY
    half.sent_as = batch.sent_as
    return half


def _copy_rows(half: ProducerBatch, batch: ProducerBatch, start: int, end: int) -> None:
    """Give a half its rows, with their recurrences, of a batch that is not encoded."""
    half.rows = batch.rows.picked(range(start, end))
    half.repeats = _of_rows(batch.repeats, start, end)


def _of_rows(values: dict[int, Value] | None, start: int, end: int) -> dict[int, Value] | None:
    """The values of the rows from `start` to `end`, which are counted from 0 on."""
    return (
        {row - start: value for row, value in values.items() if start <= row < end}
        if values
        else None
    )


def _partitions_of_rows(batch: ProducerBatch, owners: Owners | None) -> list[int]:
    """The partition of each row by the slot map `owners`."""
    if batch.slots is None or owners is None:
        return [batch.partition] * batch.count
    return [batch.partition if slot == STAYS else owners[slot] for slot in batch.slots]


def _move_whole(batch: ProducerBatch, partition: int) -> None:
    """Give the whole batch to another partition. Its bytes, which name the old one, are encoded
    again.
    """
    if not batch.rows:
        batch.frame, batch.data = batch.rebuilt_frame(), None
    batch.partition = partition
    batch.attempts = 0


def _split_by_partition(batch: ProducerBatch, targets: list[int]) -> list[ProducerBatch]:
    """Split a batch into one for each partition. `targets`: the partition of each row."""
    partitions = sorted(set(targets))
    rows_of: dict[int, list[int]] = {partition: [] for partition in partitions}
    places = []
    which = {partition: index for index, partition in enumerate(partitions)}
    for row, target in enumerate(targets):
        places.append((which[target], len(rows_of[target])))
        rows_of[target].append(row)
    frame = None if batch.rows else batch.rebuilt_frame()
    parts = []
    unshared = batch.reserved_bytes
    for index, partition in enumerate(partitions):
        rows = rows_of[partition]
        part = ProducerBatch(
            batch.completion, batch.info, partition, batch.created_ns, (*batch.order, index)
        )
        part.count = len(rows)
        part.state = READY
        part.sent_as = batch.sent_as
        part.reserved_bytes = (
            unshared
            if index == len(partitions) - 1
            else batch.reserved_bytes * len(rows) // batch.count
        )
        unshared -= part.reserved_bytes
        part.slots = [int(batch.slots[row]) for row in rows] if batch.slots is not None else None
        part.stamps_us = (
            [int(batch.stamps_us[row]) for row in rows]
            if len(batch.stamps_us) == batch.count
            else batch.stamps_us
        )
        if frame is None:
            part.rows = batch.rows.picked(rows)
        else:
            part.frame = frame.take(rows)
            if batch.exact is not None:
                from tailrace.batch import exact_floats

                part.exact = exact_floats.picked(batch.exact, rows)
        parts.append(part)
    for row, callback in batch.callbacks or ():
        index, there = places[row]
        parts[index].add_callback(there, callback)
    split = SplitBatch(parts, places)
    batch.children = split
    batch.callbacks = None
    return parts


def rerouted(batch: ProducerBatch, info: TopicInfo) -> list[ProducerBatch] | None:
    """The parts of a batch by the slot map of `info`. None: the batch itself goes on, perhaps to
    another partition.
    """
    if batch.info.schema_id == info.schema_id:
        batch.info = info
    else:
        batch.convert_for(info)
    targets = _partitions_of_rows(batch, info.owners)
    partitions = set(targets)
    if len(partitions) > 1:
        return _split_by_partition(batch, targets)
    if partitions and partitions != {batch.partition}:
        _move_whole(batch, partitions.pop())
    return None
