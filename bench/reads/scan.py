"""Rate of reading a topic as a table: `make bench-scan [BYTES=1000000000]`. A table and a results
file.

Records of 1,000 B and of 108 B (100 B and a key), BYTES of each, in warm files. Each figure is
taken REPETITIONS times, in turns with the others, beside pyarrow reading the same segment files as
the Arrow streams that they are: no checksums, no validation, nothing settled or leased, and no byte
of a value touched. Rates are of the bytes of keys and values, by the wall clock; the processor time
of this process is in the results file.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np
import polars
import pyarrow as pa

import tailrace
from bench.measure import RESULTS, machine
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.format.schema import HEADER_TYPE

BYTES = int(os.environ.get("BYTES", "1000000000"))
REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
KEY = b"k" * 8
FRAME_ROWS = 20_000


def fill(running: EmbeddedAppliance, topic: str, value_bytes: int) -> int:
    """Send BYTES of records; returns how many bytes of keys and values there are."""
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic(topic)])
    frame = pa.table(
        {
            "timestamp": pa.array(np.arange(FRAME_ROWS) + 10**15, pa.timestamp("us", "UTC")),
            "key": pa.array([KEY] * FRAME_ROWS, pa.binary()),
            "value": pa.array([os.urandom(value_bytes) for _ in range(FRAME_ROWS)], pa.binary()),
            "headers": pa.nulls(FRAME_ROWS, HEADER_TYPE),
        }
    )  # fmt: skip
    count = max(1, BYTES // (FRAME_ROWS * (value_bytes + len(KEY))))
    with Producer(running.address) as producer:
        for _ in range(count):
            producer.send_arrow(topic, frame)
    return count * FRAME_ROWS * (value_bytes + len(KEY))


def drained(batches: Any) -> int:
    """Read all, keep nothing."""
    return sum(batch.num_rows for batch in batches)


def streams(running: EmbeddedAppliance, topic: str) -> int:
    """pyarrow over the segment files."""
    rows = 0
    for path in sorted(pathlib.Path(running.data_dir, f"{topic}-0").glob("*.arrows")):
        with pa.memory_map(str(path), "r") as file:
            rows += drained(pa.ipc.open_stream(file))
    return rows


def sum_of_lengths(running: EmbeddedAppliance, topic: str) -> Any:
    """An aggregate in duckdb."""
    rows = tailrace.scan(topic, running.address, columns=["value"])
    with duckdb.connect() as database:
        database.register("scanned", rows)
        return database.execute("select sum(octet_length(value)) from scanned").fetchone()


def works(running: EmbeddedAppliance, topic: str) -> dict[str, Callable[[], Any]]:
    """The measured reads."""

    def scan(**asked: Any) -> Any:
        return tailrace.scan(topic, running.address, **asked)

    return {
        "all columns": lambda: drained(scan()),
        "value": lambda: drained(scan(columns=["value"])),
        "value, producers trusted": lambda: drained(
            scan(columns=["value"], validate_batches=False)
        ),
        "offset (headers alone)": lambda: drained(scan(columns=["offset"])),
        "value into polars": lambda: polars.DataFrame(scan(columns=["value"])),
        "all columns into polars": lambda: polars.DataFrame(scan()),
        "sum of lengths in duckdb": lambda: sum_of_lengths(running, topic),
        "value over ZeroMQ": lambda: drained(scan(columns=["value"], from_files=False)),
        "pyarrow, the files as streams": lambda: streams(running, topic),
    }


def measure(running: EmbeddedAppliance, topic: str, size: int, what: str) -> list[dict[str, Any]]:
    """REPETITIONS of everything, in turns."""
    todo = works(running, topic)
    seconds: dict[str, list[float]] = {name: [] for name in todo}
    processor: dict[str, list[float]] = {name: [] for name in todo}
    for repetition in range(REPETITIONS + 1):
        for name, work in todo.items():
            begun, begun_cpu = time.perf_counter(), time.process_time()
            work()
            if repetition:  # the first one warms
                seconds[name].append(time.perf_counter() - begun)
                processor[name].append(time.process_time() - begun_cpu)
    found = []
    for name, times in seconds.items():
        rates = sorted(size / each / 1e9 for each in times)
        cpu = [size / each / 1e9 for each in processor[name]]
        print(
            f"{what}, {name:<34} {statistics.median(rates):>8.2f} {rates[0]:>8.2f} "
            f"{rates[-1]:>8.2f}  {statistics.median(cpu):>8.2f}",
            flush=True,
        )
        found.append(
            {"name": f"{what}, {name}", "unit": "GB/s", "median": statistics.median(rates),
            "min": rates[0], "max": rates[-1], "values": rates,
             "gb_per_cpu_second": cpu}
        )  # fmt: skip
    return found


def main() -> int:
    where = machine()
    print(f"Topics as tables on {where['cpu']}, {where['cores']} cores, commit {where['commit']}\n")
    print(f"{'WHAT':<44} {'GB/s':>7} {'LEAST':>8} {'MOST':>8}  {'PER CPU s':>8}")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tailrace-scan-") as directory:
        running = start_embedded(data_dir=f"{directory}/data", settings={"ring_bytes": 64 << 20})
        try:
            for topic, value_bytes in (("large", 1_000), ("small", 100)):
                size = fill(running, topic, value_bytes)
                found += measure(running, topic, size, f"{value_bytes:>5} B")
        finally:
            running.stop()
    path = RESULTS / f"scan-{where['date']}-{where['commit']}.json"
    path.write_text(
        json.dumps(
            {"command": f"BYTES={BYTES} make bench-scan", "machine": where, "figures": found},
            indent=1,
        )
        + "\n"
    )
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
