"""Compaction: `make bench-compaction`. A table and a results file.

- `cleaning`: MB (500) of records of 100 B and of 1 KB, VERSIONS (20) of each key, in sealed
  segments: MB/s of what is read, and CPU seconds a GB of the cleaner. With KAFKA=1 Kafka cleans the
  same, with one cleaner thread; its CPU seconds are the broker's meanwhile.
- `foreground`: a producer at half its top rate, alone and while a cleaner works: p99 of the
  acknowledgements, and the rate.
- `small`: SMALL (200,000) records of 21 B, sent one by one: bytes a record after the merge,
  and the rate of a scan against the same records in large batches.

`ONLY=cleaning,small` takes a part. Figures of latest records and tables: `make bench-scan`.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

import tailrace
from bench.conditions import Conditions
from bench.measure import RESULTS, machine, paced, percentile
from tailrace import Admin, NewTopic, Producer
from tailrace.admin import compaction as admin_compaction
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.format.schema import HEADER_TYPE

MEGABYTES = int(os.environ.get("MB", "500"))
VERSIONS = int(os.environ.get("VERSIONS", "20"))
SMALL = int(os.environ.get("SMALL", "200000"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
ONLY = os.environ.get("ONLY", "cleaning,foreground,small").split(",")
SEGMENT_BYTES = 64 << 20
COMPACTED: dict[str, Any] = {
    "cleanup.policy": "compact", "min.cleanable.dirty.ratio": 1, "segment.bytes": SEGMENT_BYTES,
}  # fmt: skip
FRAME_ROWS = 20_000
CLEANER = "tr-cleaner-0"
UNPACED = 10_000_000
"""Records a second, more than any producer reaches."""
LOOK_MS = 20
"""Interval at which the end of a cleaning is looked for, here and of Kafka."""
Figures = list[dict[str, Any]]


@contextmanager
def appliance() -> Iterator[EmbeddedAppliance]:
    with tempfile.TemporaryDirectory(prefix="tailrace-compaction-") as directory:
        running = start_embedded(
            data_dir=f"{directory}/data",
            settings={"ring_bytes": 64 << 20, "cleaner.check.interval.ms": 100},
        )
        try:
            yield running
        finally:
            running.stop()


def size_of(running: EmbeddedAppliance, topic: str) -> int:
    found = pathlib.Path(running.data_dir).glob(f"{topic}-0/*.arrows")
    return sum(path.stat().st_size for path in found)


def frames(size: int) -> Iterator[tuple[pa.Table, list[bytes], bytes]]:
    """Rows of MEGABYTES, with their keys and the bytes of their values."""
    count = MEGABYTES * 1_000_000 // size
    dice = np.random.default_rng(1)
    for begin in range(0, count, FRAME_ROWS):
        rows = min(FRAME_ROWS, count - begin)
        data = dice.bytes(rows * size)
        keys = [b"user-%08d" % n for n in dice.integers(0, max(1, count // VERSIONS), rows)]
        edges = pa.py_buffer(np.arange(rows + 1, dtype=np.int32) * size)
        values = pa.Array.from_buffers(pa.binary(), rows, [None, edges, pa.py_buffer(data)])
        times = pa.array(np.arange(rows) + 10**15, pa.timestamp("us", "UTC"))
        table = pa.table(
            {"timestamp": times, "key": pa.array(keys, pa.binary()), "value": values,
            "headers": pa.nulls(rows, HEADER_TYPE)}
        )  # fmt: skip
        yield table, keys, data


class CleanerTime:
    """Processor time of the cleaner, which ends when it has no job."""

    def __init__(self, running: EmbeddedAppliance) -> None:
        self._pid = running.pid
        self._seconds: dict[int, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> CleanerTime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        return sum(self._seconds.values())

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            for child in psutil.Process(self._pid).children(recursive=True):
                try:
                    if child.name().startswith(CLEANER):
                        used = child.cpu_times()
                        self._seconds[child.pid] = used.user + used.system
                except psutil.Error:
                    continue


def cleaning(size: int) -> Figures:
    rates, costs = [], []
    for _ in range(ROUNDS):
        with appliance() as running, Admin(running.address) as admin:
            admin.create_topics([NewTopic("users", 1, COMPACTED)])
            with Producer(running.address) as producer:
                for table, _, _ in frames(size):
                    producer.send_arrow("users", table)
            before = size_of(running, "users")
            os.sync()  # what was written before is not part of it
            with CleanerTime(running) as used:
                begun = time.perf_counter()
                admin.compact_topic("users", timeout_ms=600_000)
                seconds = time.perf_counter() - begun
            assert size_of(running, "users") < before / 4
        rates.append(before / 1e6 / seconds)
        costs.append(used.seconds / (before / 1e9))
    name = f"cleaning, {size} B"
    return [figure(name, "MB/s", rates), figure(f"{name}, CPU", "s/GB", costs)]


def kafka_cleaning(size: int) -> Figures:
    from bench.peers.kafka import Kafka, producer_of
    from bench.peers.servers import Missing

    rates, costs = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="tailrace-compaction-") as directory:
            try:
                kafka = Kafka(
                    directory, {"log.cleaner.backoff.ms": "100", "log.cleaner.threads": "1"}
                )
            except Missing as error:
                print(f"Kafka is left out: {error}")
                return []
            try:
                configs = {
                    "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.0",
                    "segment.bytes": str(SEGMENT_BYTES), "min.compaction.lag.ms": "900000000",
                }  # fmt: skip
                topic = kafka.topic(configs=configs)
                producer = producer_of(kafka.bootstrap, 1)
                for _, keys, data in frames(size):
                    for number, key in enumerate(keys):
                        value = data[number * size : (number + 1) * size]
                        while True:
                            try:
                                producer.produce(topic, value, key, partition=0)
                                break
                            except BufferError:
                                producer.poll(0.1)
                producer.flush(60)
                rate, cost = _cleaned_by_kafka(kafka, topic, directory)
                rates.append(rate)
                costs.append(cost)
            finally:
                kafka.stop()
    name = f"cleaning, {size} B, Kafka"
    return [figure(name, "MB/s", rates), figure(f"{name}, CPU", "s/GB", costs)]


def _cleaned_by_kafka(kafka: Any, topic: str, directory: str) -> tuple[float, float]:
    """(MB/s, CPU s/GB): from the setting that lets it clean until its checkpoint has reached the
    active segment.
    """
    from confluent_kafka.admin import (
        AdminClient,
        AlterConfigOpType,
        ConfigEntry,
        ConfigResource,
    )

    data = pathlib.Path(directory) / "data"
    logs = sorted((data / f"{topic}-0").glob("*.log"))
    sealed, active = logs[:-1], int(logs[-1].stem)
    size = sum(path.stat().st_size for path in sealed)
    os.sync()
    pid = kafka.server.pid
    used = _cpu_of(pid)
    entry = ConfigEntry("min.compaction.lag.ms", "0", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource("TOPIC", topic, incremental_configs=[entry])
    begun = time.perf_counter()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(30)
    checkpoint = data / "cleaner-offset-checkpoint"
    while not checkpoint.exists() or f"{topic} 0 {active}" not in checkpoint.read_text():
        time.sleep(LOOK_MS / 1000)
        assert time.perf_counter() - begun < 600, "Kafka has not cleaned it"
    seconds = time.perf_counter() - begun
    return size / 1e6 / seconds, (_cpu_of(pid) - used) / (size / 1e9)


def _cpu_of(pid: int) -> float:
    """Seconds of a process and its children."""
    of = psutil.Process(pid)
    times = [each.cpu_times() for each in (of, *of.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def foreground() -> Figures:
    """Acknowledgements beside a cleaner that always has something to do."""
    alone, beside, rates = [], [], []
    with appliance() as running, Admin(running.address) as admin:
        admin.create_topics([NewTopic("users", 1, COMPACTED), NewTopic("orders")])
        with Producer(running.address) as producer:
            # Half of what this loop reaches by itself: pacing and callbacks cost more than sends.
            tops = [acknowledged(producer, UNPACED, count=200_000)[1] * UNPACED for _ in range(3)]
            rate = int(statistics.median(tops) / 2)
            for _ in range(ROUNDS):
                alone.append(acknowledged(producer, rate)[0])
                for table, _, _ in frames(100):
                    producer.send_arrow("users", table)
                producer.flush(60)
                work = threading.Thread(
                    target=lambda: admin.compact_topic("users", timeout_ms=600_000)
                )
                work.start()
                p99, reached = acknowledged(producer, rate)
                work.join()
                beside.append(p99)
                rates.append(reached)
    return [
        figure("half the top rate", "k records/s", [rate / 1e3]),
        figure("acks, p99, alone", "ms", alone),
        figure("acks, p99, beside the cleaner", "ms", beside),
        figure("part of the rate beside the cleaner", "", rates),
    ]


def acknowledged(producer: Producer, rate: int, count: int = 0) -> tuple[float, float]:
    """(p99 ms of the acknowledgements of records at a rate, the part of the rate that was kept).
    `count`: records, else those of 5 s.
    """
    times: list[float] = []
    count = count or rate * 5
    begun = time.perf_counter()
    for due in paced(rate, count):

        def done(_: object, error: object, due: int = due) -> None:
            assert error is None
            times.append((time.perf_counter_ns() - due) / 1e6)

        producer.send("orders", bytes(100), on_delivery=done)
    producer.flush(60)
    reached = count / (time.perf_counter() - begun) / rate
    return percentile(times[count // 10 :], 0.99), reached


def small() -> Figures:
    found: Figures = []
    with appliance() as running, Admin(running.address) as admin:
        large = [b"value-%015d" % number for number in range(SMALL)]
        admin.create_topics([NewTopic("large")])
        with Producer(running.address) as producer:
            producer.send_arrow("large", pa.table({"value": large}))
        for compression in ("none", "lz4"):
            topic = f"small-{compression}"
            configs = {
                "small.batch.bytes": 4_096, "segment.bytes": 16 << 20,
                "compression.type": compression,
            }  # fmt: skip
            admin.create_topics([NewTopic(topic, 1, configs)])
            with Producer(running.address, linger_ms=0, batch_size=1_024) as producer:
                for value in large:
                    producer.send_arrow(topic, pa.record_batch({"value": [value]}))
            before = size_of(running, topic) / SMALL
            after = wait_until_stable(lambda topic=topic: size_of(running, topic))  # type: ignore[misc]
            live = sorted(pathlib.Path(running.data_dir).glob(f"{topic}-0/*.arrows"))[-1]
            merged = int(live.stem)  # what follows is not sealed yet
            sealed = (after - live.stat().st_size) / max(1, merged)
            found.append(figure(f"sent one by one, {compression}, before", "B/record", [before]))
            found.append(figure(f"merged, {compression}", "B/record", [sealed]))
            for name, of in (("large batches", "large"), (f"merged, {compression}", topic)):
                times = []
                for _ in range(ROUNDS + 1):
                    begun = time.perf_counter()
                    scan = tailrace.scan(of, running.address, ["value"], end=merged)
                    assert sum(batch.num_rows for batch in scan) == merged
                    times.append(merged / 1e6 / (time.perf_counter() - begun))
                found.append(figure(f"scan, {name}", "M records/s", times[1:]))
    return found


def wait_until_stable(measure: Callable[[], int]) -> int:
    found, since = measure(), time.monotonic()
    while time.monotonic() - since < 3:
        time.sleep(0.2)
        now = measure()
        if now != found:
            found, since = now, time.monotonic()
    return found


def figure(name: str, unit: str, values: list[float]) -> dict[str, Any]:
    print(
        f"{name:<44} {statistics.median(values):>9.2f} {min(values):>9.2f} {max(values):>9.2f}  "
        f"{unit}",
        flush=True,
    )
    return {"name": name, "unit": unit, "median": statistics.median(values), "values": values}


def main() -> int:
    where, conditions = machine(), Conditions()
    admin_compaction.LAST_WAIT_MS = LOOK_MS
    print(f"{where['cpu']}, {where['cores']} cores, {MEGABYTES} MB, {ROUNDS} rounds\n")
    print(f"{'WHAT':<44} {'MEDIAN':>9} {'LEAST':>9} {'MOST':>9}")
    found: Figures = []
    if "cleaning" in ONLY:
        for size in (100, 1_000):
            found += cleaning(size)
            if os.environ.get("KAFKA"):
                found += kafka_cleaning(size)
    if "foreground" in ONLY:
        found += foreground()
    if "small" in ONLY:
        found += small()
    print(f"\n{conditions.sentence()}")
    path = RESULTS / f"compaction-{where['date']}-{where['commit']}.json"
    content = {
        "command": f"MB={MEGABYTES} VERSIONS={VERSIONS} SMALL={SMALL} ROUNDS={ROUNDS} "
        "python -m bench.compaction",
        "machine": where, "conditions": conditions.report(), "figures": found,
    }  # fmt: skip
    path.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
