"""`make bench`: first figures of the appliance on this machine, with medians and spread, a table and a results file.

Every figure goes through the real appliance on a temporary directory of the real disk (durability=disk: every batch is fdatasync'd before consumers see
it). The comparison with peers comes later; these are the figures themselves.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
import pyarrow as pa
from rich.console import Console

from bench.measure import Figure, machine, percentile, private_memory_mb, repeat
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.private_appliance import start_embedded

RESULTS = pathlib.Path(__file__).parent / "results"
REPETITIONS = 5
START_REPETITIONS = 10
SECONDS_OF_WORK = 1.0
console = Console(soft_wrap=True, highlight=False)


def main() -> int:
    """Run everything; answers the exit code."""
    figures: list[Figure] = []
    where = machine()
    console.print(f"[bold]Tailrace bench[/bold] on {where['cpu']}, {where['cores']} cores, commit {where['commit']}\n")
    console.print(f"{'WHAT':<52} {'MEDIAN':>14} {'LEAST':>14} {'MOST':>14}  UNIT", style="bold")

    def note(*new: Figure) -> None:
        for figure in new:
            figures.append(figure)
            spread = f"{min(figure.values):>14,.1f} {max(figure.values):>14,.1f}"
            console.print(f"{figure.name:<52} {figure.median:>14,.1f} {spread}  {figure.unit}")

    note(*start_up())
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        appliance = start_embedded(data_dir=os.path.join(directory, "data"), settings={"ring_bytes": 64 << 20})
        try:
            for size in (100, 1000):
                note(*throughput(appliance.address, size))
            note(*ack_latency(appliance.address))
        finally:
            appliance.stop()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{where['date']}-{where['commit']}.json"
    path.write_text(json.dumps({"command": "make bench", "machine": where, "figures": [f.row() for f in figures]}, indent=1) + "\n")
    console.print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


def start_up() -> list[Figure]:
    """From starting the process to the first acknowledged record, and the memory of all processes when idle."""
    ready: list[float] = []
    first: list[float] = []
    memory: list[float] = []
    for _ in range(START_REPETITIONS):
        with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
            data_dir = os.path.join(directory, "data")
            prepared = start_embedded(data_dir=data_dir)
            with Admin(prepared.address) as admin:
                admin.create_topics([NewTopic("first")])
            prepared.stop()
            begin = time.perf_counter()
            running = start_embedded(data_dir=data_dir, settings={"ring_bytes": 64 << 20})
            ready.append((time.perf_counter() - begin) * 1000)
            with Producer(running.address, acks="all", linger_ms=0) as producer:
                producer.send("first", b"x").result(10)
                first.append((time.perf_counter() - begin) * 1000)
            pids = [running.pid, *(child.pid for child in psutil.Process(running.pid).children())]
            memory.append(private_memory_mb(pids)[0])
            running.stop()
    return [
        Figure("start to ready", "ms", tuple(ready)),
        Figure("start to first record acknowledged (acks=all)", "ms", tuple(first)),
        Figure("PSS of all processes, idle, without shared memory", "MB", tuple(memory)),
    ]


def throughput(address: str, size: int) -> list[Figure]:
    """Records of `size` bytes: send(), Arrow batches, and reading back as objects and as Arrow."""
    payload = os.urandom(size)
    count = 400_000 if size <= 100 else 120_000
    figures = []
    topics = iter(range(1000))

    def topic(kind: str) -> str:
        name = f"{kind}-{size}-{next(topics)}"
        with Admin(address) as admin:
            admin.create_topics([NewTopic(name)])
        return name

    def send(acks: int | str) -> Callable[[], float]:
        def once() -> float:
            name = topic("send")
            with Producer(address, acks=acks) as producer:
                producer.send(name, payload, b"warm").result(10)
                begin = time.perf_counter()
                for number in range(count):
                    producer.send(name, payload, b"k%d" % (number & 15))
                producer.flush()
                return count / (time.perf_counter() - begin)

        return once

    figures.append(repeat(f"produce {size} B, send() with key, acks=1", "records/s", REPETITIONS, send(1)))
    figures.append(repeat(f"produce {size} B, send() with key, acks=all", "records/s", REPETITIONS, send("all")))
    frame = pa.table({"value": pa.array([payload] * count, pa.binary())})
    names: list[str] = []

    def send_arrow() -> float:
        names.append(topic("arrow"))
        with Producer(address, acks="all") as producer:
            producer.send(names[-1], payload).result(10)
            begin = time.perf_counter()
            producer.send_arrow(names[-1], frame).result(120)
            return count / (time.perf_counter() - begin)

    figures.append(repeat(f"produce {size} B, send_arrow(), acks=all", "records/s", REPETITIONS, send_arrow))
    figures.append(
        repeat(f"consume {size} B as Record objects", "records/s", REPETITIONS, lambda: _consume(address, names[-1], count, arrow=False))
    )
    figures.append(repeat(f"consume {size} B as Arrow", "records/s", REPETITIONS, lambda: _consume(address, names[-1], count, arrow=True)))
    return figures


def _consume(address: str, topic: str, count: int, *, arrow: bool) -> float:
    with Consumer(topic, bootstrap=address, auto_offset_reset="earliest", max_poll_records=10_000) as consumer:
        begin = time.perf_counter()
        seen = 0
        while seen < count:
            taken: list[Any] = consumer.poll_arrow(10_000) if arrow else consumer.poll(10_000)
            seen += sum(len(batch) for batch in taken) if arrow else len(taken)
        return seen / (time.perf_counter() - begin)


def ack_latency(address: str) -> list[Figure]:
    """One record of 100 bytes at a time, waiting for each."""
    figures = []
    payload = os.urandom(100)
    for acks in (1, "all"):
        halves: list[float] = []
        tails: list[float] = []
        for repetition in range(REPETITIONS):
            name = f"latency-{acks}-{repetition}"
            with Admin(address) as admin:
                admin.create_topics([NewTopic(name)])
            with Producer(address, acks=acks) as producer:
                for _ in range(100):
                    producer.send(name, payload).result(10)
                times = []
                for _ in range(1000):
                    begin = time.perf_counter()
                    producer.send(name, payload).result(10)
                    times.append((time.perf_counter() - begin) * 1e6)
            halves.append(percentile(times, 0.5))
            tails.append(percentile(times, 0.99))
        figures.append(Figure(f"ack of one record, acks={acks}, p50", "us", tuple(halves)))
        figures.append(Figure(f"ack of one record, acks={acks}, p99", "us", tuple(tails)))
    return figures


if __name__ == "__main__":
    sys.exit(main())
