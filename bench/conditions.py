"""Conditions of a run: memory that the machine has given before, how busy others kept it, which
kernel ran, which commit.

A fresh virtual machine gets its memory page by page, and each first touch costs more than the work
of a broker on that page. Contenders that reuse little (a Java heap) lose by it what others do not;
so it is paid before anything is measured, and the run's file says so.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import psutil

from bench.measure import machine
from tailrace import kernel

TOUCHED_SHARE = 0.7
LEFT_BYTES = 2 << 30
"""Never less than this stays available, nor less than an eighth of all memory."""
PIECE = b"\x5a" * (1 << 20)
SHM = "/dev/shm"


def bytes_to_touch(available: int, total: int, shm_free: int, group_free: int | None) -> int:
    """The number of bytes that may be written: 70 % of what is available, within what /dev/shm
    holds and what a container allows.
    """
    bound = min(available - max(LEFT_BYTES, total // 8), shm_free - (256 << 20))
    if group_free is not None:
        bound = min(bound, group_free - LEFT_BYTES)
    return max(0, min(int(TOUCHED_SHARE * available), bound))


def touch_memory() -> str:
    """Write and remove a file in /dev/shm; returns a sentence. TOUCH=0 leaves it out. The file has
    no name: a run that is killed leaves nothing.
    """
    if os.environ.get("TOUCH") == "0":
        return "memory was not touched before (TOUCH=0)"
    memory, shm = psutil.virtual_memory(), os.statvfs(SHM)
    wanted = bytes_to_touch(
        memory.available, memory.total, shm.f_bavail * shm.f_frsize, _group_free()
    )
    begun, written = time.perf_counter(), 0
    with tempfile.TemporaryFile(dir=SHM, buffering=0) as file:
        try:
            while written < wanted:
                written += file.write(PIECE)
                if not written % (512 << 20) and psutil.virtual_memory().available < max(
                    LEFT_BYTES, memory.total // 8
                ):
                    break  # others have come
        except OSError as error:
            return (
                f"memory touched before: {written / 1e9:.1f} GB of {wanted / 1e9:.1f} "
                f"({error.strerror})"
            )
    seconds = time.perf_counter() - begun
    return (
        f"memory touched before: {written / 1e9:.1f} GB ({written / memory.total:.0%} of all) "
        f"written and removed in {SHM}, {seconds:.0f} s"
    )


def _group_free() -> int | None:
    """Bytes that the memory limit of our control group leaves, None without a limit."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            return None if limit == "max" else int(limit) - int(file.read())
    except (OSError, ValueError):
        return None


class Conditions:
    """From construction to `report()`: the machine, how busy it was before, and what the host took
    meanwhile.
    """

    def __init__(self) -> None:
        self.load_before = os.getloadavg()[0]
        self._times, self._begun = psutil.cpu_times(), time.monotonic()
        self.memory = touch_memory()

    def sentence(self) -> str:
        """For the head of the output."""
        busy = (
            ": not a quiet machine, times by the clock mean little"
            if self.load_before > 0.5 * (os.cpu_count() or 1)
            else ""
        )
        return f"{self.memory}; load before {self.load_before:.2f}{busy}; kernel {kernel.KIND}"

    def report(self) -> dict[str, Any]:
        """For the results file."""
        now = psutil.cpu_times()
        every = sum(now) - sum(self._times)
        return {
            **machine(), "memory_touched": self.memory, "load_before": round(self.load_before, 2),
            "kernel_of_clients": kernel.KIND,
            "stolen_by_host": round((now.steal - self._times.steal) / every, 4) if every else 0.0,
            "seconds": round(time.monotonic() - self._begun),
        }  # fmt: skip
