"""Ack latency of one producer (acks=all, durability=disk) while many topics are written at once:
`python -m bench.members.wide_groups [topics] [rate] [seconds]`.

The load is another process that sends a small record to every topic in turn, acks=all, `rate`
records/s in all, or as fast as they are acknowledged (rate 0); the measured producer has one record
under way. On two cores the second load leaves no processor idle: its latencies are those of a
queue.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from bench.measure import machine, percentile
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import start_embedded

RECORD = b"x" * 100


def load(address: str, topics: int, rate: float) -> None:
    """Until killed: a record to each topic, then all of them acknowledged."""
    with Producer(address, acks="all", linger_ms=5) as producer:
        next_round = time.monotonic()
        while True:
            for number in range(topics):
                producer.send(f"wide-{number}", RECORD)
                if rate and number % 16 == 15:
                    time.sleep(max(0.0, next_round + (number + 1) / rate - time.monotonic()))
            producer.flush()
            next_round = max(time.monotonic(), next_round + topics / rate) if rate else 0.0
            time.sleep(max(0.0, next_round - time.monotonic()))


def measure(topics: int, rate: float, seconds: float) -> str:
    """A line of text: ack latency while each of `topics` topics is written, `rate` records/s in all
    (0: as fast as acknowledged), for `seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="tailrace-wide-") as data_dir:
        appliance = start_embedded(data_dir=data_dir, auto_create_topics=False)
        with Admin(appliance.address) as admin:
            admin.create_topics([NewTopic("one")])
            admin.create_topics([NewTopic(f"wide-{number}") for number in range(topics)])
        times = []
        with Producer(appliance.address, acks="all") as producer:
            producer.send("one", RECORD).result(60)
            loader = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "bench.members.wide_groups",
                    "--load",
                    appliance.address,
                    str(topics),
                    str(rate),
                ]
            )
            time.sleep(
                3
            )  # first segments of every partition are made, the journal's zeroes are written
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                begun = time.perf_counter()
                producer.send("one", RECORD).result(60)
                times.append((time.perf_counter() - begun) * 1000)
            loader.kill()
            loader.wait()
        with Admin(appliance.address) as admin:
            ends = admin.offsets(
                {TopicPartition(f"wide-{number}", 0): "latest" for number in range(topics)}
            )
        records = sum(end["offset"] for end in ends.values())
        appliance.stop()
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    load_is = f"{rate:g} records/s" if rate else "as fast as acknowledged"
    latency = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {max(times):.1f} ms of {len(times)}"
    return f"{topics} topics, {load_is}: {latency}; load {records / (seconds + 3):.0f} records/s"


def main() -> int:
    if sys.argv[1:2] == ["--load"]:
        load(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 8.0
    asked = (
        [(int(sys.argv[1]), float(sys.argv[2]))]
        if len(sys.argv) > 2
        else [(1, 0), (64, 1000), (64, 0), (1000, 1000), (1000, 0)]
    )
    for topics, rate in asked:
        print(measure(topics, rate, seconds), flush=True)
    print(machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
