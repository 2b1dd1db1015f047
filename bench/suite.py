"""`make bench`: the figures of this appliance on this machine, with medians and spread: a table, a
results file, a picture of the table.

Everything goes through the real appliance on a temporary directory of the real disk
(TAILRACE_BENCH_DIR chooses another; durability=disk: every batch is fdatasync'd before consumers
see it). `FULL=1` runs every combination of the matrix, `ONLY=text` what has it in its name,
`REPETITIONS=1` each once. RESULTS names another directory for the files of results, for any bench.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console

from bench import matrix
from bench.at_rest.footprint import measure_footprint
from bench.at_rest.recovery import measure_recovery
from bench.measure import RESULTS, Figure, end_to_end, machine, percentile
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

REPETITIONS = int(os.environ.get("REPETITIONS", "5"))
START_REPETITIONS = 2 * REPETITIONS
LATENCY_RATES = (1_000, 20_000)
"""Records of 1,000 bytes a second, from a producer to a consumer."""
RECOVERY_GIB = 1.0
console = Console(soft_wrap=True, highlight=False, record=True, width=150)
only = os.environ.get("ONLY", "")


def main() -> int:
    """Run everything; returns the exit code."""
    figures: list[Figure] = []
    where = machine()
    console.print(
        f"[bold]Tailrace bench[/bold] on {where['cpu']}, {where['cores']} cores, commit "
        f"{where['commit']}\n"
    )
    console.print(
        f"{'WHAT':<58} {'MEDIAN':>12} {'LEAST':>12} {'MOST':>12}  {'UNIT':<10} CPU s by process",
        style="bold",
    )

    def note(figure: Figure) -> None:
        figures.append(figure)
        spread = f"{min(figure.values):>12,.1f} {max(figure.values):>12,.1f}"
        cpu = " ".join(
            f"{name} {seconds:.2f}"
            for name, seconds in figure.cpu_seconds.items()
            if seconds >= 0.005
        )
        console.print(
            f"{figure.name:<58} {figure.median:>12,.1f} {spread}  {figure.unit:<10} {cpu}"
        )

    for part in (start_up, throughput, reading, ack_latency, round_trip_latency, recovery):
        for figure in part():
            note(figure)
    if only:
        return 0  # a look at some of them is no result to keep
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{where['date']}-{where['commit']}.json"
    path.write_text(
        json.dumps(
            {"command": "make bench", "machine": where, "figures": [f.row() for f in figures]},
            indent=1,
        )
        + "\n"
    )
    console.save_svg(str(path.with_suffix(".svg")), title="make bench")
    console.print(
        f"\nwritten to {path.relative_to(RESULTS.parent.parent)}, drawn in "
        f"{path.with_suffix('.svg').name}"
    )
    return 0


@contextmanager
def appliance() -> Iterator[tuple[EmbeddedAppliance, str]]:
    """A fresh one, and its data directory."""
    with tempfile.TemporaryDirectory(
        prefix="tailrace-bench-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        data_dir = os.path.join(directory, "data")
        running = start_embedded(
            data_dir=data_dir, settings={"ring_bytes": 64 << 20}, auto_create_topics=False
        )
        try:
            yield running, data_dir
        finally:
            running.stop()


def rates(name: str, once: Callable[[], matrix.Run]) -> Figure:
    """Repetitions of one case; costs are those of the repetition nearest the median."""
    runs = [once() for _ in range(REPETITIONS)]
    middle = statistics.median(run.rate for run in runs)
    typical = min(runs, key=lambda run: abs(run.rate - middle))
    return Figure(
        name, "records/s", tuple(run.rate for run in runs), typical.cpu_seconds, typical.switches
    )


def throughput() -> Iterator[Figure]:
    """The matrix of producing; a fresh appliance for each case, so that none pays for another's
    files.
    """
    for case in matrix.cases(full=bool(os.environ.get("FULL"))):
        if only in case.name:
            with appliance() as (running, _):
                yield rates(case.name, partial(_produce, running, case))


def _produce(running: EmbeddedAppliance, case: matrix.Case) -> matrix.Run:
    return matrix.produce(running.address, running.pid, f"t-{time.monotonic_ns()}", case)


def reading() -> Iterator[Figure]:
    """Read what was written a moment before, and what has to come from the disk."""
    for size in matrix.SIZES:
        wanted = [(how, cold) for how in ("Record objects", "Arrow") for cold in (False, True)]
        wanted = [
            (how, cold)
            for how, cold in wanted
            if only in f"consume {size:,} B as {how}{', cold' if cold else ''}"
        ]
        if not wanted:
            continue
        with appliance() as (running, data_dir):
            count = matrix.fill(running.address, "t", size)
            for how, cold in wanted:
                once = partial(_consume, running, count, how == "Arrow", cold, f"{data_dir}/t-0")
                yield rates(f"consume {size:,} B as {how}{', cold' if cold else ''}", once)


def _consume(
    running: EmbeddedAppliance, count: int, arrow: bool, cold: bool, directory: str
) -> matrix.Run:
    if cold:
        matrix.drop_from_page_cache(directory)
    return matrix.consume(running.address, running.pid, "t", count, arrow=arrow)


def round_trip_latency() -> Iterator[Figure]:
    """From when a record should have been sent until a consumer has it, at fixed rates."""
    for rate in LATENCY_RATES:
        name = f"end to end, 1,000 B at {rate:,}/s"
        if only not in name:
            continue
        with appliance() as (running, _):
            found = [
                end_to_end(running.address, f"e{number}", rate) for number in range(REPETITIONS)
            ]
        for share, label in ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9")):
            yield Figure(
                f"{name}, {label}", "ms", tuple(percentile(times, share) for times in found)
            )


def recovery() -> Iterator[Figure]:
    """SIGKILL of everything to the first acknowledged record."""
    name = f"SIGKILL of everything to first ack, {RECOVERY_GIB:g} GiB of log"
    if only in name:
        yield Figure(
            name,
            "ms",
            tuple(seconds * 1000 for seconds in measure_recovery(RECOVERY_GIB, REPETITIONS)),
        )


def start_up() -> list[Figure]:
    """From starting the process to the first acknowledged record, and the memory of all processes
    when idle.
    """
    if only not in "start to ready, start to first record, PSS":
        return []
    found = [measure_footprint() for _ in range(START_REPETITIONS)]
    return [
        Figure("start to ready", "ms", tuple(one.ready_ms for one in found)),
        Figure(
            "start to first record acknowledged (acks=all)",
            "ms",
            tuple(one.first_ack_ms for one in found),
        ),
        Figure(
            "PSS of all processes, idle, without shared memory",
            "MB",
            tuple(one.pss_mb for one in found),
        ),
    ]


def ack_latency() -> Iterator[Figure]:
    """One record of 100 bytes at a time, waiting for each."""
    payload = os.urandom(100)
    for acks in (1, "all"):
        if only not in f"ack of one record, acks={acks}":
            continue
        halves: list[float] = []
        tails: list[float] = []
        with appliance() as (running, _):
            for repetition in range(REPETITIONS):
                name = f"latency-{repetition}"
                with Admin(running.address) as admin:
                    admin.create_topics([NewTopic(name)])
                with Producer(running.address, acks=acks) as producer:
                    for _ in range(100):
                        producer.send(name, payload).result(10)
                    times = []
                    for _ in range(1000):
                        begin = time.perf_counter()
                        producer.send(name, payload).result(10)
                        times.append((time.perf_counter() - begin) * 1e6)
                halves.append(percentile(times, 0.5))
                tails.append(percentile(times, 0.99))
        yield Figure(f"ack of one record, acks={acks}, p50", "us", tuple(halves))
        yield Figure(f"ack of one record, acks={acks}, p99", "us", tuple(tails))


if __name__ == "__main__":
    sys.exit(main())
