"""Parameters that `make bench` varies: record size, `send()` or Arrow batches, producers,
partitions, acks, compression; and reading back, warm and cold.

One thing is varied at a time around two base points (`send()` of 100 bytes, Arrow batches of
1,000); `FULL=1` runs every combination. Producers and consumers are processes of their own, started
before the clock is; each repetition takes about a second. Beside each rate stand the CPU seconds
and context switches of every process, of the repetition nearest the median.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

import psutil
import pyarrow as pa

from tailrace import Admin, Consumer, NewTopic, Producer

SIZES = (10, 100, 1_000, 10_000, 100_000)
SECONDS = 1.0
ARROW_BATCH_BYTES = 256 << 10
READ_BYTES = 128 << 20
"""Bytes that are written for the reading cases."""
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Case:
    """One way to produce."""

    size: int = 100
    how: str = "send"
    producers: int = 1
    partitions: int = 1
    acks: int | str = "all"
    compression: str = "none"

    @property
    def name(self) -> str:
        """The case as a row's title."""
        parts = [f"produce {self.size:,} B", f"{self.how}, acks={self.acks}"]
        parts += [f"{self.producers} producers"] if self.producers > 1 else []
        parts += [f"{self.partitions} partitions"] if self.partitions > 1 else []
        parts += [self.compression] if self.compression != "none" else []
        return ", ".join(parts)


SEND, ARROW = Case(), Case(1_000, "arrow")


def cases(*, full: bool) -> Iterator[Case]:
    """Every combination, or one thing at a time."""
    if full:
        for values in itertools.product(
            SIZES, ("send", "arrow"), (1, 2), (1, 4), (1, "all"), ("none", "lz4", "zstd")
        ):
            yield Case(*values)  # type: ignore[arg-type]
        return
    seen = set()
    varied: list[dict[str, Any]] = [
        {},
        {"producers": 2},
        {"partitions": 4},
        {"producers": 2, "partitions": 4},
        {"acks": 1},
    ]
    varied += [{"compression": "lz4"}, {"compression": "zstd"}]
    for base in (SEND, ARROW):
        for case in [replace(base, size=size) for size in SIZES] + [
            replace(base, **change) for change in varied
        ]:
            if case not in seen:
                seen.add(case)
                yield case


@dataclass(slots=True)
class Run:
    """One repetition."""

    rate: float
    """Records per second."""
    seconds: float
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    switches: dict[str, int] = field(default_factory=dict)


class Watch:
    """CPU time and context switches of the appliance's processes while a block runs."""

    def __init__(self, pid: int) -> None:
        self._processes = [psutil.Process(pid), *psutil.Process(pid).children()]
        self._before = [self._look(process) for process in self._processes]

    @staticmethod
    def _look(process: psutil.Process) -> tuple[str, float, int]:
        times, switches = process.cpu_times(), process.num_ctx_switches()
        with open(f"/proc/{process.pid}/comm", encoding="ascii") as file:
            return (
                file.read().strip().removeprefix("tr-"),
                times.user + times.system,
                switches.voluntary + switches.involuntary,
            )

    def into(self, run: Run) -> Run:
        """`run`, with what each process has used since: CPU seconds and context switches."""
        for process, (name, cpu, switches) in zip(self._processes, self._before, strict=True):
            _, cpu_now, switches_now = self._look(process)
            run.cpu_seconds[name] = round(cpu_now - cpu, 3)
            run.switches[name] = switches_now - switches
        return run


def produce(address: str, pid: int, topic: str, case: Case) -> Run:
    """One repetition of a case, on a topic of its own."""
    with Admin(address) as admin:
        admin.create_topics([NewTopic(topic, case.partitions)])
    barrier, results = _CONTEXT.Barrier(case.producers + 1), _CONTEXT.Queue()
    children = [
        _CONTEXT.Process(target=_produce, args=(address, topic, case, barrier, results))
        for _ in range(case.producers)
    ]
    for child in children:
        child.start()
    barrier.wait(60)
    watch = Watch(pid)
    return _gather(children, results, watch, "producers")


def consume(address: str, pid: int, topic: str, wanted: int, *, arrow: bool) -> Run:
    """Read `wanted` records from the beginning."""
    barrier, results = _CONTEXT.Barrier(2), _CONTEXT.Queue()
    child = _CONTEXT.Process(
        target=_consume, args=(address, topic, wanted, arrow, barrier, results)
    )
    child.start()
    barrier.wait(60)
    watch = Watch(pid)
    return _gather([child], results, watch, "consumer")


def _gather(
    children: list[Any], results: Queue[tuple[int, float, float, int]], watch: Watch, who: str
) -> Run:
    found = [results.get(timeout=180) for _ in children]
    seconds = max(item[1] for item in found)
    run = watch.into(Run(sum(item[0] for item in found) / seconds, seconds))
    run.cpu_seconds[who] = round(sum(item[2] for item in found), 3)
    run.switches[who] = sum(item[3] for item in found)
    for child in children:
        child.join()
    return run


def _own_cost() -> tuple[float, int]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_nvcsw + used.ru_nivcsw


def _produce(
    address: str,
    topic: str,
    case: Case,
    barrier: Barrier,
    results: Queue[tuple[int, float, float, int]],
) -> None:
    """A producer's process."""
    payload = os.urandom(case.size // 2) + bytes(
        case.size - case.size // 2
    )  # half of it can be compressed
    keys = [b"k%d" % number for number in range(64)]
    rows = max(1, ARROW_BATCH_BYTES // (case.size + 16))
    frame = pa.table({"value": pa.array([payload] * rows, pa.binary())})
    with Producer(
        address,
        acks=case.acks,
        compression_type=case.compression,
        batch_size=max(256 << 10, 2 * case.size),
    ) as producer:
        for partition in range(case.partitions):
            producer.send(topic, payload, partition=partition).result(30)
        barrier.wait(60)
        (cpu, switches), begun, count = _own_cost(), time.perf_counter(), 0
        while time.perf_counter() - begun < SECONDS:
            if case.how == "arrow":
                producer.send_arrow(topic, frame, partition=count // rows % case.partitions)
                count += rows
            else:
                for key in keys:
                    producer.send(topic, payload, key)
                count += len(keys)
        producer.flush()
        seconds = time.perf_counter() - begun
        cpu_now, switches_now = _own_cost()
    results.put((count, seconds, cpu_now - cpu, switches_now - switches))


def _consume(
    address: str,
    topic: str,
    wanted: int,
    arrow: bool,
    barrier: Barrier,
    results: Queue[tuple[int, float, float, int]],
) -> None:
    """A consumer's process."""
    pa.array([b"x"])  # loads what the first array loads
    with Consumer(
        topic, bootstrap=address, auto_offset_reset="earliest", max_poll_records=10_000
    ) as consumer:
        barrier.wait(60)
        (cpu, switches), begun, count = _own_cost(), time.perf_counter(), 0
        while count < wanted:
            if arrow:
                count += sum(len(batch) for batch in consumer.poll_arrow(10_000))
            else:
                count += len(consumer.poll(10_000))
        seconds = time.perf_counter() - begun
        cpu_now, switches_now = _own_cost()
    results.put((count, seconds, cpu_now - cpu, switches_now - switches))


def fill(address: str, topic: str, size: int) -> int:
    """A topic to read; returns how many records it has."""
    rows = max(1, ARROW_BATCH_BYTES // (size + 16))
    frame = pa.table({"value": pa.array([os.urandom(size)] * rows, pa.binary())})
    count = 0
    with Admin(address) as admin:
        admin.create_topics([NewTopic(topic)])
    with Producer(address) as producer:
        while count * size < READ_BYTES:
            producer.send_arrow(topic, frame)
            count += rows
    return count


def drop_from_page_cache(directory: str) -> None:
    """The next read of these files comes from the disk."""
    for name in os.listdir(directory):
        fd = os.open(f"{directory}/{name}", os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
