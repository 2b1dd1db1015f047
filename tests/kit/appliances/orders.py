"""One topic, `orders`, in an appliance of the test's own: made, written with numbers, read,
killed.
"""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.format.segments.segment import SEGMENT_SUFFIX

ORDERS = TopicPartition("orders", 0)


def start(data_dir: pathlib.Path, **settings: Any) -> EmbeddedAppliance:
    return start_embedded(data_dir=str(data_dir), settings=settings, auto_create_topics=False)


def create(appliance: EmbeddedAppliance, partitions: int = 1, **configs: Any) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(
            [
                NewTopic(
                    "orders",
                    partitions,
                    {name.replace("_", "."): value for name, value in configs.items()},
                )
            ]
        )


def produce(
    appliance: EmbeddedAppliance,
    first: int,
    last: int,
    *,
    size: int = 0,
    each: bool = False,
    acks: Any = "all",
) -> None:
    """Values "<n>:xxx" from `first` to `last - 1`; `each`: one batch a record."""
    with Producer(appliance.address, acks=acks) as producer:
        for number in range(first, last):
            handle = producer.send("orders", b"%d:" % number + b"x" * size, partition=0)
            if each:
                handle.result(60)


def consumer(appliance: EmbeddedAppliance, offset: int = 0) -> Consumer:
    made = Consumer(bootstrap=appliance.address, auto_offset_reset="none")
    made.assign([ORDERS])
    made.seek(ORDERS, offset)
    return made


def read(appliance: EmbeddedAppliance, count: int, offset: int = 0) -> list[int]:
    """Numbers of the records from `offset` on."""
    with consumer(appliance, offset) as reader:
        found: list[int] = []
        while len(found) < count:
            records = reader.poll(60_000)
            assert records, f"only {len(found)} of {count} records came"
            found += [int((record.value or b"").partition(b":")[0]) for record in records]
        return found


def read_all(reader: Consumer, found: list[int]) -> None:
    """Add offsets to `found` until something is raised."""
    while True:
        found += [record.offset for record in reader.poll(60_000)]


def kill_everything(appliance: EmbeddedAppliance) -> None:
    os.kill(appliance.pid, signal.SIGKILL)
    appliance.stop()


def segments(data_dir: pathlib.Path) -> list[pathlib.Path]:
    return sorted((data_dir / "orders-0").glob(f"*{SEGMENT_SUFFIX}"))
