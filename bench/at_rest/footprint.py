"""Costs of an appliance before it does anything: the time from its start to the first acknowledged
record, its memory, its CPU while it waits.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import NamedTuple

import psutil

from bench.measure import private_memory_mb
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded

SETTLE_S = 2.0


class Footprint(NamedTuple):
    """Figures of one start, on a directory that has a topic."""

    ready_ms: float
    first_ack_ms: float
    """Time to the first record with acks=all."""
    pss_mb: float
    """PSS of all processes, without shared memory."""
    idle_percent: float
    """CPU in percent of one core, all processes; 0 when it was not asked for."""


def processes(pid: int) -> list[int]:
    """The supervisor and what it started."""
    return [pid, *(child.pid for child in psutil.Process(pid).children())]


def cpu_seconds(pids: list[int]) -> float:
    """CPU of all threads of these processes."""
    nanoseconds = 0
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                nanoseconds += int(file.read().split()[0])
    return nanoseconds / 1e9


def idle_percent(pids: list[int], seconds: float) -> float:
    """CPU while idle, in percent of one core."""
    before, begun = cpu_seconds(pids), time.perf_counter()
    time.sleep(seconds)
    return (cpu_seconds(pids) - before) / (time.perf_counter() - begun) * 100


def measure_footprint(idle_s: float = 0.0) -> Footprint:
    """One start."""
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        data_dir = os.path.join(directory, "data")
        prepared = start_embedded(data_dir=data_dir)
        with Admin(prepared.address) as admin:
            admin.create_topics([NewTopic("first")])
        prepared.stop()
        begun = time.perf_counter()
        running = start_embedded(data_dir=data_dir, settings={"ring_bytes": 64 << 20})
        try:
            ready_ms = (time.perf_counter() - begun) * 1000
            with Producer(running.address, acks="all", linger_ms=0) as producer:
                producer.send("first", b"x").result(10)
                first_ms = (time.perf_counter() - begun) * 1000
            pids = processes(running.pid)
            memory = private_memory_mb(pids)[0]
            if idle_s:
                time.sleep(SETTLE_S)
            return Footprint(
                ready_ms, first_ms, memory, idle_percent(pids, idle_s) if idle_s else 0.0
            )
        finally:
            running.stop()
