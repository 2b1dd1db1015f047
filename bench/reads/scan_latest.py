"""The latest record of each key: `python -m bench.reads.scan_latest`, part of `make bench-scan`. A
table and a results file.

RECORDS records (10 M) of KEYS keys (1 M), 100 B a value, in warm files:
`tailrace.scan(latest=True)` with memory for all keys and with a part of it, beside DuckDB's
`row_number()` over the same rows in a Parquet file; and a `tailrace.Table` of the topic, from its
start until it is ready. Each figure is taken REPETITIONS times, in turns with the others. Rates are
of all the topic's records, by the wall clock.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

import tailrace
from bench.measure import RESULTS, machine
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.format.schema import HEADER_TYPE

RECORDS = int(os.environ.get("RECORDS", "10000000"))
KEYS = int(os.environ.get("KEYS", str(max(1, RECORDS // 10))))
REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
VALUE_BYTES = 100
FRAME_ROWS = 20_000
TOPIC = "users"
LATEST = (
    'select * from (select *, row_number() over (partition by key order by "offset" desc) as n '
    "from '{}') where n = 1"
)


def fill(running: EmbeddedAppliance) -> None:
    """Send the records."""
    dice = np.random.default_rng(1)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic(TOPIC, 1, {"retention.ms": -1})])  # times of 2001
    with Producer(running.address) as producer:
        for begin in range(0, RECORDS, FRAME_ROWS):
            rows = min(FRAME_ROWS, RECORDS - begin)
            data = pa.py_buffer(dice.bytes(rows * VALUE_BYTES))
            edges = pa.py_buffer(np.arange(rows + 1, dtype=np.int32) * VALUE_BYTES)
            numbers = dice.integers(0, KEYS, rows)
            frame = pa.table(
                {
                    "timestamp": pa.array(np.arange(rows) + 10**15, pa.timestamp("us", "UTC")),
                    "key": pa.array([b"user-%d" % n for n in numbers], pa.binary()),
                    "value": pa.Array.from_buffers(pa.binary(), rows, [None, edges, data]),
                    "headers": pa.nulls(rows, HEADER_TYPE),
                }
            )
            producer.send_arrow(TOPIC, frame)


def drained(batches: Any) -> int:
    """Read all, keep nothing."""
    return sum(batch.num_rows for batch in batches)


def works(running: EmbeddedAppliance, parquet: str, database: Any) -> dict[str, Callable[[], Any]]:
    """The measured reads."""
    columns = ["key", "value", "partition", "offset", "timestamp"]

    def latest(**settings: Any) -> int:
        return drained(tailrace.scan(TOPIC, running.address, columns, latest=True, **settings))

    def of_duckdb() -> int:
        result = database.sql(LATEST.format(parquet))
        return drained(result.to_arrow_reader(100_000))

    def table() -> int:
        with tailrace.Table(TOPIC, bootstrap=running.address) as found:
            return len(found)

    return {
        "scan(latest=True)": latest,
        "the same, a part of the memory": lambda: latest(latest_memory_bytes=KEYS * 20),
        "DuckDB's row_number()": of_duckdb,
        "Table, until it is ready": table,
    }


def main() -> int:
    where = machine()
    print(f"{RECORDS} records, {KEYS} keys; {where['cpu']}, {where['cores']} cores\n")
    print(f"{'WHAT':<36} {'s':>7} {'LEAST':>7} {'MOST':>7}  {'M RECORDS/s':>11}")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tailrace-latest-") as directory:
        running = start_embedded(data_dir=f"{directory}/data", settings={"ring_bytes": 64 << 20})
        try:
            fill(running)
            parquet = f"{directory}/rows.parquet"
            columns = ["key", "value", "partition", "offset", "timestamp"]
            with duckdb.connect() as database:
                database.register("rows", tailrace.scan(TOPIC, running.address, columns))
                database.execute(f"copy rows to '{parquet}'")
                todo = works(running, parquet, database)
                seconds: dict[str, list[float]] = {name: [] for name in todo}
                rows = dict[str, int]()
                for repetition in range(REPETITIONS + 1):
                    for name, work in todo.items():
                        begun = time.perf_counter()
                        rows[name] = work()
                        if repetition:  # the first one warms
                            seconds[name].append(time.perf_counter() - begun)
                assert len(set(rows.values())) == 1, rows
        finally:
            running.stop()
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(
            f"{name:<36} {middle:>7.2f} {min(times):>7.2f} {max(times):>7.2f}  "
            f"{RECORDS / middle / 1e6:>11.2f}"
        )
        found.append({"name": name, "unit": "s", "median": middle, "values": times})
    path = RESULTS / f"scan-latest-{where['date']}-{where['commit']}.json"
    path.write_text(
        json.dumps(
            {
                "command": f"RECORDS={RECORDS} KEYS={KEYS} python -m bench.reads.scan_latest",
                "machine": where,
                "figures": found,
            },
            indent=1,
        )
        + "\n"
    )
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
