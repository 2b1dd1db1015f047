"""How fast Spark reads a topic, beside its own Parquet reader: `make bench-spark [ROWS=5000000]`. A table and a results file.

ROWS records of 108 B (8 B key, 100 B value) in a topic of 2 partitions, and the same rows and columns in uncompressed Parquet files, both warm; local[2], the
settings of `spark_bridge.session`. Each figure is taken REPETITIONS times, in turns with the others, after one turn that warms; the ratio is that of the
medians. Processor time is of the JVM and its Python processes, so that it says something beside other work, too.

The first query is timed in new processes: from the session being up to the count of a small topic, with and without `spark_bridge.prepare()`.
Kafka's connector is not measured here: it needs a Kafka beside, and its jar from Maven, which this machine cannot be relied on to reach.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import tailrace
from bench.measure import machine
from bench.suite import RESULTS
from spark_bridge.session import local_session
from tailrace import Admin, NewTopic, Producer
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tailrace.schema import HEADER_TYPE

ROWS = int(os.environ.get("ROWS", "5000000"))
REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
STARTS = int(os.environ.get("STARTS", "3"))
FRAME_ROWS = 20_000
PARTITIONS = 2
FILE_ROWS = 640_000
KEY = b"k" * 8
AGGREGATE = ("sum(octet_length(key))", "sum(octet_length(value))", "max(offset)")
FIRST_QUERY = """
import sys, time
import spark_bridge
with spark_bridge.session(master="local[2]") as spark:
    begun = time.perf_counter()
    count = spark.read.format("tailrace").option("bootstrap", sys.argv[1]).option("subscribe", "small").load().count()
    print("seconds", time.perf_counter() - begun, count)
"""


def fill(running: EmbeddedAppliance) -> None:
    """ROWS records in `rows`, some in `small`."""
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("rows", PARTITIONS), NewTopic("small")])
    now_us = time.time_ns() // 1_000  # retention would remove older rows while this runs
    frame = pa.table(
        {
            "timestamp": pa.array(np.arange(FRAME_ROWS) + now_us, pa.timestamp("us", "UTC")), "key": pa.array([KEY] * FRAME_ROWS, pa.binary()),
            "value": pa.array([os.urandom(100) for _ in range(FRAME_ROWS)], pa.binary()), "headers": pa.nulls(FRAME_ROWS, HEADER_TYPE),
        }
    )  # fmt: skip
    with Producer(running.address) as producer:
        for number in range(-(-ROWS // FRAME_ROWS)):
            rows = frame.slice(0, min(FRAME_ROWS, ROWS - number * FRAME_ROWS))
            producer.send_arrow("rows", rows, partition=number % PARTITIONS)
        producer.send_arrow("small", frame)
        producer.flush(120)


def write_parquet(running: EmbeddedAppliance, directory: str) -> None:
    """The same rows and columns, as files that Spark divides among its tasks."""
    columns = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    rows = tailrace.scan("rows", running.address, columns=columns)
    writer, written = None, 0
    for number, batch in enumerate(rows):
        if writer is None or written >= FILE_ROWS:
            if writer is not None:
                writer.close()
            writer = pq.ParquetWriter(f"{directory}/{number:05}.parquet", rows.schema, compression="none", use_dictionary=False)
            written = 0
        writer.write_batch(batch)
        written += batch.num_rows
    assert writer is not None
    writer.close()


def works(spark: Any, address: str, parquet: str) -> dict[str, dict[str, Callable[[], Any]]]:
    """What is measured: what -> of whom -> the call."""

    def topic(schema: str = "") -> Any:
        reader = spark.read.format("tailrace")
        return (reader.schema(schema) if schema else reader).option("bootstrap", address).option("subscribe", "rows").load()

    def files() -> Any:
        return spark.read.parquet(parquet)

    def noop(frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    three = "key binary, value binary, offset bigint"
    return {
        "scan to noop, all columns": {"tailrace": lambda: noop(topic()), "parquet": lambda: noop(files())},
        "scan to noop, key and value": {
            "tailrace": lambda: noop(topic("key binary, value binary")),
            "parquet": lambda: noop(files().select("key", "value")),
        },
        "aggregate of 3 columns": {
            "tailrace": lambda: topic().selectExpr(*AGGREGATE).collect(),
            "tailrace, .schema": lambda: topic(three).selectExpr(*AGGREGATE).collect(),
            "parquet": lambda: files().selectExpr(*AGGREGATE).collect(),
        },
        "count": {
            "tailrace": lambda: topic().count(),
            "tailrace, .schema": lambda: topic("offset bigint").count(),
            "parquet": lambda: files().count(),
        },
    }


def processor_s() -> float:
    """Of the JVM and the Python processes that it has."""
    total = 0.0
    for child in psutil.Process().children():
        if child.name() == "java":
            for process in (child, *child.children(recursive=True)):
                times = process.cpu_times()
                total += times.user + times.system + (times.children_user + times.children_system if process != child else 0.0)
    return total


def measure(todo: dict[str, dict[str, Callable[[], Any]]]) -> list[dict[str, Any]]:
    """REPETITIONS of everything, in turns."""
    calls = {(what, of): call for what, by in todo.items() for of, call in by.items()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    processor: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for repetition in range(REPETITIONS + 1):
        for key, call in calls.items():
            begun, begun_cpu = time.perf_counter(), processor_s()
            call()
            if repetition:
                seconds[key].append(time.perf_counter() - begun)
                processor[key].append(processor_s() - begun_cpu)
    found = []
    for (what, of), times in seconds.items():
        rates = sorted(ROWS / each / 1e6 for each in times)
        cpu = sorted(ROWS / each / 1e6 for each in processor[what, of])
        of_parquet = statistics.median(rates) / statistics.median(ROWS / each / 1e6 for each in seconds[what, "parquet"])
        name = f"{what}, {of}"
        print(
            f"{name:<48} {statistics.median(rates):>8.2f} {rates[0]:>8.2f} {rates[-1]:>8.2f} {of_parquet:>10.2f} {statistics.median(cpu):>12.2f}",
            flush=True,
        )
        found.append(
            {"name": name, "unit": "M rows/s", "median": statistics.median(rates), "min": rates[0], "max": rates[-1], "values": rates,
             "of_parquet": of_parquet, "m_rows_per_cpu_second": cpu}
        )  # fmt: skip
    return found


def first_queries(address: str, cache: str) -> list[dict[str, Any]]:
    """Seconds from a new session to its first count."""
    found = []
    for prepared in (False, True):
        environment = {**os.environ, "XDG_CACHE_HOME": cache if prepared else f"{cache}/none"}
        if prepared:
            subprocess.run([sys.executable, "-P", "-c", "import spark_bridge; spark_bridge.prepare()"], env=environment, check=True)
        seconds = []
        for _ in range(STARTS):
            done = subprocess.run(
                [sys.executable, "-P", "-c", FIRST_QUERY, address], env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            seconds.append(float(done.stdout.split()[1]))
        name = "first query of a session" + (", after spark_bridge.prepare()" if prepared else "")
        print(f"{name:<60} {statistics.median(seconds):>6.2f} s, {min(seconds):.2f} to {max(seconds):.2f}", flush=True)
        found.append({"name": name, "unit": "s", "median": statistics.median(seconds), "values": seconds})
    return found


def main() -> int:
    where = machine()
    print(f"Spark reads {ROWS} rows of 108 B on {where['cpu']}, {where['cores']} cores, commit {where['commit']}\n")
    with tempfile.TemporaryDirectory(prefix="tailrace-spark-", dir=os.environ.get("SCRATCH")) as directory:
        running = start_embedded(data_dir=f"{directory}/data", settings={"ring_bytes": 64 << 20})
        try:
            fill(running)
            found = first_queries(running.address, f"{directory}/cache") if STARTS else []
            parquet = f"{directory}/parquet"
            os.mkdir(parquet)
            write_parquet(running, parquet)
            print(f"\n{'WHAT':<48} {'M ROWS/s':>8} {'LEAST':>8} {'MOST':>8} {'OF PARQUET':>10} {'PER CPU s':>12}")
            with local_session() as spark:
                found += measure(works(spark, running.address, parquet))
        finally:
            running.stop()
    path = RESULTS / f"spark-{where['date']}-{where['commit']}.json"
    path.write_text(json.dumps({"command": f"ROWS={ROWS} make bench-spark", "machine": where, "figures": found}, indent=1) + "\n")
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
