"""Latency of streaming through Spark: `make bench-spark-streaming`. A table and a results file.

    micro-batch     triggerExecution of a query to the noop sink, our source beside Spark's rate
                    source (rate-micro-batch, in the JVM): each batch has ROWS rows in one task. The
                    goal is 50 ms over it, in the median. Where the time goes is in the results
                    file: Spark's durationMs of both.
    freshness       from `Producer.send` of a record to the moment when the query's output
                    (foreachBatch, which collects) has it, with a trigger of 100 ms. The goal is a
                    median under 300 ms.

All queries run in one session, in turns, REPETITIONS times; the first turn warms and does not
count. Wall-clock times mean something only on a machine that does nothing else; beside them stands
the processor time of what a trigger asks of the appliance, which means something anywhere.
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
from collections.abc import Callable
from typing import Any

from pyspark.sql.types import BinaryType, StructType

from bench.measure import RESULTS, machine
from spark_bridge.session import local_session
from spark_bridge.stream.options import parse_stream_options
from spark_bridge.stream.reader import TopicStreamReader
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
BATCHES = int(os.environ.get("BATCHES", "20"))
ROWS = 1_000
RECORDS = int(os.environ.get("RECORDS", "300"))
TRIGGER_MS = 100
QUESTIONS = 500


def stream(spark: Any, running: EmbeddedAppliance, topic: str, **options: Any) -> Any:
    """Our source."""
    reader = (
        spark.readStream.format("tailrace")
        .option("bootstrap", running.address)
        .option("subscribe", topic)
    )
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def durations(query: Any) -> list[dict[str, int]]:
    """durationMs of batches that had rows, but for the first two, in which Python's processes
    start.
    """
    told = [json.loads(progress.json) for progress in query.recentProgress]
    return [progress["durationMs"] for progress in told if progress["numInputRows"]][2:]


def run_rate(spark: Any, _running: EmbeddedAppliance, checkpoint: str) -> list[dict[str, int]]:
    """Spark's own source, which has ROWS rows ready for each batch."""
    frame = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", ROWS)
        .option("numPartitions", 1)
        .load()
    )
    return run_batches(frame, checkpoint)


def run_topic(spark: Any, running: EmbeddedAppliance, checkpoint: str) -> list[dict[str, int]]:
    """A topic that has them."""
    return run_batches(
        stream(spark, running, "filled", startingOffsets="earliest", maxOffsetsPerTrigger=ROWS),
        checkpoint,
    )


def run_batches(frame: Any, checkpoint: str) -> list[dict[str, int]]:
    """BATCHES batches one behind the other."""
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        while len(durations(query)) < BATCHES:
            if query.awaitTermination(0.2):
                break
        return durations(query)
    finally:
        query.stop()


def freshness(spark: Any, running: EmbeddedAppliance, checkpoint: str) -> list[float]:
    """Milliseconds from send to visible, of records that are sent one by one, evenly over the
    triggers.
    """
    seen: dict[int, int] = {}
    ready, done = threading.Event(), threading.Event()

    def visible(frame: Any, _batch: int) -> None:
        rows = [int(row.value) for row in frame.select("value").collect()]
        now_ns = time.monotonic_ns()
        seen.update((number, now_ns) for number in rows)
        if -1 in seen:
            ready.set()
        if len(seen) > RECORDS:
            done.set()

    frame = stream(spark, running, "fresh", startingOffsets="latest")
    query = (
        frame.writeStream.foreachBatch(visible)
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime=f"{TRIGGER_MS} milliseconds")
        .start()
    )
    sent: dict[int, int] = {}
    try:
        with Producer(running.address) as producer:
            while not ready.wait(0.2):
                producer.send("fresh", b"-1")
            for number in range(RECORDS):
                sent[number] = time.monotonic_ns()
                producer.send("fresh", b"%d" % number)
                time.sleep(0.037)  # no multiple of the trigger
            producer.flush()
        done.wait(60)
    finally:
        query.stop()
    return [(seen[number] - sent[number]) / 1e6 for number in sent if number in seen]


def question_us(running: EmbeddedAppliance) -> tuple[float, float]:
    """Processor and wall time of what a trigger asks of the appliance (latestOffset, partitions),
    median of each.
    """
    reader = TopicStreamReader(
        parse_stream_options(
            {
                "bootstrap": running.address,
                "subscribe": "filled",
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": str(ROWS),
            }
        ),
        StructType().add("key", BinaryType()).add("value", BinaryType()),
    )
    position = reader.initialOffset()
    cpu, wall = [], []
    for _ in range(QUESTIONS):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        end = reader.latestOffset(position, reader.getDefaultReadLimit())
        reader.partitions(position, end)
        reader.reportLatestOffset()
        wall.append((time.perf_counter() - begun) * 1e6)
        cpu.append((time.process_time() - begun_cpu) * 1e6)
    reader.stop()
    return statistics.median(cpu), statistics.median(wall)


def fill(running: EmbeddedAppliance) -> None:
    """More rows than are read, and an empty topic."""
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("filled", 2), NewTopic("fresh", 1)])
    with Producer(running.address) as producer:
        for number in range((BATCHES + 60) * ROWS):
            producer.send("filled", b"v" * 100, b"k" * 8, partition=number % 2)


def row(name: str, unit: str, values: list[float], **more: Any) -> dict[str, Any]:
    """Print it, and return it for the results file."""
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]
    print(
        f"{name:<62} {statistics.median(ordered):>9.1f} {ordered[0]:>9.1f} {p95:>9.1f}  {unit}",
        flush=True,
    )
    return {
        "name": name,
        "unit": unit,
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p95": p95,
        "values": values,
        **more,
    }


def main() -> int:
    """Returns the exit code."""
    where = machine()
    print(
        f"Streams through Spark on {where['cpu']}, {where['cores']} cores, commit "
        f"{where['commit']}\n"
    )
    print(f"{'WHAT':<62} {'MEDIAN':>9} {'LEAST':>9} {'P95':>9}")
    sources: dict[str, Callable[[Any, EmbeddedAppliance, str], list[dict[str, int]]]] = {
        "rate source": run_rate,
        "topic": run_topic,
    }
    taken: dict[str, list[float]] = {name: [] for name in sources}
    phases: dict[str, list[dict[str, int]]] = {name: [] for name in sources}
    late: list[float] = []
    found = []
    with tempfile.TemporaryDirectory(prefix="tailrace-streaming-") as directory:
        running = start_embedded(data_dir=f"{directory}/data", auto_create_topics=False)
        try:
            fill(running)
            cpu_us, wall_us = question_us(running)
            with local_session() as spark:
                for repetition in range(REPETITIONS + 1):
                    for name, run in sources.items():
                        of_batches = run(
                            spark, running, f"{directory}/checkpoint-{repetition}-{run.__name__}"
                        )
                        if repetition:
                            taken[name].append(
                                statistics.median(each["triggerExecution"] for each in of_batches)
                            )
                            phases[name] += of_batches
                    if repetition:
                        late += freshness(
                            spark, running, f"{directory}/checkpoint-{repetition}-fresh"
                        )
        finally:
            running.stop()
    for name, values in taken.items():
        found.append(
            row(f"micro-batch of {ROWS:,} rows, {name}", "ms", values, durations_ms=phases[name])
        )
    overhead = [
        ours - theirs for ours, theirs in zip(taken["topic"], taken["rate source"], strict=True)
    ]
    found.append(row("overhead of a micro-batch over the rate source (goal 50)", "ms", overhead))
    found.append(
        row(f"send to visible, trigger of {TRIGGER_MS} ms (goal: median under 300)", "ms", late)
    )
    found.append(row("what a trigger asks of the appliance, processor time", "us", [cpu_us]))
    found.append(row("what a trigger asks of the appliance, wall clock", "us", [wall_us]))
    path = pathlib.Path(RESULTS) / f"spark-streaming-{where['date']}-{where['commit']}.json"
    path.write_text(
        json.dumps(
            {"command": "make bench-spark-streaming", "machine": where, "figures": found}, indent=1
        )
        + "\n"
    )
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
