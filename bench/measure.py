"""Repetition, medians, spread, and the machine they were measured on."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured thing: the median of its repetitions, the least and the most."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": list(self.values),
        }


def repeat(name: str, unit: str, repetitions: int, once: Callable[[], float]) -> Figure:
    """Measure `repetitions` times."""
    return Figure(name, unit, tuple(once() for _ in range(repetitions)))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the sorted values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": model, "cores": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1), "kernel": platform.release(),
        "python": platform.python_version(), "commit": commit or "unknown", "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def private_memory_mb(pids: list[int]) -> tuple[float, float]:
    """(PSS without shared memory, PSS of shared memory) of these processes together, MB (10^6 bytes)."""
    total = shared = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            fields = {line.split(":")[0]: int(line.split()[1]) for line in file if line.endswith("kB\n")}
        total += fields["Pss"]
        shared += fields.get("Pss_Shmem", 0)
    return (total - shared) * 1024 / 1e6, shared * 1024 / 1e6
