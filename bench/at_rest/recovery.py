"""Time from SIGKILL of everything to the first acknowledged record, with a large log: `python -m
bench.at_rest.recovery [GiB] [repetitions]`.

The log is real (written through the appliance, acks=all) and was written a moment before, so most
of it is in the page cache, as after a crash of the appliance alone. The time includes starting the
interpreter of the supervisor.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time

import pyarrow as pa

from bench.measure import machine
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded


def fill(address: str, total_bytes: int) -> None:
    """Write about `total_bytes` to the topic, in batches of about half a MiB."""
    rows = 500
    batch = pa.record_batch({"value": pa.array([os.urandom(1000)] * rows, pa.binary())})
    with Producer(address, acks="all", batch_size=1 << 19) as producer:
        for _ in range(total_bytes // (rows * 1000)):
            producer.send_arrow("big", batch)


def measure_recovery(gib: float, repetitions: int) -> list[float]:
    """Seconds, for each repetition."""
    times = []
    with tempfile.TemporaryDirectory(
        prefix="tailrace-recovery-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as data_dir:
        running = start_embedded(data_dir=data_dir, auto_create_topics=False)
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("big", 1, {"retention.ms": -1})])
        fill(running.address, int(gib * (1 << 30)))
        for _ in range(repetitions):
            with Producer(running.address, acks="all") as producer:
                producer.send("big", b"before").result(60)
            os.kill(running.pid, signal.SIGKILL)
            begun = time.perf_counter()
            running.stop()
            running = start_embedded(data_dir=data_dir, auto_create_topics=False)
            with Producer(running.address, acks="all") as producer:
                producer.send("big", b"after").result(60)
            times.append(time.perf_counter() - begun)
        running.stop()
    return times


def main() -> int:
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 7.0
    repetitions = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    times = measure_recovery(gib, repetitions)
    print(
        f"{gib:g} GiB: SIGKILL of everything to the first acks=all record: median "
        f"{statistics.median(times) * 1000:.0f} ms"
    )
    print(f"{min(times) * 1000:.0f} .. {max(times) * 1000:.0f} ms of {repetitions}; {machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
