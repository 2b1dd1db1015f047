"""How fast Spark writes to a topic: `make bench-spark-sink [ROWS=5000000]`. A table and a results
file; rows of 8 B of key and 100 B of value.

Figures are taken in turns, REPETITIONS (5) times, by the clock, after one turn that warms;
local[2], the settings of `spark_bridge.session`, 4 partitions of durability "disk". `noop` is Spark
making the rows and dropping them in the JVM; `hand-off` a sink in Python that drops the Arrow
batches which it is given, as much as any Python sink costs; `write` is df.write with all rows
staged and published. Of each the table says what a row takes of the processors, process by process,
which says something on a busy machine, too.

`--parts` measures staging and commit in this process, without Spark: what the Python of a task and
of the driver's commit costs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from bench.measure import RESULTS, machine
from spark_bridge.session import local_session
from spark_bridge.sink.options import parse_sink_options
from spark_bridge.sink.staging import Stager
from spark_bridge.sink.writer import StagedTask, commit_staged
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

ROWS = int(os.environ.get("ROWS", "5000000"))
REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
GOAL = 1.5
"""Million rows a second, staged and published, on two cores."""
PARTITIONS = 4
BATCH_ROWS = 10_000
ROLES = ("JVM", "tasks", "driver", "front", "worker", "flusher", "rest")
WHATS = ("noop", "hand-off", "write")


class DroppingSink(DataSource):
    """Takes Arrow batches from Spark, and drops them."""

    @classmethod
    def name(cls) -> str:
        """Of the format."""
        return "dropping"

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        """For `df.write`."""
        return _DroppingWriter()


class _DroppingWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


def role_of(process: psutil.Process) -> str:
    """Whose time it is."""
    command = " ".join(process.cmdline())
    if process.name() == "java":
        return "JVM"
    for words, role in (
        ("netfront", "front"),
        ("workers.append.worker", "worker"),
        ("workers.flush.flusher", "flusher"),
    ):
        if words in command:
            return role
    if (
        "pyspark" in command
    ):  # Spark plans a write, and commits it, in Python processes of the driver's own
        return "driver" if "pyspark.sql.worker" in command else "tasks"
    return "rest"


def processor_ns() -> Counter[str]:
    """Of this process and all below it, those that have ended with them, the appliance's and
    Spark's among them.
    """
    found: Counter[str] = Counter()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times, role = process.cpu_times(), role_of(process)
        except psutil.NoSuchProcess:
            continue
        own = times.user + times.system
        found[role] += int(
            (
                own
                if role == "rest" or role == "JVM"
                else own + times.children_user + times.children_system
            )
            * 1e9
        )
    return found


def with_spark(running: EmbeddedAppliance) -> list[dict[str, Any]]:
    """The rates of df.write."""
    rates: dict[str, list[float]] = {what: [] for what in WHATS}
    spent: dict[str, list[Counter[str]]] = {what: [] for what in WHATS}
    with local_session() as spark:
        spark.dataSource.register(DroppingSink)
        frame = spark.range(0, ROWS, 1, 2).selectExpr(
            "lpad(cast(id as string), 8, '0') as key", "repeat(chr(97 + id % 26), 100) as value"
        )
        for number in range(REPETITIONS + 1):
            for what in WHATS:
                topic = f"{what}-{number}"
                with Admin(running.address) as admin:
                    admin.create_topics([NewTopic(topic, PARTITIONS)])
                writer = frame.write.mode("overwrite" if what == "noop" else "append")
                writer = writer.format(
                    {"noop": "noop", "hand-off": "dropping", "write": "tailrace"}[what]
                )
                if what == "write":
                    writer = writer.option("bootstrap", running.address).option("topic", topic)
                began, before = time.perf_counter(), processor_ns()
                writer.save()
                if number:  # the first warms up
                    rates[what].append(ROWS / (time.perf_counter() - began) / 1e6)
                    after = processor_ns()
                    spent[what].append(
                        Counter({role: after[role] - before[role] for role in ROLES})
                    )
                with Admin(running.address) as admin:
                    admin.delete_topics(topic)
    return [
        {
            "name": what, "unit": "M rows/s", "median": statistics.median(rates[what]),
            "min": min(rates[what]), "max": max(rates[what]),
            "values": rates[what],
            "cpu_ns_per_row": round(statistics.median(sum(each.values()) for each in spent[what]) / ROWS),  # noqa: E501
            "cpu_ns_per_row_of": {role: round(statistics.median(each[role] for each in spent[what]) / ROWS) for role in ROLES},  # noqa: E501
        }
        for what in WHATS
    ]  # fmt: skip


def print_table(found: list[dict[str, Any]]) -> None:
    """One line for each thing that was measured."""
    print(
        f"{'WHAT':<10} {'M ROWS/s':>8} {'LEAST':>7} {'MOST':>7} {'ns/ROW':>7}  of which "
        + " ".join(f"{role:>8}" for role in ROLES)
    )
    for each in found:
        roles = " ".join(f"{each['cpu_ns_per_row_of'][role]:>8}" for role in ROLES)
        print(
            f"{each['name']:<10} {each['median']:>8.3f} {each['min']:>7.3f} {each['max']:>7.3f} "
            f"{each['cpu_ns_per_row']:>7}           {roles}"
        )
    rate = next(each["median"] for each in found if each["name"] == "write")
    print(
        f"\nthe goal: {GOAL} M rows/s staged and published; "
        f"{'reached' if rate >= GOAL else 'missed'} with {rate:.2f}"
    )


def parts(running: EmbeddedAppliance) -> list[dict[str, Any]]:
    """Processor time of staging and of the commit in this process."""
    keys = [
        pa.array([b"%08d" % n for n in range(at, at + BATCH_ROWS)], pa.binary())
        for at in range(0, ROWS, BATCH_ROWS)
    ]
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


def main() -> int:
    """The command line."""
    where = machine()
    print(
        f"Spark writes {ROWS} rows of 108 B on {where['cpu']}, {where['cores']} cores, commit "
        f"{where['commit']}\n",
        flush=True,
    )
    running = start_embedded(auto_create_topics=False, settings={"ring_bytes": 64 << 20})
    try:
        if "--parts" in sys.argv:
            for row in parts(running):
                print(
                    f"{row['what']:8} {row['million_rows_per_s']:8.3f} M rows/s "
                    f"{row['cpu_ns_per_row']:8.0f} ns of processor time per row"
                )
            return 0
        found = with_spark(running)
    finally:
        running.stop()
    print_table(found)
    path = RESULTS / f"spark-sink-{where['date']}-{where['commit']}.json"
    result = {
        "command": f"ROWS={ROWS} make bench-spark-sink",
        "machine": where,
        "goal_million_rows_per_s": GOAL,
        "figures": found,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
