"""Data directories with everything in them that an appliance writes, and what its clients were
told: the specimens that the file fuzzer damages.

`stopped`: ended cleanly. `killed`: everything was killed while the flusher stood still, so that
acknowledged batches (acks=1) are in shared memory alone.
"""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import re
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from shm.memory.region import remove
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import HANG_LIMIT_S, children, wait_until

SETTINGS = {
    "ring_bytes": 4 << 20,
    "lane_bytes": 1 << 20,
    "slots": 64,
    "disk_reserve_bytes": 1 << 20,
    "topic.delete.retention.ms": 60_000,
    "journal_bytes": 1 << 20,
}
NOT_THE_APPLIANCES = {"tailrace.log"}
"""Written by who starts an embedded appliance."""
TYPED_SCHEMA = pa.schema([("carrier", pa.string()), ("delay", pa.int32())])
PENDING = 40


@dataclass(slots=True)
class Specimen:
    """`acknowledged`: (topic, partition, offset) -> value, or the row of a typed topic."""

    directory: pathlib.Path
    acknowledged: dict[tuple[str, int, int], object] = field(default_factory=dict)
    delay_ids: set[str] = field(default_factory=set)
    regions: list[str] = field(default_factory=list)
    """Names in shared memory that were left."""

    def files(self) -> list[pathlib.Path]:
        return sorted(
            p for p in self.directory.rglob("*") if p.is_file() and p.name not in NOT_THE_APPLIANCES
        )

    def remove_regions(self) -> None:
        for name in self.regions:
            remove(name)


def kind_of(path: pathlib.Path) -> str:
    """Kind of a file, without its number: "N.arrows of orders", "partition.json",
    "coordinator.db-wal".
    """
    name = re.sub(r"(\d+-)*\d{6,}(-\d+)*", "N", path.name)
    topic = re.sub(r"-\d+$", "", path.parent.name)
    return f"{name} of {topic}" if name.startswith("N") else name


def regions_of(appliance: EmbeddedAppliance) -> list[str]:
    """Regions of /dev/shm that its processes have mapped."""
    found: set[str] = set()
    for pid in [appliance.pid, *children(appliance).values()]:
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
        found |= {match[1] for match in re.finditer(r"/dev/shm(/tailrace-\S+)", maps)}
    return sorted(found)


def make(directory: pathlib.Path, *, is_killed: bool) -> Specimen:
    """Fill `directory`, then stop or kill the appliance."""
    specimen = Specimen(directory)
    appliance = start_embedded(data_dir=str(directory), settings=SETTINGS, auto_create_topics=False)
    with Admin(appliance.address) as admin:
        admin.create_topics([
            NewTopic("orders", 2, {"segment.bytes": 64 << 10}),
            NewTopic("events", 1, {"durability": "memory", "compression.type": "lz4"}),
            NewTopic("flights", 1, schema=TYPED_SCHEMA),
            NewTopic("later", 1, {"delay.enabled": True}),
            NewTopic("gone", 1),
        ])  # fmt: skip
        admin.delete_topics(["gone"])
    with Producer(appliance.address, acks="all") as producer:
        for round_number in range(12):  # so many batches; segments of `orders` roll
            _send(producer, specimen, round_number, 30)
        specimen.delay_ids = {
            str(
                producer.send("later", b"%d" % n, deliver_after=dt.timedelta(days=n + 1))
                .result(HANG_LIMIT_S)
                .delay_id
            )
            for n in range(PENDING)
        }
    if not is_killed:
        wait_until(lambda: any(directory.rglob("*.pending")), "delayed records are saved in files")
    if is_killed:
        os.kill(children(appliance)["tr-flusher-0"], signal.SIGSTOP)
        with Producer(appliance.address, acks=1) as producer:
            _send(producer, specimen, 99, 20, topics=("orders", "events"))
        specimen.regions = regions_of(appliance)
        os.kill(appliance.pid, signal.SIGKILL)
        appliance.stop()
        wait_until(lambda: not children(appliance), "the children have died")
    else:
        assert appliance.stop() == 0
    return specimen


def _send(
    producer: Producer,
    specimen: Specimen,
    number: int,
    count: int,
    topics: tuple[str, ...] = ("orders", "events", "flights"),
) -> None:
    """A batch to each partition, acknowledged when this returns."""
    handles = []
    warnings.simplefilter("ignore", RuntimeWarning)  # acks="all" on a topic with durability=memory
    for topic, partition in (("orders", 0), ("orders", 1), ("events", 0), ("flights", 0)):
        for row in range(count) if topic in topics else ():
            text = f"{topic}-{partition}-{number}-{row}-"
            value: object = (
                {"carrier": text, "delay": row}
                if topic == "flights"
                else text.encode() + os.urandom(120).hex().encode()
            )
            handles.append(
                (topic, partition, value, producer.send(topic, value, partition=partition))
            )
    for topic, partition, value, handle in handles:
        offset = handle.result(HANG_LIMIT_S).offset
        assert offset is not None
        specimen.acknowledged[topic, partition, offset] = value


def by_kind(specimen: Specimen) -> Iterator[tuple[str, list[pathlib.Path]]]:
    """Files, those of one kind together."""
    kinds: dict[str, list[pathlib.Path]] = {}
    for path in specimen.files():
        kinds.setdefault(kind_of(path), []).append(path)
    yield from sorted(kinds.items())
