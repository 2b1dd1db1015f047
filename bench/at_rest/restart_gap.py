"""Longest time without an acknowledgement when an appliance is restarted under load, and a check
that nothing is lost, repeated or reordered.

`python -P -m bench.at_rest.restart_gap [ROUNDS] [KIND]...`, kinds:

    stop       SIGTERM to the supervisor, and a start behind it
    kill       SIGKILL to the supervisor, and a start behind it
    upgrade    the supervisor replaces itself (`tailrace upgrade`)
    rolling    each process in turn (`tailrace restart`)

One producer sends RATE records a second to PARTITIONS partitions, acks=all. The gap is the longest
time between two acknowledgements from just before the restart until the appliance has served for a
second. `start` is the time of the new start alone, which the gap contains.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from bench.measure import paced
from tailrace import Consumer, NewTopic, Producer, TopicPartition
from tailrace.admin.admin import Admin
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

RATE = 1_000
PARTITIONS = 4
KINDS = ("stop", "kill", "upgrade", "rolling")
SETTLE_S = 1.0
TOPIC = "restarts"


class Load:
    """A producer at a constant rate, and the times of its acknowledgements."""

    def __init__(self, address: str) -> None:
        self._producer = Producer(address, acks="all")
        self._stop = threading.Event()
        self.acknowledged_ns: list[int] = []
        self.failures: list[BaseException] = []
        self.sent_count = 0
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        for _ in paced(RATE, 10**9):
            if self._stop.is_set():
                return
            number = self.sent_count
            self._producer.send(
                TOPIC, b"%d" % number, partition=number % PARTITIONS, on_delivery=self._on_delivery
            )
            self.sent_count += 1

    def _on_delivery(self, _metadata: object, error: BaseException | None) -> None:
        if error is None:
            self.acknowledged_ns.append(time.monotonic_ns())
        else:
            self.failures.append(error)

    def await_acknowledgement(self, after_ns: int) -> None:
        """Wait until a record has been acknowledged after that time."""
        while not self.acknowledged_ns or self.acknowledged_ns[-1] < after_ns:
            time.sleep(0.005)

    def longest_gap_ms(self, from_ns: int) -> float:
        """Longest time between two acknowledgements since then."""
        times = list(self.acknowledged_ns)
        first = next((at for at, time_ns in enumerate(times) if time_ns >= from_ns), len(times))
        times = times[max(0, first - 1) :]
        return max(b - a for a, b in itertools.pairwise(times)) / 1e6

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.close()


class Restarts:
    """An appliance on one port, and the ways to restart it."""

    def __init__(self, directory: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._listen = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self._data_dir = f"{directory}/data"
        self.running = self._start()

    def _start(self) -> EmbeddedAppliance:
        return start_embedded(data_dir=self._data_dir, listen=self._listen)

    def stop(self) -> None:
        self.running.stop()
        self.running = self._start()

    def kill(self) -> None:
        os.kill(self.running.pid, signal.SIGKILL)
        self.running.stop()
        self.running = self._start()

    def upgrade(self) -> None:
        from appliance.cli.commands.lifecycle.upgrade import await_serving
        from appliance.cli.options.appliance_control import ask

        list(ask(self._data_dir, {"command": "replace"}))
        await_serving(self._data_dir, self.running.pid)

    def rolling(self) -> None:
        from appliance.cli.options.appliance_control import ask

        list(ask(self._data_dir, {"command": "restart", "processes": []}))


def measure(kind: str, rounds: int) -> dict[str, Any]:
    """Gaps and durations of some restarts, ms."""
    directory = tempfile.mkdtemp(prefix="tailrace-bench-")
    restarts = Restarts(directory)
    try:
        with Admin(restarts.running.address) as admin:
            admin.create_topics(NewTopic(TOPIC, PARTITIONS))
        load = Load(restarts.running.address)
        restart: Callable[[], None] = getattr(restarts, kind)
        gaps, durations = [], []
        try:
            load.await_acknowledgement(0)
            time.sleep(SETTLE_S)
            for _ in range(rounds):
                begun_ns = time.monotonic_ns()
                restart()
                ended_ns = time.monotonic_ns()
                load.await_acknowledgement(ended_ns)
                time.sleep(SETTLE_S)
                gaps.append(load.longest_gap_ms(begun_ns))
                durations.append((ended_ns - begun_ns) / 1e6)
        finally:
            load.close()
        check(restarts.running.address, load)
        return {"kind": kind, "gaps_ms": gaps, "restart_ms": durations, "records": load.sent_count}
    finally:
        restarts.running.stop()
        shutil.rmtree(directory)


def check(address: str, load: Load) -> None:
    """Assert that each record is in the log once, in order."""
    assert not load.failures, load.failures[:3]
    assert len(load.acknowledged_ns) == load.sent_count
    found: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
    with Consumer(bootstrap=address, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(TOPIC, partition) for partition in found])
        while sum(map(len, found.values())) < load.sent_count:
            records = consumer.poll(30_000)
            assert records, f"{sum(map(len, found.values()))} of {load.sent_count} records"
            for record in records:
                found[record.partition].append(int(record.value or b""))
    for partition, numbers in found.items():
        assert numbers == list(range(partition, load.sent_count, PARTITIONS)), partition


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    rounds = next((int(argument) for argument in arguments if argument.isdigit()), 5)
    kinds = [argument for argument in arguments if argument in KINDS] or list(KINDS)
    rows = []
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(
        f"{'restart':<10}{'gap ms, median':>16}{'least':>8}{'most':>8}{'duration':>10}{'lost':>6}"
    )
    for kind in kinds:
        row = measure(kind, rounds)
        gaps = row["gaps_ms"]
        print(
            f"{kind:<10}{statistics.median(gaps):>16.0f}{min(gaps):>8.0f}{max(gaps):>8.0f}"
            f"{statistics.median(row['restart_ms']):>10.0f}{0:>6}",
            flush=True,
        )
        rows.append(row)
    if "--json" in arguments:
        pathlib.Path("restart_gap.json").write_text(json.dumps(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
