"""Rate of Spark's writes to a topic: `make bench-spark-sink [ROWS=5000000]`. A table and a results
file; rows of 8 B of key and 100 B of value.

Figures are taken in turns, REPETITIONS (5) times, by the clock, after one turn that warms;
local[2], the settings of `spark_bridge.session`, 4 partitions of durability "disk". `noop` is Spark
making the rows and dropping them in the JVM; `hand-off` a sink in Python that drops the Arrow
batches which it is given, as much as any Python sink costs; `write` is df.write with all rows
written and committed. Of each the table says what a row takes of the processors, process by
process, which says something on a busy machine, too.

`--parts` measures a task and its commit in this process, without Spark: what the Python of a task,
the driver's commit and the appliance cost. `--batches` measures micro-batches of 1,000 rows with
Spark, beside its noop sink.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

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
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

ROWS = int(os.environ.get("ROWS", "5000000"))
REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
GOAL = 2.6
"""Million rows a second, written and committed, on two cores: twice what the sink that staged its
rows did.
"""
PARTITIONS = 4
BATCH_ROWS = 10_000
SMALL_ROWS, SMALL_BATCHES, WARM_BATCHES = 1_000, 30, 5
ROLES = ("JVM", "tasks", "driver", "front", "worker", "flusher", "rest")
WHATS = ("noop", "hand-off", "write")


class DroppingSink(DataSource):
    """Takes Arrow batches from Spark, and drops them."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
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
    """Role of a process in the table of times."""
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
    """CPU of this process and all below it, those that have ended with them, the appliance's and
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
        f"\nthe goal: {GOAL} M rows/s written and committed; "
        f"{'reached' if rate >= GOAL else 'missed'} with {rate:.2f}"
    )


class Mark(NamedTuple):
    """Times at one moment, s: of the clock, of this process, of the appliance's processes."""

    wall: float
    own: float
    appliance: float

    @classmethod
    def now(cls) -> Mark:
        """The present ones."""
        appliance = 0.0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                appliance += times.user + times.system
        return cls(time.perf_counter(), time.process_time(), appliance)


def parts(running: EmbeddedAppliance) -> list[dict[str, Any]]:
    """Processor time of a task and of its commit, without Spark: in this process, and in those of
    the appliance.
    """
    from spark_bridge.sink.commit import commit_tasks
    from spark_bridge.sink.options import parse_sink_options
    from spark_bridge.sink.task_writer import TaskWriter

    keys = [
        pa.array([b"%08d" % n for n in range(at, at + BATCH_ROWS)], pa.binary())
        for at in range(0, ROWS, BATCH_ROWS)
    ]
    values = pa.array([os.urandom(50).hex().encode() for _ in range(BATCH_ROWS)], pa.binary())
    found: dict[str, list[Mark]] = {"write": [], "commit": []}
    for number in range(REPETITIONS + 1):
        topic = f"parts-{number}"
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(topic, PARTITIONS)])
        options = parse_sink_options({"bootstrap": running.address, "topic": topic})
        marks = [Mark.now()]
        writer = TaskWriter(options, f"query:{topic}", "run", 0, 0)
        for key in keys:
            writer.add(pa.RecordBatch.from_arrays([key, values], ["key", "value"]))
        task = writer.finish()
        writer.close()
        marks.append(Mark.now())
        commit_tasks(options, [task], 0)
        marks.append(Mark.now())
        with Admin(running.address) as admin:
            admin.delete_topics(topic)
        for name, before, after in zip(found, marks, marks[1:], strict=False):
            if number:
                found[name].append(Mark(*(b - a for a, b in zip(before, after, strict=True))))
    return [
        {
            "what": name,
            "million_rows_per_s": ROWS / statistics.median(one.wall for one in each) / 1e6,
            "own_ns_per_row": statistics.median(one.own for one in each) / ROWS * 1e9,
            "appliance_ns_per_row": statistics.median(one.appliance for one in each) / ROWS * 1e9,
        }
        for name, each in found.items()
    ]


def small_batches(running: EmbeddedAppliance) -> list[dict[str, Any]]:
    """Time of a batch of SMALL_ROWS rows, without Spark, of two tasks one after the other."""
    from spark_bridge.sink.commit import commit_tasks
    from spark_bridge.sink.options import parse_sink_options
    from spark_bridge.sink.task_writer import TaskWriter

    topic = "small"
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic(topic, PARTITIONS)])
    options = parse_sink_options({"bootstrap": running.address, "topic": topic})
    half = SMALL_ROWS // 2
    columns = [
        pa.array([b"%08d" % n for n in range(half)], pa.binary()),
        pa.array([os.urandom(50).hex().encode() for _ in range(half)], pa.binary()),
    ]
    rows = pa.RecordBatch.from_arrays(columns, ["key", "value"])
    found: dict[str, list[Mark]] = {"write": [], "commit": []}
    for batch_id in range(SMALL_BATCHES + 1):
        marks, tasks = [Mark.now()], []
        for number in range(2):
            writer = TaskWriter(options, f"query:{topic}", "run", number, batch_id)
            writer.add(rows)
            tasks.append(writer.finish())
            writer.close()
        marks.append(Mark.now())
        commit_tasks(options, tasks, batch_id)
        marks.append(Mark.now())
        for name, before, after in zip(found, marks, marks[1:], strict=False):
            if batch_id:
                found[name].append(Mark(*(b - a for a, b in zip(before, after, strict=True))))
    return [
        {"what": f"small {name}", **{
            f"{field}_ms": statistics.median(getattr(one, field) for one in each) * 1e3
            for field in Mark._fields
        }}
        for name, each in found.items()
    ]  # fmt: skip


def micro_batches(running: EmbeddedAppliance) -> list[dict[str, Any]]:
    """Times of micro-batches of SMALL_ROWS rows with Spark, in two tasks: of the whole batch
    (triggerExecution), and of its job with the commit (addBatch). The first WARM_BATCHES are left
    out.
    """
    found: dict[str, list[dict[str, int]]] = {"noop": [], "tailrace": []}
    with local_session() as spark, tempfile.TemporaryDirectory(prefix="tailrace-sink-") as scratch:
        source = pathlib.Path(scratch, "in")
        source.mkdir()
        for number in range(WARM_BATCHES + SMALL_BATCHES):
            rows = range(number * SMALL_ROWS, (number + 1) * SMALL_ROWS)
            (source / f"{number:04d}.txt").write_text("".join(f"{n:0100d}\n" for n in rows))
        for repetition in range(REPETITIONS):
            for sink, durations in found.items():
                topic = f"micro-{sink}-{repetition}"
                with Admin(running.address) as admin:
                    admin.create_topics([NewTopic(topic, PARTITIONS)])
                lines = spark.readStream.schema("value string").option("maxFilesPerTrigger", "1")
                frame = lines.text(str(source)).repartition(2).selectExpr("value as key", "value")
                writer = frame.writeStream.format(sink).option(
                    "checkpointLocation", f"{scratch}/{topic}"
                )
                if sink == "tailrace":
                    writer = writer.option("bootstrap", running.address).option("topic", topic)
                query = writer.trigger(availableNow=True).start()
                query.awaitTermination()
                progress = [json.loads(one.json) for one in query.recentProgress]
                filled = [one["durationMs"] for one in progress if one["numInputRows"]]
                durations += filled[WARM_BATCHES:]
    return [
        {
            "what": sink,
            **{
                f"{phase}_ms": statistics.median(one[phase] for one in durations)
                for phase in ("triggerExecution", "addBatch")
            },
            "batches": len(durations),
        }
        for sink, durations in found.items()
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
                    f"{row['what']:12} {row['million_rows_per_s']:8.3f} M rows/s, processor time "
                    f"of a row: here {row['own_ns_per_row']:.0f} ns, in the appliance "
                    f"{row['appliance_ns_per_row']:.0f} ns"
                )
            for row in small_batches(running):
                print(
                    f"{row['what']:12} {row['wall_ms']:8.1f} ms, processor time: here "
                    f"{row['own_ms']:.1f} ms, in the appliance {row['appliance_ms']:.1f} ms"
                )
            return 0
        if "--batches" in sys.argv:
            for row in micro_batches(running):
                print(
                    f"{row['what']:9} {row['triggerExecution_ms']:6.0f} ms a micro-batch of "
                    f"{SMALL_ROWS} rows, {row['addBatch_ms']:.0f} of them its job and commit "
                    f"(medians of {row['batches']})"
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
