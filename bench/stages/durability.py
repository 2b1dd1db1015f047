"""Costs of durability, in interleaved pairs: `python -m bench.stages.durability [pairs] [records]`.

acks=all against acks=1 (group commit), idempotence on against off, both with `send()` of 100-byte
records; then how fast `tailrace log verify` proves what was written. Idempotence costs so little
that the disk would hide it: durability=memory, three times the pairs. The result goes to
bench/results.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import orjson

from bench.measure import RESULTS, machine
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded

VALUE = b"x" * 100


def produce(address: str, topic: str, records: int, **settings: Any) -> float:
    """Records per second, all of them acknowledged."""
    with Producer(address, **settings) as producer:
        producer.send(topic, VALUE).result(60)
        begun = time.perf_counter()
        for _ in range(records):
            producer.send(topic, VALUE)
        producer.flush()
        return records / (time.perf_counter() - begun)


def pairs(
    address: str, topic: str, count: int, records: int, one: dict[str, Any], other: dict[str, Any]
) -> list[tuple[float, float]]:
    """`one` and `other` in turn; who begins changes with each pair."""
    found = []
    for number in range(count):
        if number % 2:
            second = produce(address, topic, records, **other)
            found.append((produce(address, topic, records, **one), second))
        else:
            first = produce(address, topic, records, **one)
            found.append((first, produce(address, topic, records, **other)))
    return found


def summary(name: str, found: list[tuple[float, float]]) -> dict[str, Any]:
    """Ratios and medians of pairs of rates, for the results file."""
    ratios = [one / other for one, other in found]
    return {
        "name": name, "ratio_median": statistics.median(ratios), "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "one_median": statistics.median(one for one, _ in found),
        "other_median": statistics.median(other for _, other in found), "pairs": found,
    }  # fmt: skip


def verify_speed(data_dir: str) -> dict[str, Any]:
    """GB/s of `tailrace log verify`, the interpreter's start included; the files are in the page
    cache.
    """
    size = sum(os.path.getsize(f"{data_dir}/t-0/{name}") for name in os.listdir(f"{data_dir}/t-0"))
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-P", "-m", "appliance.cli.main", "log", "verify", data_dir],
            check=True,
            capture_output=True,
        )
        times.append(time.perf_counter() - begun)
    return {"name": "log verify", "bytes": size, "gb_per_s": [size / t / 1e9 for t in times]}


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    records = int(sys.argv[2]) if len(sys.argv) > 2 else 600_000
    with tempfile.TemporaryDirectory(
        prefix="tailrace-durability-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as data_dir:
        appliance = start_embedded(data_dir=data_dir, auto_create_topics=False)
        with Admin(appliance.address) as admin:
            admin.create_topics(
                [NewTopic("t", 1, {"retention.ms": -1}), NewTopic("m", 1, {"durability": "memory"})]
            )
        produce(appliance.address, "t", records)
        acks = pairs(appliance.address, "t", count, records, {"acks": "all"}, {"acks": 1})
        idempotence = pairs(
            appliance.address,
            "m",
            3 * count,
            records,
            {"acks": 1},
            {"acks": 1, "enable_idempotence": False},
        )
        appliance.stop()
        rows = [
            summary("acks=all / acks=1", acks),
            summary("idempotent / not", idempotence),
            verify_speed(data_dir),
        ]
    for row in rows[:2]:
        print(
            f"{row['name']}: {row['ratio_median']:.3f} ({row['ratio_min']:.3f} .. "
            f"{row['ratio_max']:.3f}, {len(row['pairs'])} pairs); "
            f"{row['one_median']:,.0f} against {row['other_median']:,.0f} records/s"
        )
    print(
        f"log verify: {statistics.median(rows[2]['gb_per_s']):.2f} GB/s of "
        f"{rows[2]['bytes'] / 1e9:.2f} GB"
    )
    about = machine()
    path = RESULTS / f"durability-{about['date']}-{about['commit']}.json"
    path.write_bytes(
        orjson.dumps(
            {"machine": about, "command": "python -m bench.stages.durability", "figures": rows},
            option=orjson.OPT_INDENT_2,
        )
    )
    print(about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
