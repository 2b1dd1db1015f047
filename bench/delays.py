"""Costs of delayed delivery: `make bench-delays [PENDING=10000000]`. A table and a results file.

1. Scheduling: records a second through `send_arrow` and `send`, due over the next 30 days, up to
   PENDING of them; cancelling.
2. Memory of the scheduler with a tenth of them pending and with all; how long a killed appliance
   takes to its first ack with all of them on the disk.
3. Lateness, 10,000 deliveries a second (from memory, and from bucket files), and five a second
   beside nothing else, at random moments: from the due time until a consumer has the record, by the
   wall clock.
4. A million records due in the same tick: how long until all are consumed, and what a producer's
   acknowledgements take meanwhile.
5. Redis's sorted set, polled every 10 ms, and RabbitMQ's dead letters, doing part 3, where they can
   be had.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from bench.measure import RESULTS, machine, percentile, private_memory_mb
from bench.peers.servers import Missing
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

PENDING = int(os.environ.get("PENDING", "10000000"))
SPREAD_S = 30 * 86_400
BATCH_ROWS = 10_000
RATE = 10_000
RATE_SECONDS = int(os.environ.get("SECONDS", "10"))
FAR_S = 25
"""So far ahead records are in bucket files before they are due."""
BURST = int(os.environ.get("BURST", "1000000"))
REPETITIONS = int(os.environ.get("REPETITIONS", "5"))


def report(name: str, unit: str, values: list[float], found: list[dict[str, Any]]) -> None:
    """Print the median, minimum and maximum of `values`, and add them to `found`."""
    median = statistics.median(values)
    print(
        f"{name:<74} {median:>12,.1f} {min(values):>12,.1f} {max(values):>12,.1f}  {unit}",
        flush=True,
    )
    found.append(
        {
            "name": name,
            "unit": unit,
            "median": median,
            "min": min(values),
            "max": max(values),
            "values": values,
        }
    )


def scheduler_memory_mb(running: EmbeddedAppliance) -> float:
    """Private memory of the scheduler alone."""
    pids = [
        child.pid
        for child in psutil.Process(running.pid).children()
        if child.name().startswith("tr-scheduler")
    ]
    return private_memory_mb(pids)[0]


def pending(admin: Admin, topic: str) -> int:
    """Count the pending delayed records of `topic`."""
    return sum(int(d["pending"]) for d in admin.describe_delays() if d["topic"] == topic)


def wait_for_pending(admin: Admin, topic: str, count: int) -> None:
    """Until the scheduler has seen that many and has nothing left to save."""
    while True:
        mine = [d for d in admin.describe_delays() if d["topic"] == topic]
        if sum(d["pending"] for d in mine) >= count and all(
            d["cursor"] == d["saved_cursor"] for d in mine
        ):
            return
        time.sleep(0.5)


def schedule(address: str, topic: str, count: int) -> float:
    """Rows a second through `send_arrow`, due over the next month; until all are acknowledged."""
    values = pa.array([os.urandom(100)] * BATCH_ROWS, pa.binary())
    rng = np.random.default_rng(1)
    begun = time.perf_counter()
    with Producer(address, acks=1, batch_size=4 << 20) as producer:
        for _ in range(count // BATCH_ROWS):
            after = pa.array(
                rng.integers(60_000_000, SPREAD_S * 1_000_000, BATCH_ROWS), pa.duration("us")
            )
            producer.send_arrow(
                topic, pa.table({"value": values, "after": after}), delay_column="after"
            )
        producer.flush()
    return count / (time.perf_counter() - begun)


def schedule_by_send(address: str, topic: str, count: int) -> float:
    """Records per second through `send`, due from 31 days ahead on; until all are acknowledged."""
    payload, base = os.urandom(100), dt.datetime.now(dt.UTC) + dt.timedelta(days=31)
    begun = time.perf_counter()
    with Producer(address, acks=1) as producer:
        for number in range(count):
            producer.send(topic, payload, deliver_at=base + dt.timedelta(milliseconds=number))
        producer.flush()
    return count / (time.perf_counter() - begun)


def _measure_pending(running: EmbeddedAppliance, found: list[dict[str, Any]]) -> None:
    """Schedule PENDING records, and cancel some of them."""
    with Admin(running.address, request_timeout_ms=60_000) as admin:
        admin.create_topics(
            [
                NewTopic("far", 1, {"delay.enabled": True}),
                NewTopic("one", 1),
                NewTopic("sends", 1, {"delay.enabled": True}),
            ]
        )
        tenth = PENDING // 10
        rates = [schedule(running.address, "far", tenth)]
        wait_for_pending(admin, "far", tenth)
        memory = [scheduler_memory_mb(running)]
        for _ in range(9):
            rates.append(schedule(running.address, "far", tenth))
        report("schedule 100 B by send_arrow, acks=1", "records/s", rates, found)
        begun = time.perf_counter()
        wait_for_pending(admin, "far", tenth * 10)
        report(
            "until the last of them is in its bucket file",
            "s",
            [time.perf_counter() - begun],
            found,
        )
        memory.append(scheduler_memory_mb(running))
        report(f"memory of the scheduler, {tenth:,} pending", "MB", memory[:1], found)
        report(f"memory of the scheduler, {tenth * 10:,} pending", "MB", memory[1:], found)
        report(
            "schedule 100 B by send",
            "records/s",
            [schedule_by_send(running.address, "sends", 200_000) for _ in range(REPETITIONS)],
            found,
        )
        ids = [
            delay.delay_id
            for _, delay in zip(range(10_000), admin.list_delays("far"), strict=False)
        ]
        begun = time.perf_counter()
        refused = [error for error in admin.cancel_delays(ids).values() if error is not None]
        assert not refused, refused[:1]
        report(
            "cancel, 2,000 in a request",
            "records/s",
            [len(ids) / (time.perf_counter() - begun)],
            found,
        )


def part_scheduling(found: list[dict[str, Any]]) -> None:
    """Parts 1 and 2."""
    with tempfile.TemporaryDirectory(
        prefix="tailrace-delays-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        running = start_embedded(data_dir=f"{directory}/data", auto_create_topics=False)
        _measure_pending(running, found)
        os.kill(running.pid, signal.SIGKILL)
        running.stop()
        begun = time.perf_counter()
        running = start_embedded(data_dir=f"{directory}/data", auto_create_topics=False)
        with Producer(running.address, acks="all") as producer:
            producer.send("one", b"x").result(60)
            report(
                f"SIGKILL with {PENDING // 10 * 10:,} pending: start to first acks=all",
                "ms",
                [(time.perf_counter() - begun) * 1000],
                found,
            )
        running.stop()


def lateness(
    address: str, topic: str, rate: int, seconds: float, ahead_s: float = 2
) -> list[float]:
    """Milliseconds behind its due time at which a consumer has each record; `rate` a second,
    scheduled `ahead_s` before the first.
    """
    count = int(rate * seconds)
    times: list[float] = []
    with Consumer(
        topic, bootstrap=address, auto_offset_reset="latest", max_poll_records=10_000
    ) as consumer:
        consumer.poll(0)
        begin_us = time.time_ns() // 1000 + int(ahead_s * 1e6)
        dues = begin_us + np.sort(np.random.default_rng(1).integers(0, int(seconds * 1e6), count))
        with Producer(address, acks=1) as producer:
            table = pa.table({
                "value": pa.array([int(due).to_bytes(8, "big") for due in dues]),
                "due": pa.array(dues).cast(pa.timestamp("us", "UTC")),
            })  # fmt: skip
            producer.send_arrow(topic, table, delay_column="due").result(30)
        while len(times) < count:
            records = consumer.poll(60_000)
            now_us = time.time_ns() // 1000
            if not records:
                raise RuntimeError(f"only {len(times)} of {count} came")
            times += [
                (now_us - int.from_bytes(record.value[:8], "big")) / 1000 for record in records
            ]
    assert min(times) >= 0, f"{-min(times)} ms early"
    return times


def part_lateness(found: list[dict[str, Any]]) -> None:
    """Parts 3 and 4."""
    with tempfile.TemporaryDirectory(
        prefix="tailrace-delays-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        running = start_embedded(data_dir=f"{directory}/data", auto_create_topics=False)
        with Admin(running.address) as admin:
            admin.create_topics(
                [NewTopic(name, 1, {"delay.enabled": True}) for name in ("busy", "idle", "burst")]
                + [NewTopic("live", 1)]
            )
        for name, rate, seconds, ahead_s in (
            (f"{RATE:,} a second", RATE, RATE_SECONDS, 2),
            (f"{RATE:,} a second from files", RATE, RATE_SECONDS, FAR_S),
            ("5 a second", 5, 2 * RATE_SECONDS, 2),
        ):  # fmt: skip
            runs = [
                lateness(
                    running.address, "busy" if rate == RATE else "idle", rate, seconds, ahead_s
                )
                for _ in range(REPETITIONS)
            ]
            for share in (0.5, 0.99, 0.999):
                report(
                    f"lateness at {name}, p{share * 100:g}",
                    "ms",
                    [percentile(run, share) for run in runs],
                    found,
                )
        part_burst(running, found)
        running.stop()


def part_burst(running: EmbeddedAppliance, found: list[dict[str, Any]]) -> None:
    """Part 4."""
    due = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=20)
    values = pa.array([os.urandom(100)] * BATCH_ROWS, pa.binary())
    with Producer(running.address, acks=1, batch_size=4 << 20) as producer:
        for _ in range(BURST // BATCH_ROWS):
            producer.send_arrow("burst", pa.table({"value": values}), deliver_at=due)
        producer.flush()
    seen: list[float] = []

    def consume() -> None:
        count = 0
        with Consumer("burst", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
            while count < BURST:
                count += sum(len(batch) for batch in consumer.poll_arrow(30_000))
        seen.append(time.time() - due.timestamp())

    acks: dict[str, list[float]] = {"before": [], "during": []}
    with Producer(running.address, acks=1, linger_ms=0) as producer:
        while time.time() < due.timestamp() - 5:
            time.sleep(0.1)
        consumer = threading.Thread(target=consume)
        consumer.start()
        while consumer.is_alive():
            begun = time.perf_counter()
            producer.send("live", b"x" * 100).result(30)
            acks["before" if time.time() < due.timestamp() else "during"].append(
                (time.perf_counter() - begun) * 1000
            )
            time.sleep(0.005)
        consumer.join()
    report(f"{BURST:,} due in one tick: until all are consumed", "s", seen, found)
    for when, times in acks.items():
        report(
            f"acks=1 of a live producer {when} the burst, p50",
            "ms",
            [percentile(times, 0.5)],
            found,
        )
        report(
            f"acks=1 of a live producer {when} the burst, p99",
            "ms",
            [percentile(times, 0.99)],
            found,
        )


def part_peers(found: list[dict[str, Any]]) -> None:
    """Part 5."""
    from bench.peers.delayed import rabbitmq_lateness, redis_lateness

    for name, once in (
        ("Redis sorted set polled every 10 ms", redis_lateness),
        ("RabbitMQ dead letters by TTL", rabbitmq_lateness),
    ):
        try:
            times, memory_mb = once(RATE, RATE_SECONDS)
        except Missing as missing:
            print(f"{name}: {missing}")
            continue
        for share in (0.5, 0.99, 0.999):
            report(
                f"{name}: lateness at {RATE:,} a second, p{share * 100:g}",
                "ms",
                [percentile(times, share)],
                found,
            )
        report(f"{name}: memory of the server", "MB", [memory_mb], found)


def main() -> int:
    where = machine()
    print(f"Delayed delivery on {where['cpu']}, {where['cores']} cores, commit {where['commit']}\n")
    print(f"{'WHAT':<74} {'MEDIAN':>12} {'LEAST':>12} {'MOST':>12}")
    found: list[dict[str, Any]] = []
    part_lateness(found)
    part_scheduling(found)
    part_peers(found)
    path = RESULTS / f"delays-{where['date']}-{where['commit']}.json"
    path.write_text(
        json.dumps(
            {"command": f"PENDING={PENDING} make bench-delays", "machine": where, "figures": found},
            indent=1,
        )
        + "\n"
    )
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
