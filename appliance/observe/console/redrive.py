"""Sends dead letters again: from a dead-letter topic to the topics that they come from.

Each poll is a transaction that sends the records and commits the offsets of the group
`redrive.<topic>`: a kill repeats and loses nothing, and a second run continues where the first one
ended.

Owner: the caller's thread. Used by `tailrace topic redrive` and the console's page.
Invariants:
- Letters that arrive during the run are not sent again: it ends at the ends of its beginning.
- A sent record has the key, value and headers of its origin, without those that the dead-letter
  queue added.
- A letter that lost its value, or that does not name its origin, is counted and left where it is.

Source: Amazon SQS's dead-letter queue redrive, for the behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tailrace.admin.admin import Admin
from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import InvalidRequestError, UnknownTopicError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.group.dead_letter_queue import PREFIX
from tailrace.producer.producer import Producer

POLL_MS = 1_000
ORIGIN = PREFIX + "topic"
CUT = PREFIX + "is_cut"

Header = tuple[str, bytes]


class Redriven(NamedTuple):
    """Numbers of dead letters."""

    sent: int
    skipped: int
    """Letters that stay where they are: without their value, or without an origin."""


def redrive(
    address: str, topic: str, to: str | None = None, progress: Callable[[int], None] | None = None
) -> Redriven:
    """Send the dead letters of `topic` again, to `to` or to where they come from. `progress` gets
    the number of letters of each step. Raises TailraceError.
    """
    group = f"redrive.{topic}"
    with Admin(address, client_id="tailrace-redrive") as admin:
        count = admin.partition_counts(internal=True).get(topic, 0)
        if not count:
            raise UnknownTopicError(f"there is no topic {topic!r}")
        if to is not None:
            _check_target(admin, to)
        partitions = [TopicPartition(topic, number) for number in range(count)]
    with (
        Consumer(
            bootstrap=address,
            client_id="tailrace-redrive",
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        ) as consumer,
        Producer(address, client_id="tailrace-redrive", transactional_id=group) as producer,
    ):
        consumer.assign(partitions)
        return _move(consumer, producer, partitions, to, progress or (lambda _: None))


def _move(
    consumer: Consumer,
    producer: Producer,
    partitions: list[TopicPartition],
    to: str | None,
    progress: Callable[[int], None],
) -> Redriven:
    ends = consumer.end_offsets(partitions)
    sent = skipped = 0
    while any(consumer.position(partition) < ends[partition] for partition in partitions):
        records = [
            record
            for record in consumer.poll(timeout_ms=POLL_MS)
            if record.offset < ends[TopicPartition(record.topic, record.partition)]
        ]
        if not records:
            continue  # markers and aborted records have been passed, or nothing has come yet
        offsets = {
            partition: min(offset, ends[partition])
            for partition, offset in consumer.positions().items()
        }
        with producer.transaction():
            for record in records:
                target = None if _header(record, CUT) else to or _origin(record)
                if target is None:
                    skipped += 1
                    continue
                producer.send(target, record.value, key=record.key, headers=_own(record.headers))
                sent += 1
            producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
        progress(len(records))
    return Redriven(sent, skipped)


def _origin(record: Record) -> str | None:
    name = _header(record, ORIGIN)
    return None if name is None else name.decode(errors="replace")


def _header(record: Record, name: str) -> bytes | None:
    """The last header of this name: those of the dead-letter queue come after the sender's."""
    return next((value for key, value in reversed(record.headers) if key == name), None)


def _own(headers: Sequence[tuple[str, bytes | None]]) -> list[Header]:
    """The sender's headers: without those that the dead-letter queue added at the end."""
    kept = list(headers)
    while kept and kept[-1][0].startswith(PREFIX):
        kept.pop()
    return [(name, value or b"") for name, value in kept]


def _check_target(admin: Admin, to: str) -> None:
    if admin.topic_info([to])[to].typed:
        raise InvalidRequestError(
            f"topic {to!r} is typed, and dead letters are JSON text; send them to a topic without "
            "a schema"
        )
