"""Walks over the bytes of a segment that were read: which whole batches a response gets.

Owner: none; pure functions over a buffer of the caller.

Invariants:
- A walk ends below `end`, and with a whole batch. The batches follow one another by their offsets.
- `walk_committed` leaves a batch out only if its header matches its checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from netfront.fetch.log.read_result import LogReadError, Place, Span
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    METADATA_MAX_BYTES,
    OFFSET_ATTRIBUTES,
    OFFSET_PRODUCER,
    TRANSACTIONAL_PRODUCER_IDS,
    BatchFormatError,
    header_position,
)
from tailrace.format.record_batch.header_peek import frame_at, header_is_intact

PEEK_BYTES = 64 << 10
IsAborted = Callable[[int, int, int], bool]
"""(producer id, producer epoch, offset) -> True for a batch of an aborted transaction."""
_PRODUCER = struct.Struct("<qih")
_ATTRIBUTES = struct.Struct("<I")
_NOTHING = -1


def walk(target: memoryview, length: int, place: Place, offset: int, end: int) -> Span | int:
    """Return the Span of whole batches in the first `length` bytes.

    Return 0 if the segment ends at `place`, or the size of the first batch if it needs more bytes.
    """
    at = 0
    start = -1
    following = place.offset
    while True:
        if following >= end:
            break
        try:
            frame = frame_at(target, at, length)
        except BatchFormatError as error:
            if start >= 0:
                break  # return the good batches before it first
            raise _corrupt(place, at, error.reason) from None
        if frame is None:
            if at == 0 and start < 0:
                return min(METADATA_MAX_BYTES, max(PEEK_BYTES, 2 * length))
            break
        batch_length, base_offset, next_offset = frame
        if batch_length == 0:
            if at == 0:
                return 0
            break
        if base_offset != following:
            if start >= 0:
                break
            raise _corrupt(place, at, f"a batch has offset {base_offset}; expected {following}")
        if at + batch_length > length:
            if at == 0:
                return batch_length
            break
        if next_offset > offset and start < 0:
            start = at
        at += batch_length
        following = next_offset
    begin = at if start < 0 else start
    return Span(begin, at, Place(following, place.segment_base, place.file_position + at))


def walk_committed(
    target: memoryview,
    length: int,
    place: Place,
    offset: int,
    end: int,
    is_aborted: IsAborted,
    seed: int,
) -> Span | int:
    """`walk` without the batches of aborted transactions: what remains is moved together at the
    start of `target`. Of an aborted batch only the header has to be there.

    `is_aborted` may raise LogReadError.
    """
    at = kept = 0
    run = _NOTHING
    """Start of the batches that are not moved yet."""
    kept_to = following = place.offset
    """The offset after the last batch that is kept."""
    has_gaps = False
    if not length and following < end:
        return PEEK_BYTES
    while following < end and at < length:
        try:
            frame = frame_at(target, at, length)
            if frame is not None and frame[0] and frame[1] != following:
                raise BatchFormatError(f"a batch has offset {frame[1]}; expected {following}")
            is_left_out = frame is not None and _is_left_out(
                target, at, length, frame, offset, is_aborted, seed
            )
        except (BatchFormatError, LogReadError) as error:
            if run != _NOTHING or has_gaps:
                break
            if isinstance(error, LogReadError):
                raise
            raise _corrupt(place, at, error.reason) from None
        if frame is None:
            if at == 0:
                return min(METADATA_MAX_BYTES, max(PEEK_BYTES, 2 * length))
            break
        batch_length, _, next_offset = frame
        if batch_length == 0:
            if at == 0:
                return 0
            break
        if at + batch_length > length and not is_left_out:
            if at == 0:
                return batch_length
            break
        if is_left_out:
            has_gaps = True
            if run != _NOTHING:
                kept, run = _moved(target, kept, run, at), _NOTHING
        elif next_offset > offset:
            if run == _NOTHING:
                run = at
            kept_to = next_offset
        at += batch_length
        following = next_offset
    if run != _NOTHING:
        kept = _moved(target, kept, run, at)
    resume_offset = following if has_gaps and following > kept_to else -1
    following_place = Place(following, place.segment_base, place.file_position + at)
    return Span(0, kept, following_place, has_gaps, resume_offset)


def _is_left_out(
    target: memoryview,
    at: int,
    length: int,
    frame: tuple[int, int, int],
    offset: int,
    is_aborted: IsAborted,
    seed: int,
) -> bool:
    """True for an aborted batch with offsets from `offset` on. Raises BatchFormatError if its
    header is damaged.
    """
    batch_length, base_offset, next_offset = frame
    if not batch_length or next_offset <= offset:
        return False
    position = header_position(target, at)
    producer_id, _, epoch = _PRODUCER.unpack_from(target, position + OFFSET_PRODUCER)
    if (
        producer_id < TRANSACTIONAL_PRODUCER_IDS
        or _ATTRIBUTES.unpack_from(target, position + OFFSET_ATTRIBUTES)[0] & ATTRIBUTE_CONTROL
        or not is_aborted(producer_id, epoch, base_offset)
    ):
        return False
    if not header_is_intact(target[at : min(length, at + batch_length)], seed):
        raise BatchFormatError("the header of an aborted batch does not match its checksum")
    return True


def _moved(target: memoryview, kept: int, run: int, at: int) -> int:
    """Move the bytes `run` to `at` behind the first `kept` ones. Return where they end."""
    if run != kept:
        target[kept : kept + at - run] = target[run:at]
    return kept + at - run


def before_transactions(target: memoryview, span: Span) -> Span:
    """The part of a span of `walk` before the first batch of a transaction.

    Raises LogReadError (UNSUPPORTED_VERSION) if it begins with one.
    """
    at = span.start
    while at < span.end:
        frame = frame_at(target, at, span.end)
        assert frame is not None, "the walk has seen it"
        batch_length, base_offset, _ = frame
        position = header_position(target, at)
        producer_id = _PRODUCER.unpack_from(target, position + OFFSET_PRODUCER)[0]
        if producer_id >= TRANSACTIONAL_PRODUCER_IDS:
            if at == span.start:
                raise LogReadError(
                    ErrorCode.UNSUPPORTED_VERSION,
                    f"offset {base_offset} belongs to a transaction, which this client cannot "
                    "read; upgrade it",
                )
            _, segment_base, file_position = span.following
            place = Place(base_offset, segment_base, file_position - (span.end - at))
            return Span(span.start, at, place)
        at += batch_length
    return span


def _corrupt(place: Place, at: int, reason: str) -> LogReadError:
    return LogReadError(ErrorCode.CORRUPT_BATCH, f"at byte {place.file_position + at}: {reason}")
