"""Sending lines of standard input: each is a record; one that cannot be is set aside or ends the sending, and it is said what has been acknowledged.

Invariants: nothing is skipped in silence; whatever ends the sending, the error says how many lines were acknowledged before it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import orjson

from appliance.cli.output import complain, counted
from tailrace.errors import InvalidRecordError, RecordTooLargeError, RequestTimeoutError, SchemaMismatchError, TailraceError
from tailrace.formats.arrow_batch import rows_from_dicts
from tailrace.producer import Producer
from tailrace.protocol.errors import ErrorCode
from tailrace.records import RecordMetadata
from tailrace.recurrence import Recurrence
from tailrace.topics import TopicInfo

CALLBACKS_TIMEOUT_S = 30.0
INTERRUPTED_S = 5.0
"""How long Ctrl-C waits for what was sent."""


class BadLineError(TailraceError):
    """A line that cannot be a record of this topic."""

    default_code = ErrorCode.INVALID_RECORD


@dataclass(frozen=True, slots=True)
class LineOptions:
    """What every line's record gets, and how lines are taken apart."""

    key_separator: str | None = None
    key: str | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None
    timestamp: dt.datetime | None = None
    due: dt.datetime | None = None
    repeat: Recurrence | None = None
    """Again and again, from `due` on."""
    skip_bad: int = 0
    """How many bad lines are left out before one ends the sending."""
    bad_to: BinaryIO | None = None
    """Where bad lines are written, as they came."""


@dataclass(slots=True)
class Sent:
    """What became of the lines."""

    acknowledged: int = 0
    skipped: int = 0
    failures: list[tuple[int, TailraceError]] = field(default_factory=list)
    """(line number, error) of records that were sent and not acknowledged."""
    sent: int = 0
    delay_ids: list[tuple[int, str]] = field(default_factory=list)
    """(line number, id) of recurring records, which without it nobody could end."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, number: int, metadata: RecordMetadata | None, error: TailraceError | None, is_recurring: bool) -> None:
        """What became of a record; from whichever thread the producer calls."""
        with self._changed:
            if error is None:
                self.acknowledged += 1
                if is_recurring and metadata is not None and metadata.delay_id is not None:
                    self.delay_ids.append((number, metadata.delay_id))
            else:
                self.failures.append((number, error))
            self._changed.notify()

    def wait(self) -> None:
        """Until it is noted what became of all that was sent: a flush returns when that is known, and the callbacks come a moment later."""
        with self._changed:
            self._changed.wait_for(lambda: self.acknowledged + len(self.failures) >= self.sent, CALLBACKS_TIMEOUT_S)


def send_lines(producer: Producer, info: TopicInfo, lines: Iterable[bytes], options: LineOptions) -> Sent:
    """Send every line and wait until it is known what became of each. Raises TailraceError, which says what was acknowledged."""
    sent = Sent()
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            try:
                _send(producer, info, line.rstrip(b"\r\n"), number, options, sent)
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
        raise type(error)(f"{where}{error.detail}; {_told(sent, number - 1)}", error.code) from None
    except KeyboardInterrupt:
        with contextlib.suppress(RequestTimeoutError):
            producer.flush(INTERRUPTED_S)
        complain(f"interrupted; {sent.acknowledged} of {sent.sent} lines that were sent are acknowledged")
        raise
    producer.flush()
    sent.wait()
    if sent.failures:
        line_number, first = min(sent.failures, key=lambda failure: failure[0])
        raise TailraceError(f"line {line_number}: {first.detail}; of all {number} lines {sent.acknowledged} are acknowledged", first.code)
    return sent


def _told(sent: Sent, before: int) -> str:
    skipped = f", {sent.skipped} skipped" if sent.skipped else ""
    if not before:
        return "nothing was sent before it"
    return (
        f"of the {counted(before, 'line')} before it {sent.acknowledged} {'is' if sent.acknowledged == 1 else 'are'} acknowledged{skipped}"
    )


def _send(producer: Producer, info: TopicInfo, text: bytes, number: int, options: LineOptions, sent: Sent) -> None:
    key: bytes | str | None = options.key
    if options.key_separator is not None:
        key, found, text = text.partition(options.key_separator.encode())
        if not found:
            raise BadLineError(f"line {number} has no {options.key_separator!r} between key and value")
    value: Any = text
    if info.typed:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise BadLineError(f"line {number} is no JSON object, which a typed topic needs: {error}") from None

    try:
        if info.typed and isinstance(value, dict):
            rows_from_dicts([value], info.schema)  # a batch with one row that does not fit would fail as a whole
        producer.send(
            info.name, value, key, headers=list(options.headers) or None, partition=options.partition, timestamp=options.timestamp,
            deliver_at=options.due, repeat=options.repeat,
            on_delivery=lambda metadata, error: sent.note(number, metadata, error, options.repeat is not None),
        )  # fmt: skip
        sent.sent += 1
    except (InvalidRecordError, SchemaMismatchError, RecordTooLargeError) as error:
        raise BadLineError(f"line {number}: {error.detail}", error.code) from None
