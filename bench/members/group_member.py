"""Consumers of one group in one process, for `bench.members.rebalance`: each notes what it owned
and read, and when (member_notes.py).

`python -P -m bench.members.group_member ADDRESS GROUP TOPIC CONSUMERS FILE` reads until killed.
bench/peers/kafka_member.py is the same with Kafka's client.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from bench.members.member_notes import (
    AUTO_COMMIT_INTERVAL_MS,
    HEARTBEAT_INTERVAL_MS,
    POLL_MS,
    SESSION_TIMEOUT_MS,
    Notes,
    run_members,
)
from tailrace import Consumer, RebalanceListener, TopicPartition
from tailrace.core.errors import TailraceError


class _Noting(RebalanceListener):
    """Notes what is given and taken."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def on_partitions_assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """Noted."""
        self._notes.given(key.partition for key in partitions)

    def on_partitions_revoked(self, partitions: Iterable[TopicPartition]) -> None:
        """Noted."""
        self._notes.taken(key.partition for key in partitions)

    def on_partitions_lost(self, partitions: Iterable[TopicPartition]) -> None:
        """Noted."""
        self._notes.taken(key.partition for key in partitions)


def consume(address: str, group: str, topic: str, notes: Notes) -> None:
    """For ever."""
    consumer = Consumer(
        bootstrap=address, group_id=group, auto_offset_reset="latest",
        session_timeout_ms=SESSION_TIMEOUT_MS,
        heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS, enable_auto_commit=True,
        auto_commit_interval_ms=AUTO_COMMIT_INTERVAL_MS,
    )  # fmt: skip
    consumer.subscribe([topic], listener=_Noting(notes))
    while True:
        try:
            records = consumer.poll(POLL_MS)
        except TailraceError as error:
            if not error.retriable:
                raise
            continue
        if records:
            notes.read({record.partition for record in records})


def main() -> None:
    """See the module's docstring."""
    address, group, topic, count, path = sys.argv[1:6]
    run_members(int(count), path, lambda notes: consume(address, group, topic, notes))


if __name__ == "__main__":
    main()
