"""Sends lines of standard input, each as a record. A line that cannot be a record is set aside or
ends the sending.

Invariants:
- Skipped lines are reported.
- Every error that ends the sending counts the lines acknowledged before it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import orjson

from appliance.cli.output import complain, counted
from tailrace.batch.arrow_codec import rows_from_dicts
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRecordError,
    RecordTooLargeError,
    RequestTimeoutError,
    SchemaMismatchError,
    TailraceError,
)
from tailrace.core.records import RecordMetadata
from tailrace.core.schedule.recurrence import Recurrence
from tailrace.producer.producer import Producer

COUNT_EVERY = 1_000
"""Lines between two counts of outcomes, which wait in memory."""
CALLBACKS_TIMEOUT_S = 30.0
INTERRUPTED_S = 5.0
"""Longest wait after Ctrl-C for the acknowledgement of what was sent."""


class BadLineError(TailraceError):
    """A line that cannot be a record of this topic."""

    default_code = ErrorCode.INVALID_RECORD


@dataclass(frozen=True, slots=True)
class LineOptions:
    """Common fields of all records, and how lines are split."""

    key_separator: str | None = None
    key: str | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None
    timestamp: dt.datetime | None = None
    due: dt.datetime | None = None
    repeat: Recurrence | None = None
    """The recurrence of every record, from `due` on; None: once."""
    skip_bad: int = 0
    """Bad lines to leave out before one ends the sending."""
    bad_to: BinaryIO | None = None
    """Output for bad lines, unchanged."""


@dataclass(slots=True)
class Sent:
    """Counters and ids of the lines sent."""

    acknowledged: int = 0
    skipped: int = 0
    failures: list[tuple[int, TailraceError]] = field(default_factory=list)
    """(line number, error) of records that were sent and failed."""
    sent: int = 0
    delay_ids: list[tuple[int, str]] = field(default_factory=list)
    """(line number, id) of recurring records: cancelling one needs its id."""
    _outcomes: queue.SimpleQueue[tuple[int, RecordMetadata | None, TailraceError | None, bool]] = (
        field(default_factory=queue.SimpleQueue)
    )
    """Outcomes that are not counted yet. A queue and no lock: an interrupt inside a callback would
    leave a lock locked, and the producer's thread would wait for it without end.
    """

    def note(
        self,
        number: int,
        metadata: RecordMetadata | None,
        error: TailraceError | None,
        is_recurring: bool,
    ) -> None:
        """Note a record's outcome. The producer calls it from any of its threads."""
        self._outcomes.put((number, metadata, error, is_recurring))

    def count(self) -> None:
        """Count the outcomes that were noted."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._count(*self._outcomes.get_nowait())

    def wait(self) -> None:
        """Wait until the outcome of every sent line is counted.

        The producer's callbacks come a moment after its flush returns.
        """
        with contextlib.suppress(queue.Empty):
            while self.acknowledged + len(self.failures) < self.sent:
                self._count(*self._outcomes.get(timeout=CALLBACKS_TIMEOUT_S))

    def _count(
        self,
        number: int,
        metadata: RecordMetadata | None,
        error: TailraceError | None,
        is_recurring: bool,
    ) -> None:
        if error is not None:
            self.failures.append((number, error))
            return
        self.acknowledged += 1
        if is_recurring and metadata is not None and metadata.delay_id is not None:
            self.delay_ids.append((number, metadata.delay_id))


def send_lines(
    producer: Producer,
    info: TopicInfo,
    lines: Iterable[bytes],
    options: LineOptions,
    after_line: Callable[[], None] = lambda: None,
) -> Sent:
    """Send every line and wait for all results. `after_line` is called after each one that was
    sent.

    Raises: TailraceError, whose message counts the acknowledged lines.
    """
    sent = Sent()
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            try:
                _send(producer, info, line.rstrip(b"\r\n"), number, options, sent)
                after_line()
            except BadLineError:
                if options.bad_to is not None:
                    options.bad_to.write(line)
                if sent.skipped >= options.skip_bad:
                    raise
                sent.skipped += 1
    except TailraceError as error:
        producer.flush()
        sent.wait()
        where = "" if isinstance(error, BadLineError) else f"line {number}: "
        raise type(error)(
            f"{where}{error.detail}; {_unfinished(sent, number - 1)}", error.code
        ) from None
    except KeyboardInterrupt:
        with contextlib.suppress(RequestTimeoutError):
            producer.flush(INTERRUPTED_S)
        sent.count()
        complain(f"interrupted; {sent.acknowledged} of {sent.sent} sent lines are acknowledged")
        raise
    producer.flush()
    sent.wait()
    if sent.failures:
        line_number, first = min(sent.failures, key=lambda failure: failure[0])
        raise TailraceError(
            f"line {line_number}: {first.detail}; {sent.acknowledged} of {number} lines are "
            "acknowledged",
            first.code,
        )
    return sent


def _unfinished(sent: Sent, before: int) -> str:
    skipped = f", {sent.skipped} skipped" if sent.skipped else ""
    if not before:
        return "nothing was sent before it"
    return (
        f"of the {counted(before, 'line')} before it {sent.acknowledged} "
        f"{'is' if sent.acknowledged == 1 else 'are'} acknowledged{skipped}"
    )


def _send(
    producer: Producer, info: TopicInfo, text: bytes, number: int, options: LineOptions, sent: Sent
) -> None:
    key: bytes | str | None = options.key
    if options.key_separator is not None:
        key, found, text = text.partition(options.key_separator.encode())
        if not found:
            raise BadLineError(
                f"line {number} has no {options.key_separator!r} between key and value"
            )
    value: Any = text
    if info.typed:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise BadLineError(
                f"line {number} is not a JSON object, which a typed topic needs: {error}"
            ) from None

    try:
        if info.typed and isinstance(value, dict):
            rows_from_dicts(
                [value], info.schema
            )  # one row that does not fit would fail its whole batch
        producer.send(
            info.name, value, key, headers=list(options.headers) or None,
            partition=options.partition, timestamp=options.timestamp,
            deliver_at=options.due, repeat=options.repeat,
            on_delivery=lambda metadata,
            error: sent.note(number, metadata, error, options.repeat is not None),
        )  # fmt: skip
        sent.sent += 1
    except (InvalidRecordError, SchemaMismatchError, RecordTooLargeError) as error:
        raise BadLineError(f"line {number}: {error.detail}", error.code) from None
