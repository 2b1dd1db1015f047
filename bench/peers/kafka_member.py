"""Kafka's consumers of one group in one process, with its new group protocol (KIP-848):
bench/members/group_member.py over confluent-kafka-python.

`python -P -m bench.peers.kafka_member BOOTSTRAP GROUP TOPIC CONSUMERS FILE`. Session timeout and
heartbeat interval are the broker's with that protocol.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.members.member_notes import AUTO_COMMIT_INTERVAL_MS, POLL_MS, Notes, run_members


def consume(bootstrap: str, group: str, topic: str, notes: Notes) -> None:
    """For ever."""
    from confluent_kafka import Consumer, KafkaException

    def given(_: Any, partitions: list[Any]) -> None:
        notes.given(key.partition for key in partitions)

    def taken(_: Any, partitions: list[Any]) -> None:
        notes.taken(key.partition for key in partitions)

    consumer = Consumer({
        "bootstrap.servers": bootstrap, "group.id": group, "group.protocol": "consumer",
        "auto.offset.reset": "latest", "enable.auto.commit": True,
        "auto.commit.interval.ms": AUTO_COMMIT_INTERVAL_MS,
    })  # fmt: skip
    consumer.subscribe([topic], on_assign=given, on_revoke=taken, on_lost=taken)
    while True:
        message = consumer.poll(POLL_MS / 1000)
        if message is None:
            continue
        if (error := message.error()) is None:
            notes.read([message.partition()])
        elif error.fatal():
            raise KafkaException(error)


def main() -> None:
    """See the module's docstring."""
    bootstrap, group, topic, count, path = sys.argv[1:6]
    run_members(int(count), path, lambda notes: consume(bootstrap, group, topic, notes))


if __name__ == "__main__":
    main()
