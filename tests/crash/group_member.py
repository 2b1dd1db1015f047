"""A program that reads as a member of a group and writes down what it handled, until SIGTERM;
`tests.crash.group_torture` kills it.

`python -P -m tests.crash.group_member consumer|share|sql|retry ADDRESS FILE SEED`. A line of the
file, written before the record is committed or accepted:

    R partition offset value          a record was handled (share: and accepted; retry: of the original)
    A partition position              consumer: the partition was given to this member, which goes on at `position`
    V partition                       consumer: it was taken away, or lost

What `sql` handles are rows of `results.db` beside the file, in the transaction of its offsets.
"""  # noqa: E501

from __future__ import annotations

import pathlib
import random
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterable
from typing import TextIO

import tailrace
from tailrace import Consumer, Record, TopicPartition
from tailrace.core.errors import (
    CommitFailedError,
    FencedMemberError,
    LockLostError,
    TailraceError,
    UnknownMemberError,
)
from tailrace.idempotent import OffsetsMovedError, SqlSink

TOPIC = "torture"
POISON = b"poison"
"""A record with it in its value is released or retried by all members, each time: it ends as a dead
letter.
"""
FLAKY = b"flaky"
"""A record with it in its value is handled when it comes for the third time."""
DATABASE = "results.db"
RETRY_GROUP = "again"
RETRIES_MAX = 3


class Notes(tailrace.RebalanceListener):
    """Writes down what the member owns."""

    def __init__(self, consumer: Consumer, out: TextIO) -> None:
        self._consumer = consumer
        self._out = out

    def on_partitions_assigned(self, partitions: Iterable[TopicPartition]) -> None:
        for key in partitions:
            print("A", key.partition, self._consumer.position(key), file=self._out)

    def on_partitions_revoked(self, partitions: Iterable[TopicPartition]) -> None:
        for key in partitions:
            print("V", key.partition, file=self._out)

    def on_partitions_lost(self, partitions: Iterable[TopicPartition]) -> None:
        self.on_partitions_revoked(partitions)


def consume(address: str, out: TextIO, rng: random.Random, stop: threading.Event) -> None:
    """At least once: handled, then committed."""
    with Consumer(
        bootstrap=address, group_id="members", auto_offset_reset="earliest",
        enable_auto_commit=False, session_timeout_ms=10_000,
        heartbeat_interval_ms=500, max_poll_records=200,
    ) as consumer:  # fmt: skip
        consumer.subscribe([TOPIC], listener=Notes(consumer, out))
        while not stop.is_set():
            try:
                records = consumer.poll(200)
            except TailraceError as error:
                if not error.retriable:
                    raise
                continue
            for record in records:
                print(
                    "R", record.partition, record.offset, (record.value or b"").decode(), file=out
                )
            if records and rng.random() < 0.5:
                try:
                    consumer.commit()
                except (CommitFailedError, FencedMemberError, UnknownMemberError):
                    pass  # another member has the partition: it reads again what was not committed
                except TailraceError as error:
                    if not error.retriable:
                        raise


def share(address: str, out: TextIO, rng: random.Random, stop: threading.Event) -> None:
    """A worker of a queue: most records are accepted, some released, poison always."""
    with tailrace.ShareConsumer(
        TOPIC, bootstrap=address, group_id="workers", auto_offset_reset="earliest"
    ) as consumer:
        while not stop.is_set():
            try:
                records = consumer.poll(200, 100)
                for record in records:
                    if POISON in (record.value or b"") or rng.random() < 0.05:
                        consumer.acknowledge(record, "release")
                    else:
                        print(
                            "R",
                            record.partition,
                            record.offset,
                            (record.value or b"").decode(),
                            file=out,
                        )
                        consumer.acknowledge(record, "accept")
                consumer.commit()
            except LockLostError:
                pass
            except TailraceError as error:
                if not error.retriable:
                    raise


def into_sql(
    address: str, stop: threading.Event, rng: random.Random, database: pathlib.Path
) -> None:
    """Exactly once: results and offsets in one transaction, some of which take so long that a kill
    meets them.
    """
    connection = sqlite3.connect(database, timeout=120)
    connection.execute(
        "PRAGMA synchronous=OFF"
    )  # what a killed process has written is in the page cache
    sink = SqlSink(connection, "books")
    with Consumer(
        bootstrap=address, group_id="books", auto_offset_reset="earliest", enable_auto_commit=False,
        session_timeout_ms=10_000,
        heartbeat_interval_ms=500, max_poll_records=200,
    ) as consumer:  # fmt: skip
        consumer.subscribe([TOPIC], listener=sink.listener(consumer))
        is_led = True
        while not stop.is_set():
            try:
                if not is_led:
                    sink.seek(consumer)
                is_led = False
                records = consumer.poll(200)
                if records:
                    _apply(sink, records, rng, stop)
                is_led = True
            except OffsetsMovedError:
                pass  # another member has applied these
            except TailraceError as error:
                if not error.retriable:
                    raise


def _apply(sink: SqlSink, records: list[Record], rng: random.Random, stop: threading.Event) -> None:
    slow_at = rng.randrange(5 * len(records))
    with sink.transaction(records) as tx:
        for number, record in enumerate(tx.records):
            tx.cursor.execute(
                "INSERT INTO results VALUES (?, ?, ?)",
                (record.partition, record.offset, (record.value or b"").decode()),
            )
            if number == slow_at:
                stop.wait(rng.uniform(0, 0.2))  # a load, not a synchronisation


def again(address: str, out: TextIO, stop: threading.Event) -> None:
    """At least once, with retries: what cannot be handled comes again later."""
    with Consumer(
        TOPIC, bootstrap=address, group_id=RETRY_GROUP, auto_offset_reset="earliest",
        enable_auto_commit=False, session_timeout_ms=10_000,
        heartbeat_interval_ms=500, max_poll_records=50, max_retry_attempts=RETRIES_MAX,
    ) as consumer:  # fmt: skip
        while not stop.is_set():
            try:
                records = consumer.poll(200)
                if all(_handle_or_retry(consumer, record, out, stop) for record in records):
                    consumer.commit()
            except (CommitFailedError, FencedMemberError, UnknownMemberError):
                pass
            except TailraceError as error:
                if not error.retriable:
                    raise


def _handle_or_retry(
    consumer: Consumer, record: Record, out: TextIO, stop: threading.Event
) -> bool:
    """False: it is neither, and nothing behind it may be committed: the program ends."""
    value, headers = record.value or b"", dict(record.headers)
    is_retried = record.topic != TOPIC
    attempt = int(headers["retry.attempt"] or b"") if is_retried else 0
    assert attempt <= RETRIES_MAX, (value, attempt)
    if POISON not in value and (FLAKY not in value or attempt >= 2):
        origin = (
            [int(headers[f"retry.{name}"] or b"") for name in ("partition", "offset")]
            if is_retried
            else [record.partition, record.offset]
        )
        print("R", *origin, value.decode(), file=out)
        return True
    while not stop.is_set():
        try:
            consumer.retry_later(record, 0.2)
            return True
        except TailraceError as error:
            if not error.retriable:
                raise
    return False


def main() -> None:
    kind, address, path, seed = sys.argv[1:5]
    stop, rng = threading.Event(), random.Random(int(seed))
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with open(
        path, "a", buffering=1
    ) as out:  # a line at a time: what SIGKILL leaves is whole lines, and at most one that is cut
        if kind == "sql":
            into_sql(address, stop, rng, pathlib.Path(path).with_name(DATABASE))
        elif kind == "retry":
            again(address, out, stop)
        else:
            (share if kind == "share" else consume)(address, out, rng, stop)


if __name__ == "__main__":
    main()
