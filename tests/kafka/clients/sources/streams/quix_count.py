"""Quix Streams: counts records by key, exactly once, and prints how many results there are.

Arguments: the gateway, a directory for the state, and for how many seconds without records it goes
on.
"""

from __future__ import annotations

import sys
from typing import Any

from confluent_kafka import Consumer, KafkaError
from quixstreams import Application

KEYS = 7
RECORDS = 300


def count(value: Any, state: Any) -> dict[str, int]:
    number = state.get("count", 0) + 1
    state.set("count", number)
    return {"count": number, "number": value["number"]}


def main(gateway: str, directory: str) -> None:
    app = Application(
        broker_address=gateway, consumer_group="quix", auto_offset_reset="earliest",
        processing_guarantee="exactly-once", state_dir=directory, loglevel="WARNING",
    )  # fmt: skip
    source = app.topic("quix-in", key_serializer="str", value_serializer="json")
    target = app.topic("quix-out", value_serializer="json")
    with app.get_producer() as producer:
        for number in range(RECORDS):
            made = source.serialize(key=f"k{number % KEYS}", value={"number": number})
            producer.produce(source.name, key=made.key, value=made.value)
    app.dataframe(source).apply(count, stateful=True).to_topic(target)
    app.run(count=RECORDS)
    print("NUMBERS", len(numbers_of(gateway, target.name)))


def numbers_of(gateway: str, topic: str) -> list[bytes]:
    """The committed records of a topic."""
    reader = Consumer(
        {"bootstrap.servers": gateway, "group.id": "quix-reader", "auto.offset.reset": "earliest",
         "isolation.level": "read_committed", "enable.partition.eof": True}
    )  # fmt: skip
    reader.subscribe([topic])
    found: list[bytes] = []
    ended: set[int] = set()
    partitions = len(reader.list_topics(topic).topics[topic].partitions)
    while len(ended) < partitions:
        record = reader.poll(1)
        if record is None:
            continue
        if record.error() is None:
            found.append(record.value())
        elif record.error().code() == KafkaError._PARTITION_EOF:
            ended.add(record.partition())
    reader.close()
    return found


main(*sys.argv[1:])
