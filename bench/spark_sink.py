"""How fast Spark writes to a topic: `python -P -m bench.spark_sink`. A table and a results file; ROWS (5,000,000) rows of 8 B of key and 100 B of value.

Figures are taken in turns, REPETITIONS (5) times, wall clock: `noop` is Spark making the rows and dropping them, `write` is df.write with them staged and
published. The processor time per row is that of Spark's processes and of the appliance's together. `--parts` measures staging and commit in this process,
without Spark: what the Python of a task costs, by processor time, which says something on a busy machine too.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import psutil
import pyarrow as pa

from bench.measure import machine
from bench.suite import RESULTS
from spark_bridge.session import local_session
from spark_bridge.sink import StagedTask, commit_staged
from spark_bridge.sink_options import parse_sink_options
from spark_bridge.sink_stage import Stager
from tailrace import Admin, NewTopic
from tailrace.private_appliance import EmbeddedAppliance, start_embedded

ROWS = int(os.environ.get("ROWS", "5000000"))
REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
PARTITIONS = 4
BATCH_ROWS = 10_000


def cpu_s(*pids: int) -> float:
    """Processor time of these processes and all below them, s."""
    total = 0.0
    for pid in pids:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
    return total


def with_spark(running: EmbeddedAppliance) -> list[dict[str, Any]]:
    """The rates of df.write."""
    results: dict[str, list[float]] = {"noop": [], "write": []}
    cpu: dict[str, list[float]] = {"noop": [], "write": []}
    with local_session() as spark:
        frame = spark.range(0, ROWS, 1, 2).selectExpr("lpad(cast(id as string), 8, '0') as key", "repeat(chr(97 + id % 26), 100) as value")
        for number in range(REPETITIONS + 1):
            for name in results:
                topic = f"{name}-{number}"
                with Admin(running.address) as admin:
                    admin.create_topics([NewTopic(topic, PARTITIONS)])
                writer = frame.write.mode("append" if name == "write" else "overwrite")
                writer = (
                    writer.format("noop")
                    if name == "noop"
                    else writer.format("tailrace").option("bootstrap", running.address).option("topic", topic)
                )
                began, busy = time.perf_counter(), cpu_s(os.getpid(), running.pid)
                writer.save()
                if number:  # the first warms up
                    results[name].append(ROWS / (time.perf_counter() - began) / 1e6)
                    cpu[name].append((cpu_s(os.getpid(), running.pid) - busy) / ROWS * 1e9)
                with Admin(running.address) as admin:
                    admin.delete_topics(topic)
    return [
        {
            "what": name,
            "million_rows_per_s": round(statistics.median(results[name]), 3),
            "cpu_ns_per_row": round(statistics.median(cpu[name])),
        }
        for name in results
    ]


def parts(running: EmbeddedAppliance) -> list[dict[str, Any]]:
    """Processor time of staging and of the commit in this process."""
    keys = [pa.array([b"%08d" % n for n in range(at, at + BATCH_ROWS)], pa.binary()) for at in range(0, ROWS, BATCH_ROWS)]
    values = pa.array([os.urandom(50).hex().encode() for _ in range(BATCH_ROWS)], pa.binary())
    spent: dict[str, list[float]] = {"stage": [], "commit": []}
    walls: dict[str, list[float]] = {"stage": [], "commit": []}
    for number in range(REPETITIONS + 1):
        topic = f"parts-{number}"
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(topic, PARTITIONS)])
        options = parse_sink_options({"bootstrap": running.address, "topic": topic})
        marks = [(time.process_time(), time.perf_counter())]
        stager = Stager(options, f"query:{topic}", 0)
        for key in keys:
            stager.add(pa.RecordBatch.from_arrays([key, values], ["key", "value"]))
        tasks = [StagedTask(f"query:{topic}", "run", stager.finish())]
        stager.close()
        marks.append((time.process_time(), time.perf_counter()))
        commit_staged(options, tasks, 0)
        marks.append((time.process_time(), time.perf_counter()))
        with Admin(running.address) as admin:
            admin.delete_topics(topic)
        for name, (cpu_0, wall_0), (cpu_1, wall_1) in zip(spent, marks, marks[1:], strict=False):
            if number:
                spent[name].append((cpu_1 - cpu_0) / ROWS * 1e9)
                walls[name].append(ROWS / (wall_1 - wall_0) / 1e6)
    return [
        {
            "what": name,
            "million_rows_per_s": round(statistics.median(walls[name]), 3),
            "cpu_ns_per_row": round(statistics.median(spent[name])),
        }
        for name in spent
    ]


def main() -> None:
    """The command line."""
    running = start_embedded(auto_create_topics=False, settings={"ring_bytes": 64 << 20})
    try:
        rows = parts(running) if "--parts" in sys.argv else with_spark(running)
    finally:
        running.stop()
    for row in rows:
        print(f"{row['what']:8} {row['million_rows_per_s']:8.3f} M rows/s {row['cpu_ns_per_row']:8.0f} ns of processor time per row")
    if "--parts" not in sys.argv:
        result = {"bench": "spark_sink", "rows": ROWS, "repetitions": REPETITIONS, "machine": machine(), "results": rows}
        path = RESULTS / "spark_sink.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
