"""Work of benches with a DataFrame, and its costs: seconds, and processor time of all who take
part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psutil

AGGREGATES = ("sum(octet_length(key))", "sum(octet_length(value))", "max(offset)")


class Took(NamedTuple):
    """Costs of one run."""

    seconds: float
    cpu_seconds: float


def noop(frame: Any) -> None:
    """All rows to nowhere."""
    frame.write.format("noop").mode("overwrite").save()


def aggregate(frame: Any) -> None:
    """Three columns to three numbers."""
    frame.selectExpr(*AGGREGATES).collect()


def jvm(spark: Any) -> int:
    """The process of a local session's JVM: its Python processes are children of it."""
    return int(spark.sparkContext._gateway.proc.pid)


def timed(work: Callable[[], Any], roots: Sequence[int]) -> Took:
    """`roots`: the processes that take part, with all that they started."""
    begun, begun_cpu = time.perf_counter(), _cpu_seconds(roots)
    work()
    return Took(time.perf_counter() - begun, _cpu_seconds(roots) - begun_cpu)


def _cpu_seconds(roots: Sequence[int]) -> float:
    total = 0.0
    for root in roots:
        for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
            try:
                total += sum(
                    process.cpu_times()[:4]
                )  # user, system, and those of children that have ended
            except psutil.NoSuchProcess:
                continue
    return total
