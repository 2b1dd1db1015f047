"""A program that reads as a member of a group and writes down what it handled, until SIGTERM; `tests.crash.group_torture` kills it.

`python -P -m tests.crash.group_member consumer|share ADDRESS FILE SEED`. A line of the file, written before the record is committed or accepted:

    R partition offset value          a record was handled (share: and accepted)
    A partition position              consumer: the partition was given to this member, which goes on at `position`
    V partition                       consumer: it was taken away, or lost
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Iterable
from typing import TextIO

import tailrace
from tailrace import Consumer, TopicPartition
from tailrace.errors import CommitFailedError, FencedMemberError, LockLostError, TailraceError, UnknownMemberError

TOPIC = "torture"
POISON = b"poison"
"""A record with it in its value is released by all members, each time: it ends as a dead letter."""


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
        bootstrap=address, group_id="members", auto_offset_reset="earliest", enable_auto_commit=False, session_timeout_ms=10_000,
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
                print("R", record.partition, record.offset, (record.value or b"").decode(), file=out)
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
    with tailrace.ShareConsumer(TOPIC, bootstrap=address, group_id="workers", auto_offset_reset="earliest") as consumer:
        while not stop.is_set():
            try:
                records = consumer.poll(200, 100)
                for record in records:
                    if POISON in (record.value or b"") or rng.random() < 0.05:
                        consumer.acknowledge(record, "release")
                    else:
                        print("R", record.partition, record.offset, (record.value or b"").decode(), file=out)
                        consumer.acknowledge(record, "accept")
                consumer.commit()
            except LockLostError:
                pass
            except TailraceError as error:
                if not error.retriable:
                    raise


def main() -> None:
    kind, address, path, seed = sys.argv[1:5]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with open(path, "a", buffering=1) as out:  # a line at a time: what SIGKILL leaves is whole lines, and at most one that is cut
        (share if kind == "share" else consume)(address, out, random.Random(int(seed)), stop)


if __name__ == "__main__":
    main()
