"""Ack latency of one producer (acks=all, durability=disk) while many partitions are written at once: `python -m bench.wide_groups [partitions] [seconds]`.

The load is another process that sends small records to every partition in turn, acks=all; the measured producer has one record under way.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from bench.measure import machine, percentile
from tailrace import Admin, NewTopic, Producer
from tailrace.private_appliance import start_embedded

RECORD = b"x" * 100


def load(address: str, partitions: int) -> None:
    """Until killed: a record to each partition, a hundred turns a second at most."""
    with Producer(address, acks="all", linger_ms=5) as producer:
        while True:
            begun = time.monotonic()
            for partition in range(partitions):
                producer.send("wide", RECORD, partition=partition)
            producer.flush()
            time.sleep(max(0.0, 0.01 - (time.monotonic() - begun)))


def measure(partitions: int, seconds: float) -> str:
    with tempfile.TemporaryDirectory(prefix="tailrace-wide-") as data_dir:
        appliance = start_embedded(data_dir=data_dir, auto_create_topics=False)
        with Admin(appliance.address) as admin:
            admin.create_topics([NewTopic("wide", partitions), NewTopic("one")])
        times = []
        with Producer(appliance.address, acks="all") as producer:
            producer.send("one", RECORD).result(60)
            loader = subprocess.Popen([sys.executable, "-P", "-m", "bench.wide_groups", "--load", appliance.address, str(partitions)])
            time.sleep(3)  # first segments of every partition are made, the journal's zeroes are written
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                begun = time.perf_counter()
                producer.send("one", RECORD).result(60)
                times.append((time.perf_counter() - begun) * 1000)
            loader.kill()
            loader.wait()
        with Admin(appliance.address) as admin:
            topic = admin.describe_topics(["wide"])["wide"]
        records = sum(p["end_offset"] for p in topic["partitions"])
        appliance.stop()
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    return f"{partitions} partitions: p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {max(times):.1f} ms of {len(times)}; load {records / (seconds + 3):.0f} records/s"


def main() -> int:
    if sys.argv[1:2] == ["--load"]:
        load(sys.argv[2], int(sys.argv[3]))
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 8.0
    for partitions in [int(sys.argv[1])] if len(sys.argv) > 1 else [1, 64, 1000]:
        print(measure(partitions, seconds), flush=True)
    print(machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
