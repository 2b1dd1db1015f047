"""Repetition, medians, spread, and the machine they were measured on."""

from __future__ import annotations

import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from tailrace import Admin, Consumer, NewTopic

RESULTS = pathlib.Path(os.environ.get("RESULTS") or pathlib.Path(__file__).parent / "results")
"""Directory of the files of results."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured thing: the median of its repetitions, the least and the most."""

    name: str
    unit: str
    values: tuple[float, ...]
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    switches: dict[str, int] = field(default_factory=dict)
    """Context switches of each process, in the repetition nearest the median; where that was
    measured.
    """

    @property
    def median(self) -> float:
        """Median of the repetitions."""
        return statistics.median(self.values)

    def row(self) -> dict[str, Any]:
        """For the results file."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": list(self.values),
            **(
                {"cpu_seconds": self.cpu_seconds, "context_switches": self.switches}
                if self.cpu_seconds
                else {}
            ),
        }


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the sorted values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> dict[str, Any]:
    """Description of the machine that the figures belong to."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next(
            (line.split(":", 1)[1].strip() for line in file if line.startswith("model name")),
            "unknown",
        )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return {
        "cpu": model, "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1), "kernel": platform.release(),
        "python": platform.python_version(), "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        **({"uncommitted_changes": True} if changed.strip() else {}),
    }  # fmt: skip


def private_memory_mb(pids: list[int]) -> tuple[float, float]:
    """(PSS without shared memory, PSS of shared memory) of these processes together, MB (10^6
    bytes).
    """
    total = shared = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            fields = {
                line.split(":")[0]: int(line.split()[1]) for line in file if line.endswith("kB\n")
            }
        total += fields["Pss"]
        shared += fields.get("Pss_Shmem", 0)
    return (total - shared) * 1024 / 1e6, shared * 1024 / 1e6


def paced(rate: int, count: int) -> Iterator[int]:
    """Yield the time at which each of `count` records, `rate` a second, is due, by the clock of
    `time.perf_counter_ns`; not before it is. Late ones follow at once.
    """
    begun = time.perf_counter_ns()
    for number in range(count):
        due = begun + number * 1_000_000_000 // rate
        while (wait := due - time.perf_counter_ns()) > 0:
            time.sleep(wait / 1e9)
        yield due


def end_to_end(
    address: str, topic: str, rate: int, seconds: float = 5.0, size: int = 1000
) -> list[float]:
    """Milliseconds from when each record should have been sent, `rate` a second, until a consumer
    has it. The producer is a process of its own; the first tenth, in which buffers grow, is left
    out.
    """
    count = int(rate * seconds)
    with Admin(address) as admin:
        admin.create_topics([NewTopic(topic)])
    with Consumer(
        topic, bootstrap=address, auto_offset_reset="earliest", max_poll_records=10_000
    ) as consumer:
        consumer.poll(0)
        command = [
            sys.executable, "-P", "-m", "bench.paced_sender", address, topic, str(rate), str(count),
            str(size),
        ]  # fmt: skip
        sender = subprocess.Popen(command)
        times: list[float] = []
        while len(times) < count:
            records = consumer.poll(20_000)
            now_ns = time.perf_counter_ns()  # CLOCK_MONOTONIC: the same in both processes
            times += [
                (now_ns - int.from_bytes(record.value[:8], "big")) / 1e6 for record in records
            ]
            if not records:
                raise RuntimeError(f"only {len(times)} of {count} records came")
        sender.wait()
    return times[count // 10 :]
