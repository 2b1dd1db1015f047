"""Costs of consumer groups and queues: `make bench-groups`. A table and a results file.

1. A member of a large group dies, ours and Kafka's: rebalance.py. MEMBERS and PARTITIONS say how
   large.
2. Commits: 50 consumers that commit synchronously as fast as they can; one consumer alone, its
   median.
3. CPU of the groups process for a commit; of front and groups process for a heartbeat without news:
   one after the other over one connection, and of MEMBERS connections as the SDK sends them, less
   what the front costs without heartbeats.
4. The lag of 10,000 partitions.
5. A queue: records a second that one ShareConsumer, and four, acquire and accept one by one.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from bench.measure import RESULTS, machine, percentile
from bench.members import rebalance
from bench.members.rebalance_table import as_rows, table
from tailrace import Admin, Consumer, NewTopic, Producer, ShareConsumer, TopicPartition
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_json_now, call_now
from tailrace.core.error_codes import ErrorCode
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.group.membership import HEARTBEAT_SLOTS
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response

DEATH = rebalance.Shape(
    int(os.environ.get("MEMBERS", "200")), int(os.environ.get("PARTITIONS", "1000"))
)
COMMITTERS = 50
COMMIT_S = float(os.environ.get("SECONDS", "5"))
HEARTBEATS = int(os.environ.get("HEARTBEATS", "5000"))
HEARTBEAT_INTERVAL_S = 3.0
BEATING_S = float(os.environ.get("BEATING_S", "12"))
LAG_PARTITIONS = int(os.environ.get("LAG_PARTITIONS", "9900"))
"""10,000 where as many open files are allowed: 20,000 are enough for 9,955."""
QUEUED = int(os.environ.get("QUEUED", "300000"))
BUSY = ("tr-front-0", "tr-groups-0")


def report(name: str, unit: str, value: float, found: list[dict[str, Any]]) -> None:
    """Print a figure and add it to `found`."""
    print(f"{name:<78} {value:>12,.1f}  {unit}", flush=True)
    found.append({"name": name, "unit": unit, "value": value})


@contextmanager
def appliance(**settings: Any) -> Iterator[EmbeddedAppliance]:
    """One of its own."""
    with tempfile.TemporaryDirectory(
        prefix="tailrace-groups-", dir=os.environ.get("TAILRACE_BENCH_DIR")
    ) as directory:
        running = start_embedded(
            data_dir=f"{directory}/data", auto_create_topics=False, settings=settings
        )
        try:
            yield running
        finally:
            running.stop()


def cpu_of(running: EmbeddedAppliance, name: str) -> float:
    """Seconds of CPU that a process has used, to the nanosecond."""
    (process,) = (child for child in psutil.Process(running.pid).children() if child.name() == name)
    tasks = pathlib.Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


# ---- 1: a member dies ----------------------------------------------------------------------------


def part_death(found: list[dict[str, Any]]) -> None:
    """Part 1."""
    columns, missing = rebalance.measure_all(DEATH, list(rebalance.CONTENDERS), sys.stderr)
    print(rebalance.heading(DEATH), "", table(columns), *missing, "", sep="\n", flush=True)
    found += as_rows(columns)


# ---- 2, 3: commits and heartbeats ----------------------------------------------------------------


def committing(address: str, partition: int, seconds: float) -> list[float]:
    """Milliseconds of each commit, one after the other."""
    times = []
    with Consumer(
        bootstrap=address,
        group_id="committers",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    ) as consumer:
        key = TopicPartition("commits", partition)
        consumer.assign([key])
        end = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < end:
            consumer.commit({key: 0})
            times.append((time.perf_counter() - begun) * 1000)
    return times


def part_commits(found: list[dict[str, Any]]) -> None:
    """Parts 2 and 3."""
    with appliance() as running:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("commits", COMMITTERS)])
        alone = committing(running.address, 0, COMMIT_S)
        report(
            "one consumer, commits one after the other: p50", "ms", statistics.median(alone), found
        )
        report(
            "                                           p99", "ms", percentile(alone, 0.99), found
        )
        cpu = cpu_of(running, "tr-groups-0")
        children = [
            child("commit", running.address, first, 10) for first in range(0, COMMITTERS, 10)
        ]
        times = [ms for child in children for ms in json.loads(child.communicate()[0])]
        report(f"{COMMITTERS} consumers together", "commits/s", len(times) / COMMIT_S, found)
        report("                           p50", "ms", statistics.median(times), found)
        report(
            "CPU of the groups process for a commit",
            "us",
            (cpu_of(running, "tr-groups-0") - cpu) / len(times) * 1e6,
            found,
        )
        heartbeats(running, found)
        heartbeats_of_many(running, found)


def several(address: str, first: int, count: int) -> list[float]:
    """`committing` in `count` threads, of partitions from `first` on."""
    times: list[float] = []
    threads = [
        threading.Thread(target=lambda p=p: times.extend(committing(address, p, COMMIT_S)))
        for p in range(first, first + count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


class Beating:
    """A member on a connection of its own that has what it is to have."""

    def __init__(self, address: str, group: str, number: int) -> None:
        self.connection = Connection(address, "bench")
        self._said: dict[str, Any] = {
            "group": group,
            "kind": "consumer",
            "member_id": f"{number:032x}",
        }
        settings = {
            "session_timeout_ms": 45_000,
            "rebalance_timeout_ms": 60_000,
            "heartbeat_interval_ms": 3_000,
            "client_id": "bench",
        }
        self._owned: dict[str, list[int]] = {}
        self._epoch = self._ask(
            {**settings, "member_epoch": 0, "topics": ["commits"], "owned": {}}
        )["member_epoch"]

    def _ask(self, more: dict[str, Any]) -> dict[str, Any]:
        return call_json_now(self.connection, Api.GROUP_HEARTBEAT, {**self._said, **more}, 10_000)

    def settle(self) -> bool:
        """Tell what it has and take what it is given; returns whether that was news."""
        answer = self._ask({"member_epoch": self._epoch, "owned": self._owned})
        before, self._epoch, self._owned = (
            (self._epoch, self._owned),
            answer["member_epoch"],
            answer.get("assignment", self._owned),
        )
        return before != (self._epoch, self._owned)

    def quiet(self) -> bytes:
        """A heartbeat without news, as the SDK sends it."""
        return requests.encode_json(
            {
                **self._said,
                "member_epoch": self._epoch,
                "topics": None,
                "follows_catalog": False,
                "owned": None,
            }
        )


def heartbeats(running: EmbeddedAppliance, found: list[dict[str, Any]]) -> None:
    """CPU of a heartbeat that brings no news: each waits for the answer to the one before."""
    one = Beating(running.address, "alone", 1)
    while one.settle():
        pass
    beat = one.quiet()
    cpu = [cpu_of(running, name) for name in BUSY]
    for _ in range(HEARTBEATS):
        call_now(one.connection, Api.GROUP_HEARTBEAT, [beat], 10_000)
    for name, before in zip(BUSY, cpu, strict=True):
        each_us = (cpu_of(running, name) - before) / HEARTBEATS * 1e6
        report(
            f"CPU of {name} for a heartbeat without news, one after the other", "us", each_us, found
        )
    one.connection.close()


def heartbeats_of_many(running: EmbeddedAppliance, found: list[dict[str, Any]]) -> None:
    """The same of many members, at the moments at which the SDK sends them."""
    members = [Beating(running.address, "many", number) for number in range(DEATH.members)]
    while sum(member.settle() for member in members):
        pass
    beats = [(member.connection, member.quiet()) for member in members]
    time.sleep(1)
    cpu = [cpu_of(running, name) for name in BUSY]
    time.sleep(BEATING_S)
    idle = [cpu_of(running, name) - before for name, before in zip(BUSY, cpu, strict=True)]
    answered: list[Response | None] = []
    cpu = [cpu_of(running, name) for name in BUSY]
    begun, count = time.perf_counter(), 0
    while (at := count * HEARTBEAT_INTERVAL_S / HEARTBEAT_SLOTS) < BEATING_S:
        time.sleep(max(0.0, begun + at - time.perf_counter()))
        for connection, beat in beats[count % HEARTBEAT_SLOTS :: HEARTBEAT_SLOTS]:
            connection.process()
            assert connection.request(Api.GROUP_HEARTBEAT, [beat], answered.append)
            connection.process()
        count += 1
    time.sleep(max(0.0, begun + BEATING_S - time.perf_counter()))
    for name, before, without in zip(BUSY, cpu, idle, strict=True):
        each_us = (
            (cpu_of(running, name) - before - without)
            / (BEATING_S / HEARTBEAT_INTERVAL_S * DEATH.members)
            * 1e6
        )
        report(
            f"CPU of {name} for a heartbeat without news, {DEATH.members} members",
            "us",
            each_us,
            found,
        )
    for connection, _ in beats:
        connection.process()
        connection.close()
    assert len(answered) >= (BEATING_S / HEARTBEAT_INTERVAL_S - 1) * DEATH.members
    assert all(answer is not None and answer.code is ErrorCode.OK for answer in answered)


# ---- 4: lag --------------------------------------------------------------------------------------


def part_lag(found: list[dict[str, Any]]) -> None:
    """Part 4."""
    with (
        appliance(slots=16_384) as running,
        Admin(running.address, request_timeout_ms=120_000) as admin,
    ):
        counts = {
            f"wide{n}": min(1000, LAG_PARTITIONS - n * 1000)
            for n in range(-(-LAG_PARTITIONS // 1000))
        }
        for name, count in counts.items():
            admin.create_topics([NewTopic(name, count)])
        keys = [TopicPartition(name, p) for name, count in counts.items() for p in range(count)]
        for begin in range(0, len(keys), 2000):
            admin.alter_group_offsets("wide", dict.fromkeys(keys[begin : begin + 2000], 0))
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            group = admin.describe_groups(["wide"])["wide"]
            times.append((time.perf_counter() - begun) * 1000)
            assert len(group["partitions"]) == LAG_PARTITIONS
        report(
            f"describe a group with {LAG_PARTITIONS} partitions, with their lag",
            "ms",
            statistics.median(times),
            found,
        )


# ---- 5: queues -----------------------------------------------------------------------------------


def taking(address: str, wanted: int) -> tuple[int, float, float]:
    """Accepts records one by one until nothing more comes: how many, and when the first and the
    last of them were there.
    """
    count, first, last = 0, 0.0, 0.0
    with ShareConsumer(
        "queue", bootstrap=address, group_id=f"workers-{wanted}", auto_offset_reset="earliest"
    ) as consumer:
        while records := consumer.poll(3_000, 2_000):
            for record in records:
                consumer.acknowledge(record, "accept")
            first, last, count = first or time.time(), time.time(), count + len(records)
        consumer.commit()
    return count, first, last


def part_queue(found: list[dict[str, Any]]) -> None:
    """Part 5."""
    with appliance() as running:
        with Admin(running.address) as admin, Producer(running.address, acks=1) as producer:
            admin.create_topics([NewTopic("queue")])
            for _ in range(QUEUED):
                producer.send("queue", b"x" * 100)
            producer.flush()
        for consumers in (1, 4):
            children = [child("take", running.address, consumers) for _ in range(consumers)]
            rows = [json.loads(child.communicate()[0]) for child in children]
            seconds = max(row[2] for row in rows) - min(row[1] for row in rows if row[0])
            report(
                f"queue: acquired and accepted one by one by {consumers}",
                "records/s",
                sum(row[0] for row in rows) / seconds,
                found,
            )


# ---- processes of their own ----------------------------------------------------------------------


def child(role: str, address: str, *numbers: int) -> subprocess.Popen[bytes]:
    """A process that runs `ROLES[role]`, and prints as JSON what it returns."""
    command = [sys.executable, "-P", "-m", "bench.members.groups", "--role", role, address]
    return subprocess.Popen([*command, *map(str, numbers)], stdout=subprocess.PIPE)


ROLES: dict[str, Callable[..., Any]] = {"commit": several, "take": taking}
PARTS = {"death": part_death, "commits": part_commits, "lag": part_lag, "queue": part_queue}


def main() -> int:
    """All parts, or those that are named; with `--role` what a child does."""
    if sys.argv[1:2] == ["--role"]:
        role, address, *numbers = sys.argv[2:]
        print(json.dumps(ROLES[role](address, *map(int, numbers))))
        return 0
    where = machine()
    print(f"Groups on {where['cpu']}, {where['cores']} cores, commit {where['commit']}\n")
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # what is running is stopped and removed
    found: list[dict[str, Any]] = []
    for name in sys.argv[1:] or PARTS:
        PARTS[name](found)
    path = RESULTS / f"groups-{where['date']}-{where['commit']}.json"
    path.write_text(
        json.dumps({"command": "make bench-groups", "machine": where, "figures": found}, indent=1)
        + "\n"
    )
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
