"""Idle appliance: CPU and wake-ups a second of each thread, with clients that are connected and
silent.

`python -P -m bench.at_rest.idle [--seconds 30] [--clients 1] [--partitions 1] [--json]`. Wake-ups
count on a busy machine too; what they take in CPU does not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time

import orjson

from bench.at_rest.footprint import SETTLE_S, processes
from bench.measure import machine
from bench.stages.wakeups import Thread, threads_of
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded

QUIET_AFTER_S = 8.0
"""Time until a front has no byte of a new connection left to account for."""


def measure_idle(seconds: float, clients: int, partitions: int) -> list[Thread]:
    """The threads of an appliance with console, and their work in so many seconds."""
    with (
        tempfile.TemporaryDirectory(
            prefix="tailrace-idle-", dir=os.environ.get("TAILRACE_BENCH_DIR")
        ) as directory,
        contextlib.ExitStack() as stack,
    ):
        running = start_embedded(
            data_dir=f"{directory}/data", settings={"http.listen": "127.0.0.1:0"}
        )
        stack.callback(running.stop)
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("idle", partitions)])
        for _ in range(clients):
            producer = stack.enter_context(Producer(running.address, acks="all", linger_ms=0))
            producer.send("idle", b"x").result(60)
            stack.enter_context(Consumer(bootstrap=running.address)).end_offsets([])
        pids = processes(running.pid)
        time.sleep(SETTLE_S + (QUIET_AFTER_S if clients else 0.0))
        before = threads_of(pids)
        time.sleep(seconds)
        after = threads_of(pids)
    for number, thread in after.items():
        if number in before:
            thread.cpu_us -= before[number].cpu_us
            thread.switches -= before[number].switches
    return list(after.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.at_rest.idle")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--json", action="store_true", dest="as_json")
    given = parser.parse_args()
    threads = measure_idle(given.seconds, given.clients, given.partitions)
    percent = sum(thread.cpu_us for thread in threads) / given.seconds / 1e4
    wakes = sum(thread.switches for thread in threads) / given.seconds
    if given.as_json:
        rows = [{"thread": t.name, "cpu_us": t.cpu_us, "switches": t.switches} for t in threads]
        found = {"idle_percent": percent, "wakes_per_s": wakes, "threads": rows}
        sys.stdout.buffer.write(orjson.dumps(found | {"machine": machine()}) + b"\n")
        return 0
    where = machine()
    print(
        f"Idle with {given.clients} silent clients and {given.partitions} partitions, "
        f"{given.seconds:.0f} s, {where['cpu']}, {where['cores']} cores, commit {where['commit']}\n"
        f"  {'':<26} {'wakes/s':>8} {'% of a core':>12}"
    )
    for thread in sorted(threads, key=lambda found: -found.cpu_us):
        if thread.switches:
            share = thread.cpu_us / given.seconds / 1e4
            print(f"  {thread.name:<26} {thread.switches / given.seconds:>8.2f} {share:>12.3f}")
    print(f"  {'together':<26} {wakes:>8.2f} {percent:>12.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
