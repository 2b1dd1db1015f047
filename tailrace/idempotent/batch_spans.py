"""The offsets in a batch of records or TopicBatches: spans, gaps, and the part not yet applied.

Owner: pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tailrace.batch.topic_batch import TopicBatch
from tailrace.core.errors import InvalidRequestError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition


class Span(NamedTuple):
    """Offsets from `first` to `last`, inclusive."""

    first: int
    last: int


def spans_of(batch: Any) -> tuple[dict[TopicPartition, Span], dict[TopicPartition, list[Span]]]:
    """The span of each partition, and the gaps within the spans. Raises InvalidRequestError."""
    if not isinstance(batch, (TopicBatch, list, tuple)):
        raise InvalidRequestError(
            f"a batch is {batch!r:.100}; it takes what poll() or poll_arrow() returned, or one "
            "TopicBatch"
        )
    parts = _parts(batch)
    spans: dict[TopicPartition, Span] = {}
    gaps: dict[TopicPartition, list[Span]] = {}
    for item in batch if parts is None else parts:  # type: ignore[union-attr]
        if not isinstance(item, Record if parts is None else TopicBatch):
            raise InvalidRequestError(
                f"a batch holds {item!r:.100}; it takes Records, or TopicBatches, and not both"
            )
        if hasattr(item, "delivery_count"):
            raise InvalidRequestError(
                "records of a share group come in no order, so there is no offset below which all "
                "are applied; ask DedupTable.first_time(record) of each"
            )
        key = TopicPartition(item.topic, item.partition)
        if isinstance(item, Record):
            first = last = item.offset
        elif len(item):
            first, last = item.offsets[0].as_py(), item.offsets[-1].as_py()
            if last - first >= len(item):
                gaps.setdefault(key, []).extend(_gaps_between(item.offsets.to_pylist()))
        else:
            continue
        known = spans.get(key)
        if known is not None and first <= known.last:
            raise InvalidRequestError(
                f"offset {first} of {key.topic}-{key.partition} comes behind {known.last}; give "
                "records in the order in which they came"
            )
        if known is not None and first > known.last + 1:
            gaps.setdefault(key, []).append(Span(known.last + 1, first - 1))
        spans[key] = Span(first if known is None else known.first, last)
    return spans, gaps


def without_applied(batch: Any, starts: Mapping[TopicPartition, int]) -> tuple[Any, int]:
    """The rest of a batch from `starts` on, of the same kind, and the number of records before."""
    parts = _parts(batch)
    if parts is None:
        new = [
            record
            for record in batch
            if record.offset >= starts.get(TopicPartition(record.topic, record.partition), 0)
        ]
        return new, len(batch) - len(new)
    left = [
        _tail(part, starts.get(TopicPartition(part.topic, part.partition), 0)) for part in parts
    ]
    skipped = sum(map(len, parts)) - sum(map(len, left))
    return (
        left[0] if isinstance(batch, TopicBatch) else [part for part in left if len(part)]
    ), skipped


def _parts(batch: Any) -> list[TopicBatch] | None:
    """The TopicBatches of a batch. None: it consists of records."""
    if isinstance(batch, TopicBatch):
        return [batch]
    return list(batch) if batch and isinstance(batch[0], TopicBatch) else None


def _gaps_between(offsets: Sequence[int]) -> list[Span]:
    return [
        Span(one + 1, following - 1) for one, following in pairwise(offsets) if following > one + 1
    ]


def _tail(part: TopicBatch, start: int) -> TopicBatch:
    """The rows from offset `start` on."""
    gone = int(part.offsets.to_numpy().searchsorted(start))
    if gone == 0:
        return part
    rows, offsets = part.batch.slice(gone), part.offsets.slice(gone)
    return TopicBatch(
        part.topic,
        part.partition,
        offsets[0].as_py() if len(offsets) else start,
        rows,
        offsets,
        part.timestamp_us,
        part.timestamp_type,
        has_one_time=part.has_one_time,
        schema_id=part.schema_id,
    )
