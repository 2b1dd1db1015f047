"""`make bench-transactions [ROUNDS=3] [ONLY=commits,ids]`: what transactions cost, each figure
beside the same work without them. Under ten minutes with three rounds.

    produce     send() of 100 B in transactions of 100 ms over 8 partitions / without
    latency     one record: commit_transaction(), begin to committed, begin to visible
    commits     commits a second of 50 producers in threads of a process, of 100 in four processes
    transform   consume, transform, produce: exactly once / at least once
    read        read_committed / read_uncommitted of a log with 10 % of its batches aborted
    ids         10,000 open ids, and a million used once: start, memory, disk, acks of others
    unused      an appliance that never had a transaction: processes, files

Rounds are interleaved: the two sides of a ratio take turns, each round begins with the other one.
A ratio is made in each round, of two figures that met the same machine. What is stated is the
median, with least and most. Results go to bench/results.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import psutil

from bench.at_rest.footprint import processes as pids_of
from bench.conditions import Conditions
from bench.measure import RESULTS, percentile
from bench.peers.servers import in_child
from bench.transactional import transactional_ids as ids
from bench.transactional import transactional_work as work
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded

ROUNDS = int(os.environ.get("ROUNDS", "3"))
SECONDS = float(os.environ.get("SECONDS", "3"))
COMMITS = int(os.environ.get("COMMITS", "500"))
TRANSFORMED = int(os.environ.get("TRANSFORMED", "100000"))
BATCHES = int(os.environ.get("BATCHES", "600"))
USED_ONCE = int(os.environ.get("USED_ONCE", "1000000"))
START_S = 3.0
"""Time that clients of several processes have to connect before they begin together."""


class Goal(NamedTuple):
    """A bound of a figure. `is_least`: more is better."""

    bound: float
    is_least: bool = False


class Report:
    """Figures of all rounds, by name."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.units: dict[str, str] = {}
        self.goals: dict[str, Goal] = {}

    def add(self, name: str, unit: str, value: float, goal: Goal | None = None) -> None:
        """Add a round's value."""
        self.values.setdefault(name, []).append(value)
        self.units[name] = unit
        if goal is not None:
            self.goals[name] = goal

    def show(self, names: list[str]) -> None:
        for name in names:
            each, goal = self.values[name], self.goals.get(name)
            value = statistics.median(each)
            figures = " ".join(f"{one:>11,.2f}" for one in (value, min(each), max(each)))
            line = f"  {name:<64} {figures}  {self.units[name]:<10}"
            if goal is not None:
                relation = ">=" if goal.is_least else "<="
                verdict = "met" if self.is_met(name) else "MISSED"
                line += f" goal {relation} {goal.bound:g}: {verdict}"
            print(line.rstrip(), flush=True)

    def is_met(self, name: str) -> bool:
        goal, value = self.goals[name], statistics.median(self.values[name])
        return value >= goal.bound if goal.is_least else value <= goal.bound

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name, "unit": self.units[name], "median": statistics.median(each),
                "min": min(each), "max": max(each), "values": each,
                **(
                    {"goal": goal.bound, "more_is_better": goal.is_least, "met": self.is_met(name)}
                    if (goal := self.goals.get(name)) is not None
                    else {}
                ),
            }
            for name, each in self.values.items()
        ]  # fmt: skip


@contextmanager
def appliance() -> Iterator[EmbeddedAppliance]:
    """One of its own, on the directory of temporary files or TAILRACE_BENCH_DIR."""
    with tempfile.TemporaryDirectory(
        prefix="tailrace-transactions-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        running = start_embedded(data_dir=f"{directory}/data", auto_create_topics=False)
        try:
            yield running
        finally:
            running.stop()


def topic(address: str, name: str, partitions: int = work.PARTITIONS) -> str:
    with Admin(address) as admin:
        admin.create_topics([NewTopic(name, partitions)])
    return name


def in_turn(number: int, *sides: Callable[[], Any]) -> list[Any]:
    """The results of all sides, in their order. Each round begins with another one."""
    found: list[Any] = [None] * len(sides)
    for index in range(len(sides)):
        side = (index + number) % len(sides)
        found[side] = sides[side]()
    return found


# ---- parts ---------------------------------------------------------------------------------------


def part_produce(report: Report) -> None:
    with appliance() as running:
        name = topic(running.address, "produce")
        take = partial(in_child, work.produce, running.address, name, 100, SECONDS)
        for number in range(ROUNDS):
            plain, inside = in_turn(number, partial(take, False), partial(take, True))
            report.add("send() 100 B, acks=all, without transactions", "records/s", plain)
            report.add("the same in transactions of 100 ms over 8 partitions", "records/s", inside)
            report.add("in transactions / without", "x", inside / plain, Goal(0.95, is_least=True))


LATENCY_GOALS = {"commit": (2.5, 6), "begin to committed": (4, 10), "begin to visible": (5, 12)}


def part_latency(report: Report) -> None:
    with appliance() as running:
        name = topic(running.address, "latency")
        for _ in range(ROUNDS):
            times = in_child(work.commit_times, running.address, name, COMMITS)
            times["begin to visible"] = in_child(work.visible_times, running.address, name, COMMITS)
            for label, each in times.items():
                for share, bound in zip((0.5, 0.99), LATENCY_GOALS[label], strict=True):
                    report.add(
                        f"one record, synced: {label}, p{share * 100:.0f}",
                        "ms", percentile(each, share), Goal(bound),
                    )  # fmt: skip


def part_commits(report: Report) -> None:
    with appliance() as running:
        name = topic(running.address, "commits")
        servers = pids_of(running.pid)
        for _ in range(ROUNDS):
            for processes, threads, bound in ((1, 50, 5_000), (4, 25, 10_000)):
                rate, client, server = ids.commits_together(
                    running.address, name, processes, threads, SECONDS, START_S, servers
                )
                of = f"{processes * threads} producers in threads of {processes} process"
                of += "es" if processes > 1 else ""
                report.add(f"{of}: commits", "1/s", rate, Goal(bound, is_least=True))
                report.add(f"{of}: CPU of a commit, clients", "us", client)
                report.add(f"{of}: CPU of a commit, appliance", "us", server)


def part_transform(report: Report) -> None:
    with appliance() as running:
        source = topic(running.address, "source")
        in_child(work.fill, running.address, source, 1_000, TRANSFORMED)
        target = topic(running.address, "target")
        take = partial(in_child, work.transform, running.address, source, target, TRANSFORMED)
        for number in range(ROUNDS):
            plain, exact = in_turn(number, partial(take, False), partial(take, True))
            report.add("transform 1,000 B, commits at least once", "records/s", plain)
            report.add("transform 1,000 B, exactly once, 100 ms", "records/s", exact)
            report.add("exactly / at least once", "x", exact / plain, Goal(0.9, is_least=True))


def part_read(report: Report) -> None:
    with appliance() as running:
        name = topic(running.address, "read")
        rows = 500
        committed = in_child(work.write_with_aborts, running.address, name, BATCHES, rows, 10)
        fronts = [
            child.pid
            for child in psutil.Process(running.pid).children()
            if child.name().startswith("tr-front")
        ]

        def take(isolation: str, records: int) -> dict[str, float]:
            found: dict[str, float] = in_child(
                work.read_all, running.address, name, isolation, records, fronts
            )
            return found

        for number in range(ROUNDS):
            all_of_them, committed_ones = in_turn(
                number,
                partial(take, "read_uncommitted", BATCHES * rows),
                partial(take, "read_committed", committed),
            )
            for unit in ("records/s", "client ns", "front ns"):
                label = "rate" if unit == "records/s" else f"CPU of a record, {unit[:-3]}"
                unit_shown = unit if unit == "records/s" else "ns"
                report.add(f"read_uncommitted: {label}", unit_shown, all_of_them[unit])
                report.add(f"read_committed: {label}", unit_shown, committed_ones[unit])
            report.add(
                "read_committed / read_uncommitted, a delivered record, rate", "x",
                committed_ones["records/s"] / all_of_them["records/s"],
                Goal(0.97, is_least=True),
            )  # fmt: skip
            report.add(
                "read_uncommitted / read_committed, a delivered record, CPU", "x",
                all_of_them["both ns"] / committed_ones["both ns"], Goal(0.97, is_least=True),
            )  # fmt: skip


def part_ids(report: Report) -> None:
    """Once: a million ids are the same in each round."""
    for name, unit, value, bound in ids.measure(10_000, USED_ONCE, max(3, ROUNDS)):
        report.add(name, unit, value, None if bound is None else Goal(bound))


def part_unused(report: Report) -> None:
    for name, unit, value in ids.measure_unused():
        report.add(name, unit, value, Goal(0))


PARTS: dict[str, Callable[[Report], None]] = {
    "produce": part_produce, "latency": part_latency, "commits": part_commits,
    "transform": part_transform, "read": part_read, "ids": part_ids, "unused": part_unused,
}  # fmt: skip


def main() -> int:
    only = [word for word in re.split(r"[,\s]+", os.environ.get("ONLY", "")) if word]
    if unknown := set(only) - set(PARTS):
        print(f"ONLY names {', '.join(sorted(unknown))}; it takes {', '.join(PARTS)}")
        return 2
    conditions = Conditions()
    where = conditions.report()
    print(
        f"Transactions on {where['cpu']}, {where['cores']} cores, commit {where['commit']}, "
        f"{ROUNDS} rounds\n{conditions.sentence()}",
        flush=True,
    )
    report, begun = Report(), time.monotonic()
    for key, part in PARTS.items():
        if only and key not in only:
            continue
        print(f"\n{key}", flush=True)
        known = set(report.values)
        part(report)
        report.show([name for name in report.values if name not in known])
        print(f"  {time.monotonic() - begun:.0f} s until now", flush=True)
    part_name = f"-{'-'.join(only)}" if only else ""
    path = RESULTS / f"transactions-{where['date']}-{where['commit']}{part_name}.json"
    RESULTS.mkdir(exist_ok=True)
    command = f"ROUNDS={ROUNDS} {f'ONLY={chr(44).join(only)} ' if only else ''}"
    kept = {
        "command": f"{command}make bench-transactions", "machine": conditions.report(),
        "figures": report.rows(),
    }  # fmt: skip
    path.write_text(json.dumps(kept, indent=1) + "\n")
    missed = [name for name in report.goals if not report.is_met(name)]
    print(
        f"\n{len(report.goals) - len(missed)} of {len(report.goals)} goals met; written to "
        f"bench/results: {path.name}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
