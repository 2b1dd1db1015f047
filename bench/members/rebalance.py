"""A member of a large group dies: ours, and Kafka's with its new group protocol (KIP-848), which
does the same work. `make bench-rebalance`.

MEMBERS consumers in processes of CONSUMERS_EACH share PARTITIONS partitions under a light load.
Members that are to die have a process each. From the death of one: how long until each of its
partitions is owned again, how many other partitions changed hands (none need to), and the longest
gap in a partition that its consumer kept, beside the longest in as much time before. First some are
killed (SIGKILL: their connections close), one after the other, then one is stopped (SIGSTOP: it is
silent, and its connection stays open). All times are the members' own: a partition is owned when
the new owner's listener has been called.

The contenders run one after the other, each alone, with the same settings (member_notes.py),
members in as many processes, and the same load. What differs: our appliance removes a member a
second after its connection closed, Kafka after the session timeout; ours has commits on the disk,
Kafka's in the page cache. Where Kafka cannot be had, a line says what is missing. Without arguments
there is a results file, after about 5 minutes; 2 GiB of memory are enough.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TextIO

from bench.measure import RESULTS, machine
from bench.members.member_notes import (
    HEARTBEAT_INTERVAL_MS,
    SESSION_TIMEOUT_MS,
    History,
)
from bench.members.rebalance_table import RETRY_TIMEOUT_S, Column, as_rows, table
from bench.members.running_members import RATE, Members, Sender
from bench.peers.kafka_groups import NAME as KAFKA
from bench.peers.kafka_groups import kafka_group
from bench.peers.servers import Missing
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded

TAILRACE = "Tailrace"
CONSUMERS_EACH = 25
WATCHED = 20
"""So many partitions, and those of the members that are to die, get records, RATE a second each:
what all of them would get, 2 cores do not carry in batches of one.
"""
QUIET_S = 3.0
"""Without a change for so long, a group is settled."""
START_TIMEOUT_S = 300.0
Group = tuple[list[str], Callable[[Collection[int]], None]]
"""The command of a process of members, without their number and file; and what sends a record to
each of some partitions.
"""


@dataclass(frozen=True)
class Shape:
    """The load that all contenders are given."""

    members: int = 200
    partitions: int = 1000
    kills: int = 3
    stops: int = 1
    window_s: float = SESSION_TIMEOUT_MS / 1000 + 9
    """From each death on, at least; and before the first."""

    @property
    def watched(self) -> range:
        """Partitions that get records; those of members that are to die do, too."""
        return range(0, self.partitions, max(1, self.partitions // WATCHED))


@contextmanager
def tailrace_group(directory: str, partition_count: int) -> Iterator[Group]:
    """Our side."""
    running = start_embedded(
        data_dir=f"{directory}/data", auto_create_topics=False, settings={"slots": 4096}
    )
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("shared", partition_count, {"durability": "memory"})])
        with Producer(running.address, acks=1) as producer:

            def send(partitions: Collection[int]) -> None:
                for partition in partitions:
                    producer.send("shared", b"x" * 100, partition=partition)

            yield (
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "bench.members.group_member",
                    running.address,
                    "members",
                    "shared",
                ],
                send,
            )
    finally:
        running.stop()


CONTENDERS: dict[str, Callable[[str, int], AbstractContextManager[Group]]] = {
    TAILRACE: tailrace_group,
    KAFKA: kafka_group,
}


def wait_until_settled(members: Members, shape: Shape) -> int:
    """Return the time of the group's last change, ns. Raises RuntimeError after START_TIMEOUT_S."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(0.5)
        history = members.history()
        settled_ns = history.settled_ns(shape.partitions, shape.members)
        if settled_ns is not None and time.monotonic_ns() - settled_ns > QUIET_S * 1e9:
            return settled_ns
    owners = [owner for owner in history.owners().values() if owner]
    raise RuntimeError(
        f"not settled after {START_TIMEOUT_S:.0f} s: {len(owners)} partitions have "
        f"{len(set().union(*owners))} owners"
    )


def wait_until_read(members: Members, partitions: Collection[int]) -> int:
    """Return the time at which each of these had been read from by its present owner, ns. Raises
    RuntimeError after START_TIMEOUT_S.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while (read_ns := members.history().read_since_given_ns(partitions)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"partitions that nothing was read from after {START_TIMEOUT_S:.0f} s"
            )
        time.sleep(0.5)
    return read_ns


@dataclass(frozen=True)
class Death:
    """A member's end, and what was seen until `end_ns`."""

    how: signal.Signals
    member: str
    died_ns: int
    end_ns: int

    def lost(self, history: History) -> set[int]:
        """The partitions that it had."""
        return {
            partition
            for partition, owners in history.owners(self.died_ns).items()
            if self.member in owners
        }


def end(members: Members, victim: str, how: signal.Signals, window_s: float) -> Death:
    """Kill or stop it, and wait: for `window_s`, and until its partitions are read from again, if
    that takes longer.
    """
    died_ns = time.monotonic_ns()
    members.signal(victim, how)
    time.sleep(window_s)
    while True:
        death, history = Death(how, f"{victim}.0", died_ns, time.monotonic_ns()), members.history()
        retry_ms = history.until_resumed_ms(
            death.lost(history), death.member, died_ns, death.end_ns
        )
        if retry_ms < math.inf or death.end_ns - died_ns > RETRY_TIMEOUT_S * 1e9:
            return death
        time.sleep(0.5)


def add_death(column: Column, history: History, watched: set[int], death: Death) -> None:
    """The figures of one death."""
    how, dead, died_ns, end_ns = death.how, death.member, death.died_ns, death.end_ns
    lost = death.lost(history)
    moved = history.changed(died_ns, end_ns) - lost
    kept = watched - lost - moved
    column.add(
        f"{how.name} of a member: until its partitions are owned again",
        "ms",
        history.until_reassigned_ms(lost, dead, died_ns, end_ns),
    )
    retry_ms = history.until_resumed_ms(lost, dead, died_ns, end_ns)
    column.add(f"{how.name}: until records of each of them are received again", "ms", retry_ms)
    column.add(f"{how.name}: partitions that it had", "", len(lost))
    column.add(f"{how.name}: other partitions that changed hands", "", len(moved))
    column.add(
        f"{how.name}: longest gap in a partition that was kept",
        "ms",
        history.longest_gap_ms(kept, died_ns, end_ns),
    )


def measure(name: str, shape: Shape, directory: str, log: TextIO) -> Column:
    """All figures of one contender. Raises Missing when it cannot be had, RuntimeError when its
    group does not settle.
    """
    column, deaths = Column(), []
    victims = {f"killed{number}": signal.SIGKILL for number in range(shape.kills)}
    victims |= {f"stopped{number}": signal.SIGSTOP for number in range(shape.stops)}
    with ExitStack() as stack:
        print(f"{name}: starting it, with {shape.partitions} partitions", file=log, flush=True)
        command, send = stack.enter_context(
            CONTENDERS[name](f"{directory}/server", shape.partitions)
        )
        members = Members(command, f"{directory}/members")
        stack.callback(members.stop)
        sender = Sender(send, shape.watched)
        sender.start()
        stack.callback(sender.stop)
        print(f"{name}: starting {shape.members} members", file=log, flush=True)
        started_ns = time.monotonic_ns()
        for victim in victims:
            members.start(victim, 1)
        for first in range(len(victims), shape.members, CONSUMERS_EACH):
            members.start(f"from{first}", min(CONSUMERS_EACH, shape.members - first))
        settled_ns = wait_until_settled(members, shape)
        column.add(
            "from the first member's start until each partition has its owner",
            "s",
            (settled_ns - started_ns) / 1e9,
        )
        owners = members.history().owners()
        watched = set(shape.watched) | {
            p for p, owner in owners.items() if owner & {f"{victim}.0" for victim in victims}
        }
        sender.partitions = watched
        wait_until_read(members, watched)
        read_ns = members.history().read_since_given_ns(
            shape.watched
        )  # the others did not get records from the beginning
        if read_ns is not None:
            column.add(
                "  until each that gets records is read from", "s", (read_ns - started_ns) / 1e9
            )
        quiet_ns = time.monotonic_ns()
        time.sleep(shape.window_s)
        quiet_end_ns = time.monotonic_ns()
        for victim, how in victims.items():
            print(f"{name}: {how.name}", file=log, flush=True)
            deaths.append(end(members, victim, how, shape.window_s))
        history = members.history()
        sender.check()
    gap_ms = history.longest_gap_ms(
        watched - history.changed(quiet_ns, quiet_end_ns), quiet_ns, quiet_end_ns
    )
    column.add("longest gap in a partition before, in as much time", "ms", gap_ms)
    for death in deaths:
        add_death(column, history, watched, death)
    column.add("longest pause of the sender itself", "ms", sender.longest_pause_ms(quiet_ns))
    return column


def measure_all(
    shape: Shape, names: Collection[str], log: TextIO
) -> tuple[dict[str, Column], list[str]]:
    """The columns of the contenders that can be had, and a sentence for each that cannot."""
    columns, missing = {}, []
    for name in names:
        with tempfile.TemporaryDirectory(
            prefix="tailrace-rebalance-", dir=os.environ.get("TAILRACE_BENCH_DIR")
        ) as directory:
            try:
                columns[name] = measure(name, shape, directory, log)
            except (Missing, RuntimeError, subprocess.CalledProcessError) as error:
                if name == TAILRACE:
                    raise
                missing.append(f"{name} is left out: {error}")
    return columns, missing


def heading(shape: Shape) -> str:
    """A sentence about the load."""
    return (
        f"One group of {shape.members} members over {shape.partitions:,} partitions, session "
        f"timeout {SESSION_TIMEOUT_MS:,} ms, heartbeats each "
        f"{HEARTBEAT_INTERVAL_MS:,} ms; {len(shape.watched)} partitions, and those "
        f"of members that are to die, get {RATE} records/s each"
    )


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -P -m bench.members.rebalance",
        description="A member of a large group dies: ours, and Kafka's. Without arguments about 5 "
        "minutes, and a results file.",
    )
    parser.add_argument("--members", type=int, default=Shape.members)
    parser.add_argument("--partitions", type=int, default=Shape.partitions)
    parser.add_argument(
        "--kills",
        type=int,
        default=Shape.kills,
        help="members that are killed, one after the other",
    )
    parser.add_argument(
        "--stops", type=int, default=Shape.stops, help="members that are stopped then"
    )
    parser.add_argument(
        "--window",
        type=float,
        default=Shape.window_s,
        help="seconds that each death is watched, at least",
    )
    parser.add_argument("--only", choices=("tailrace", "kafka"), help="one contender")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    given = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # what is running is stopped and removed
    shape, where = (
        Shape(given.members, given.partitions, given.kills, given.stops, given.window),
        machine(),
    )
    names = {"tailrace": [TAILRACE], "kafka": [KAFKA]}.get(given.only, list(CONTENDERS))
    busy = os.getloadavg()[0]
    columns, missing = measure_all(shape, names, sys.stderr)
    result = {
        "command": "make bench-rebalance", "machine": where, "load_average_before": busy,
        "shape": asdict(shape),
        "figures": as_rows(columns), "missing": missing,
    }  # fmt: skip
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        print(
            f"\n{heading(shape)}\non {where['cpu']}, {where['cores']} cores, commit "
            f"{where['commit']}, load average before {busy:.1f}\n\n{table(columns)}"
        )
        for sentence in missing:
            print(sentence)
    if not given.only and shape == Shape():
        path = RESULTS / f"rebalance-{where['date']}-{where['commit']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
