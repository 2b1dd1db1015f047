"""`tailrace consume`: prints a topic's records to standard output.

Exit status 4 (EXIT_SKIPPED): every readable record was printed, and damaged records were skipped as
--skip-damaged asks.

A member of a group (--group) commits only what was written to standard output: every
COMMIT_EVERY_S, before a partition goes to another member, and at its end. After a kill its
successor repeats at most the records of COMMIT_EVERY_S.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import click
import pyarrow as pa

from appliance.cli.options import (
    SINCE_HELP,
    PastMoment,
    bootstrap_option,
    complete_groups,
    complete_topics,
    connect,
)
from appliance.cli.output import complain
from appliance.cli.record_output import (
    BINARY_FORMATS,
    FORMATS,
    TEMPLATE_HELP,
    json_line,
    template,
    value_line,
    write_csv,
    write_lines,
)
from tailrace.admin.admin import Admin
from tailrace.batch.topic_batch import TopicBatch
from tailrace.client.topic_metadata import TopicInfo
from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import CommitFailedError, CorruptBatchError, UnknownTopicError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.group.rebalance_listener import RebalanceListener

POLL_MS = 500
COMMIT_EVERY_S = 1.0
EXIT_SKIPPED = 4


@click.command()
@click.argument(
    "topics", nargs=-1, required=True, metavar="TOPIC...", shell_complete=complete_topics
)
@click.option("--partition", type=int, help="Only this partition.")
@click.option(
    "--group",
    shell_complete=complete_groups,
    help="As a member of this group: begin where it is, commit what was printed.",
)
@click.option("--from-beginning", is_flag=True, help="Begin with the first record.")
@click.option("--offset", type=click.IntRange(0), help="Begin at this offset.")
@click.option(
    "--since",
    type=PastMoment(),
    help=f"Begin with the first record of this time or later: {SINCE_HELP}",
)
@click.option(
    "--tail",
    type=click.IntRange(1),
    metavar="N",
    help="Begin with the last N records of each partition.",
)
@click.option(
    "--until",
    type=PastMoment(),
    help=f"End before the first record of this time or later: {SINCE_HELP}",
)
@click.option("--max", "maximum", type=click.IntRange(1), help="End after this many records.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="value",
    show_default=True,
    help="arrow and parquet write one file to standard output.",
)
@click.option(
    "--template",
    "-f",
    "text",
    metavar="TEXT",
    help=f"Each record as TEXT says, as kcat's -f: {TEMPLATE_HELP}.",
)
@click.option("--follow", is_flag=True, help="Wait for new records at the end.")
@click.option(
    "--skip-damaged",
    is_flag=True,
    help="Skip damaged records and name their offsets, instead of ending at the first one; the "
    "exit status is 4 if any were skipped.",
)
@bootstrap_option
def command(
    topics: tuple[str, ...],
    partition: int | None,
    group: str | None,
    from_beginning: bool,
    offset: int | None,
    since: dt.datetime | None,
    tail: int | None,
    until: dt.datetime | None,
    maximum: int | None,
    form: str,
    text: str | None,
    follow: bool,
    skip_damaged: bool,
    bootstrap: str,
) -> int:
    """Print the records of one or more topics. A pattern such as 'orders-*' stands for all topics
    that match.

    With --from-beginning, --offset, --since, --tail or --until the command ends at the current end
    of the topic, unless --follow is given. Without these it waits for new records, like `tail -f`.

    With --group the partitions are shared with the group's other members. Reading starts at the
    committed offsets; where nothing is committed, at the end, or at the beginning with
    --from-beginning. Printed records are committed, on Ctrl-C and SIGTERM too.

    \b
    Example:
      tailrace consume orders --from-beginning --format json
      tailrace consume orders --group billing
      tailrace consume orders --since 2h --template '%t %p %o %k %v\\n'
      tailrace consume flights --from-beginning --format parquet > flights.parquet
    """
    if group is not None and (
        partition is not None
        or offset is not None
        or since is not None
        or tail is not None
        or until is not None
    ):
        raise click.UsageError(
            "--group reads the partitions that the group assigns, from its committed offsets: "
            "leave out --partition, --offset, --since, --tail and --until. To move a group use "
            "`tailrace group reset-offsets`"
        )
    if follow and until is not None:
        raise click.UsageError("--follow and --until exclude each other: leave one of them out")
    start = Start(from_beginning, offset, since, tail, is_past=until is not None)
    if text is not None and form != "value":
        raise click.UsageError("--template and --format exclude each other: leave one of them out")
    line = template(text) if text is not None else json_line if form == "json" else value_line
    if form in BINARY_FORMATS and sys.stdout.isatty():
        raise click.UsageError(
            f"--format {form} writes binary data, not for a terminal: redirect it to a file, > "
            f"records.{form}"
        )
    with connect(bootstrap) as admin:
        infos = admin.topic_info(_matching(topics, admin))
    schemas = {name: info.schema for name, info in infos.items()}
    schema = next(iter(schemas.values()))
    is_typed = next(iter(infos.values())).typed
    if form not in ("value", "json") and any(other != schema for other in schemas.values()):
        raise click.UsageError(
            f"the topics have different schemas, and a {form} file has one: consume them one at "
            "a time"
        )
    reset = "earliest" if start.is_given else "latest"
    with (
        nullcontext() if group is None else Ending() as ending,
        Consumer(
            bootstrap=bootstrap, auto_offset_reset=reset, group_id=group, enable_auto_commit=False
        ) as consumer,
    ):
        keys = _partitions(infos, partition)
        reader: Reader
        if ending is not None:
            ends = None if follow or not start.is_given else consumer.end_offsets(keys)
            reader = GroupReader(consumer, ends, maximum, skip_damaged, ending)
            consumer.subscribe(list(infos), listener=reader.listener)
        else:
            consumer.assign(keys)
            start.seek(consumer, keys)
            reader = Reader(
                consumer, _ends(consumer, keys, start, until, follow), maximum, skip_damaged
            )
        with reader:
            if form in BINARY_FORMATS:
                BINARY_FORMATS[form](reader, schema)
            elif form == "csv":
                write_csv(reader, schema.names if is_typed else None)
            else:
                write_lines(reader, line)
    if reader.skipped_offsets:
        complain(
            f"skipped {reader.skipped_offsets} damaged offsets in {reader.skipped_ranges} places; "
            "`tailrace log verify` tells more"
        )
        return EXIT_SKIPPED
    return 0


class Ending:
    """Signals that end a member of a group: Ctrl-C and a service manager's SIGTERM.

    The first signal ends it while it waits for records or between two records. Printed records are
    then committed and the partitions given back. A second signal ends it at once, for standard
    output may be blocked.
    """

    def __init__(self) -> None:
        self._asked: BaseException | None = None
        self._may_raise = True
        """True if a signal ends the command at once, as until records are printed."""

    def __enter__(self) -> Self:
        self._before = [
            (number, signal.signal(number, self._on_signal))
            for number in (signal.SIGINT, signal.SIGTERM)
        ]
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        error: BaseException = (
            KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        )
        if self._may_raise or self._asked is not None:
            raise error
        self._asked = error

    def begin_printing(self) -> None:
        """Begin to delay signals to the next `while_waiting` block or `check`."""
        self._may_raise = False

    def check(self) -> None:
        """End here if a signal came.

        Raises: KeyboardInterrupt, SystemExit.
        """
        if self._asked is not None:
            raise self._asked

    @contextmanager
    def while_waiting(self, *, waits: bool = True) -> Iterator[None]:
        """End at once on a signal in this block; with `waits=False` delay signals."""
        before, self._may_raise = self._may_raise, waits
        try:
            if waits:
                self.check()
            yield
        finally:
            self._may_raise = before


def _partitions(infos: dict[str, TopicInfo], only: int | None) -> list[TopicPartition]:
    return [
        TopicPartition(name, p)
        for name, info in infos.items()
        for p in ([only] if only is not None else range(len(info.partitions)))
    ]


def _ends(
    consumer: Consumer,
    keys: list[TopicPartition],
    start: Start,
    until: dt.datetime | None,
    follow: bool,
) -> dict[TopicPartition, int] | None:
    """The offsets at which reading ends; None if it does not end."""
    if follow or not start.is_given:
        return None
    ends = consumer.end_offsets(keys)
    if until is None:
        return ends
    behind = consumer.offsets_for_times(dict.fromkeys(keys, until))
    return {
        key: end if (found := behind[key]) is None else found.offset for key, end in ends.items()
    }


def _matching(topics: tuple[str, ...], admin: Admin) -> list[str]:
    """Names, and what patterns stand for. Raises UnknownTopicError when one stands for nothing."""
    names: dict[str, None] = {}
    for given in topics:
        found = [given]
        if any(character in given for character in "*?["):
            found = fnmatch.filter(admin.list_topics(), given)
            if not found:
                raise UnknownTopicError(
                    f"no topic matches {given!r}: `tailrace topic list` shows the topics"
                )
        names.update(dict.fromkeys(found))
    return list(names)


class Start:
    """The start of reading: one of the ways that the options name, else the current end."""

    def __init__(
        self,
        from_beginning: bool,
        offset: int | None,
        since: dt.datetime | None,
        tail: int | None,
        *,
        is_past: bool,
    ) -> None:
        """`is_past`: an end is given, so that what is not told otherwise begins at the beginning.
        Raises UsageError.
        """
        self._offset, self._since, self._tail = offset, since, tail
        given = [from_beginning, offset is not None, since is not None, tail is not None]
        if sum(given) > 1:
            raise click.UsageError(
                "--from-beginning, --offset, --since and --tail exclude each other: give one "
                "of them"
            )
        self._from_beginning = from_beginning or (is_past and not any(given))
        self.is_given = any(given) or is_past

    def seek(self, consumer: Consumer, keys: list[TopicPartition]) -> None:
        """Raises ClickException when the offset is behind the end of every partition."""
        ends = consumer.end_offsets(keys)
        if self._from_beginning:
            consumer.seek_to_beginning(*keys)
        elif self._offset is not None:
            beyond = [key for key in keys if ends[key] < self._offset]
            for key in beyond:
                sentence = (
                    f"{key.topic}-{key.partition} ends at offset {ends[key]} and has no offset "
                    f"{self._offset}: give an offset below its end"
                )
                if len(beyond) == len(keys):
                    raise click.ClickException(
                        f"{sentence}. Begin between {consumer.beginning_offsets([key])[key]} and "
                        f"{ends[key]}, or with --tail N"
                    )
                complain(sentence)
            for key in keys:
                consumer.seek(key, min(self._offset, ends[key]))
        elif self._since is not None:
            for key, found in consumer.offsets_for_times(dict.fromkeys(keys, self._since)).items():
                consumer.seek(key, ends[key] if found is None else found.offset)
        elif self._tail is not None:
            begins = consumer.beginning_offsets(keys)
            for key in keys:
                consumer.seek(key, max(begins[key], ends[key] - self._tail))
        else:
            for key in keys:
                consumer.seek(key, ends[key])


class Reader:
    """A reader that polls until the end offsets are reached, --max records came, or for ever."""

    def __init__(
        self,
        consumer: Consumer,
        ends: dict[TopicPartition, int] | None,
        maximum: int | None,
        skip_damaged: bool,
    ) -> None:
        self._consumer = consumer
        self._skip_damaged = skip_damaged
        self._ends = ends
        self._left = maximum
        self.skipped_offsets = 0
        self.skipped_ranges = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """True if the writer is done, or a signal came."""

    def _waiting(self) -> AbstractContextManager[None]:
        """Around a poll."""
        return nullcontext()

    def is_finished(self) -> bool:
        """True if the end offsets are reached or --max records were printed."""
        if self._left is not None and self._left <= 0:
            return True
        return self._ends is not None and all(
            self._consumer.position(key) >= end for key, end in self._ends.items()
        )

    def _skip(self, error: CorruptBatchError) -> None:
        """Seek behind the damage if --skip-damaged is given; else raise `error`."""
        if not self._skip_damaged or error.key is None or error.next_offset is None:
            raise error
        complain(f"skipped: {error.detail}")
        self.skipped_offsets += error.next_offset - (
            error.next_offset if error.first_offset is None else error.first_offset
        )
        self.skipped_ranges += 1
        self._consumer.seek(error.key, error.next_offset)

    def records(self) -> Iterable[Record]:
        """Poll for at most POLL_MS and return the records.

        Raises: CorruptBatchError, unless damage is skipped.
        """
        limit = 5000 if self._left is None else min(5000, self._left)
        try:
            with self._waiting():
                records = self._consumer.poll(POLL_MS, limit)
        except CorruptBatchError as error:
            self._skip(error)
            return []
        if self._ends is not None:
            records = [
                r
                for r in records
                if r.offset < self._ends.get(TopicPartition(r.topic, r.partition), 0)
            ]
        if self._left is not None:
            self._left -= len(records)
        return records

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Poll for at most POLL_MS and yield Arrow batches of some rows each.

        Raises: CorruptBatchError, unless damage is skipped.
        """
        try:
            with self._waiting():
                polled = self._consumer.poll_arrow(POLL_MS)
        except CorruptBatchError as error:
            self._skip(error)
            return
        for taken in polled:
            batch = taken.batch
            if self._ends is not None:
                batch = batch.slice(
                    0,
                    max(
                        0,
                        self._ends.get(TopicPartition(taken.topic, taken.partition), 0)
                        - taken.base_offset,
                    ),
                )
            if self._left is not None:
                batch = batch.slice(0, max(0, self._left))
                self._left -= batch.num_rows
            if batch.num_rows:
                yield batch
                self._wrote_batch(taken, batch.num_rows)

    def _wrote_batch(self, taken: TopicBatch, rows: int) -> None:
        """Count the first rows of a batch as written."""


class GroupReader(Reader):
    """A reader for a member of a group, which commits what was written."""

    def __init__(
        self,
        consumer: Consumer,
        ends: dict[TopicPartition, int] | None,
        maximum: int | None,
        skip_damaged: bool,
        ending: Ending,
    ) -> None:
        super().__init__(consumer, ends, maximum, skip_damaged)
        self._ending = ending
        self._written: dict[TopicPartition, int] = {}
        """Offsets after the last written records that are not committed yet."""
        self._commit_at_s = time.monotonic() + COMMIT_EVERY_S
        self.listener = _Handover(self)

    def __enter__(self) -> Self:
        self._ending.begin_printing()
        return self

    def __exit__(self, *_error: object) -> None:
        self.commit()

    def _waiting(self) -> AbstractContextManager[None]:
        return self._ending.while_waiting()

    def is_finished(self) -> bool:
        """`Reader.is_finished` for the assigned partitions; False while none is assigned."""
        if time.monotonic() >= self._commit_at_s:
            self.commit()
        if self._left is not None and self._left <= 0:
            return True
        mine = self._consumer.assignment() if self._ends is not None else ()
        return bool(mine) and all(
            self._consumer.position(key) >= self._ends.get(key, 0)
            for key in mine
            if self._ends is not None
        )

    def records(self) -> Iterator[Record]:
        """Yield as `Reader.records`. A record counts as written when the next one is asked for."""
        for record in super().records():
            yield record
            self._written[TopicPartition(record.topic, record.partition)] = record.offset + 1
            self._ending.check()

    def _wrote_batch(self, taken: TopicBatch, rows: int) -> None:
        self._written[TopicPartition(taken.topic, taken.partition)] = (
            int(taken.offsets[rows - 1].as_py()) + 1
        )
        self._ending.check()

    def commit(self, keys: Iterable[TopicPartition] | None = None) -> None:
        """Flush standard output and commit what was written, in these partitions or all."""
        self._commit_at_s = time.monotonic() + COMMIT_EVERY_S
        taken = {
            key: self._written.pop(key)
            for key in list(self._written if keys is None else keys)
            if key in self._written
        }
        if not taken:
            return
        with self._ending.while_waiting(waits=False):  # a poll may be the caller
            sys.stdout.flush()
            sys.stdout.buffer.flush()
            try:
                self._consumer.commit(taken)
            except CommitFailedError as error:
                complain(
                    "offsets not committed, so another member prints these records again: "
                    f"{error.detail}"
                )

    def forget(self, keys: Iterable[TopicPartition]) -> None:
        """Forget partitions that another member has now; it begins at the committed offsets."""
        for key in keys:
            self._written.pop(key, None)


class _Handover(RebalanceListener):
    """Commits before a partition goes to another member."""

    def __init__(self, reader: GroupReader) -> None:
        self._reader = reader

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        self._reader.commit(revoked)

    def on_partitions_lost(self, lost: list[TopicPartition]) -> None:
        self._reader.forget(lost)
