"""`spark_bridge.scan` against Spark's own scan of uncompressed Parquet files and against the data source, and over ZeroMQ with 1, 2 and 4 tasks at once.

    ROWS=5000000 REPETITIONS=5 python -P -m bench.spark_arrow_scan

Interleaved, the first turn warms. Beside the rate stands what all processes of Spark (JVM and Python) took of the processors: on a machine that does other
things at the same time that says more.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

import spark_bridge
from bench.measure import machine
from bench.suite import RESULTS
from spark_bridge.session import local_session
from tailrace import Admin, NewTopic, Producer
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tailrace.schema import HEADER_TYPE

ROWS = int(os.environ.get("ROWS", "5000000"))
REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
FRAME_ROWS = 20_000
TOPIC = "rows"
AT_ONCE = (1, 2, 4)
PARTS = os.environ.get("PARTS", "layers executors").split()


def fill(running: EmbeddedAppliance) -> None:
    """ROWS of 8 B keys and 100 B values."""
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic(TOPIC)])
    frame = pa.table(
        {
            "timestamp": pa.array(np.arange(FRAME_ROWS) + 10**15, pa.timestamp("us", "UTC")),
            "key": pa.array([b"k" * 8] * FRAME_ROWS, pa.binary()),
            "value": pa.array([os.urandom(100) for _ in range(FRAME_ROWS)], pa.binary()), "headers": pa.nulls(FRAME_ROWS, HEADER_TYPE),
        }
    )  # fmt: skip
    with Producer(running.address) as producer:
        for _ in range(max(1, ROWS // FRAME_ROWS)):
            producer.send_arrow(TOPIC, frame)


def noop(frame: Any) -> None:
    """All rows to nowhere."""
    frame.write.format("noop").mode("overwrite").save()


def aggregate(frame: Any) -> None:
    """Three columns to three numbers."""
    frame.selectExpr("sum(length(value))", "count(key)", "max(offset)").collect()


def processor_s() -> float:
    """Of this process and all that came of it."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and those of children that have ended
        except psutil.NoSuchProcess:
            continue
    return total


def measured(todo: Mapping[str, Callable[[], None]], rows: int) -> list[dict[str, Any]]:
    """REPETITIONS of everything, in turns."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in todo}
    for repetition in range(REPETITIONS + 1):
        for name, work in todo.items():
            begun, begun_cpu = time.perf_counter(), processor_s()
            work()
            if repetition:
                seconds[name].append((time.perf_counter() - begun, processor_s() - begun_cpu))
    found = []
    for name, times in seconds.items():
        rate = statistics.median(rows / wall for wall, _ in times) / 1e6
        per_cpu = statistics.median(rows / cpu for _, cpu in times) / 1e6
        print(f"{name:<44} {rate:>8.2f} {per_cpu:>12.2f}", flush=True)
        found.append({"name": name, "unit": "M rows/s", "median": rate, "per_cpu_second": per_cpu, "seconds": times})
    return found


def layers(running: EmbeddedAppliance, directory: str) -> list[dict[str, Any]]:
    """Spark's own scan, the data source and `spark_bridge.scan`, from files."""
    with local_session() as spark:
        layer_a = spark.read.format("tailrace").option("bootstrap", running.address).option("subscribe", TOPIC).load()
        layer_b = spark_bridge.scan(spark, TOPIC, running.address)
        layer_b.write.option("compression", "none").parquet(f"{directory}/parquet")
        frames = {"Parquet": spark.read.parquet(f"{directory}/parquet"), "data source": layer_a, "spark_bridge.scan": layer_b}
        todo = {f"{name}, {what.__name__}": partial(what, frame) for what in (noop, aggregate) for name, frame in frames.items()}
        return measured(todo, ROWS)


def executors(running: EmbeddedAppliance) -> list[dict[str, Any]]:
    """Over ZeroMQ, with so many tasks at once."""
    found: list[dict[str, Any]] = []
    for at_once in AT_ONCE:
        with local_session(f"local[{at_once}]") as spark:
            frame = spark_bridge.scan(spark, TOPIC, running.address, from_files=False)
            found += measured({f"spark_bridge.scan over ZeroMQ, {at_once} at once": partial(noop, frame)}, ROWS)
    return found


def main() -> int:
    where = machine()
    print(f"Spark's scans of {ROWS:,} rows on {where['cpu']}, {where['cores']} cores, commit {where['commit']}\n")
    print(f"{'WHAT':<44} {'M rows/s':>8} {'per CPU s':>12}")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tr-bench-", dir=os.environ.get("SCRATCH")) as directory:
        running = start_embedded(data_dir=f"{directory}/data", settings={"ring_bytes": 64 << 20})
        try:
            fill(running)
            if "layers" in PARTS:
                found += layers(running, directory)
            if "executors" in PARTS:
                found += executors(running)
        finally:
            running.stop()
    path = RESULTS / f"spark-arrow-scan-{where['date']}-{where['commit']}.json"
    command = f"ROWS={ROWS} REPETITIONS={REPETITIONS} python -P -m bench.spark_arrow_scan"
    path.write_text(json.dumps({"command": command, "machine": where, "figures": found}, indent=1) + "\n")
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
