"""What consumer groups and queues cost: `make bench-groups`. A table and a results file.

1. MEMBERS consumers in processes of CONSUMERS_EACH share PARTITIONS partitions under a light load; one more consumer, in a process of its own, is killed with
   SIGKILL. From then: how long until each of its partitions is owned again, how many other partitions changed hands (none need to), and the longest gap in a
   partition that its consumer kept, beside the longest gap in as much time before.
2. Commits: 50 consumers that commit synchronously as fast as they can; one consumer alone, its median.
3. CPU of the groups process for a commit; of front and groups process for a heartbeat without news: one after the other over one connection, and of
   MEMBERS connections as the SDK sends them, less what the front costs without heartbeats.
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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from bench.measure import machine, percentile
from bench.suite import RESULTS
from tailrace import Admin, Consumer, NewTopic, Producer, ShareConsumer, TopicPartition
from tailrace.connection import Connection
from tailrace.errors import UnknownGroupError
from tailrace.groups.membership import HEARTBEAT_SLOTS
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.session import Response
from tailrace.protocol.wire import Api

MEMBERS = int(os.environ.get("MEMBERS", "200"))
CONSUMERS_EACH = 25
PARTITIONS = int(os.environ.get("PARTITIONS", "1000"))
WATCHED_EVERY = 50
"""One partition in so many gets records, RATE a second each: what all of them would get, 2 cores do not carry in batches of one."""
RATE = 20
QUIET_S = 10.0
COMMITTERS = 50
COMMIT_S = 5.0
HEARTBEATS = 5_000
HEARTBEAT_INTERVAL_S = 3.0
BEATING_S = 12.0
LAG_PARTITIONS = int(os.environ.get("LAG_PARTITIONS", "9900"))
"""10,000 where as many open files are allowed: 20,000 are enough for 9,955."""
QUEUED = 300_000
BUSY = ("tr-front-0", "tr-groups-0")


def report(name: str, unit: str, value: float, found: list[dict[str, Any]]) -> None:
    """Print a figure and add it to `found`."""
    print(f"{name:<78} {value:>12,.1f}  {unit}", flush=True)
    found.append({"name": name, "unit": unit, "value": value})


@contextmanager
def appliance(**settings: Any) -> Iterator[EmbeddedAppliance]:
    """One of its own."""
    with tempfile.TemporaryDirectory(prefix="tailrace-groups-", dir=os.environ.get("TAILRACE_BENCH_DIR")) as directory:
        running = start_embedded(data_dir=f"{directory}/data", auto_create_topics=False, settings=settings)
        try:
            yield running
        finally:
            running.stop()


def cpu_of(running: EmbeddedAppliance, name: str) -> float:
    """Seconds of CPU that a process has used, to the nanosecond."""
    (process,) = (child for child in psutil.Process(running.pid).children() if child.name() == name)
    tasks = pathlib.Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


# ---- 1: a member dies ------------------------------------------------------------------------------------------------------------------


def start_members(address: str, directory: str, name: str, count: int) -> tuple[subprocess.Popen[bytes], pathlib.Path]:
    """A process with `count` consumers, and where it writes."""
    path = pathlib.Path(directory) / name
    command = [sys.executable, "-P", "-m", "bench.group_member", address, "members", "shared", str(count), str(path)]
    return subprocess.Popen(command), path


def keep_sending(address: str, stop: threading.Event) -> None:
    """RATE records a second to each watched partition."""
    with Producer(address, acks=1) as producer:
        while not stop.wait(1 / RATE):
            for partition in range(0, PARTITIONS, WATCHED_EVERY):
                producer.send("shared", b"x" * 100, partition=partition)


def owners(paths: list[pathlib.Path]) -> dict[int, list[tuple[int, int]]]:
    """partition -> [(ns, given or taken)], as the files of several processes have it."""
    found: dict[int, list[tuple[int, int]]] = {}
    for path in paths:
        text = pathlib.Path(f"{path}.owned").read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            ns, partition, given = map(int, line.split())
            found.setdefault(partition, []).append((ns, given))
    return found


def is_stable(admin: Admin) -> bool:
    """Whether all consumers are there and have what they are to have."""
    try:
        group = admin.describe_groups(["members"], lag_seconds=False)["members"]
    except UnknownGroupError:
        return False  # the first of them has not joined yet
    return group["state"] == "STABLE" and len(group["members"]) == MEMBERS + 1


def part_death(found: list[dict[str, Any]]) -> None:
    """Part 1."""
    with tempfile.TemporaryDirectory(prefix="tailrace-members-") as directory, appliance(slots=4096) as running:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("shared", PARTITIONS, {"durability": "memory"})])
            stop = threading.Event()
            sender = threading.Thread(target=keep_sending, args=(running.address, stop))
            sender.start()
            begun = time.perf_counter()
            each = min(CONSUMERS_EACH, MEMBERS)
            processes = [start_members(running.address, directory, f"m{n}", each) for n in range(MEMBERS // each)]
            victim, victim_path = start_members(running.address, directory, "victim", 1)
            while not is_stable(admin):
                time.sleep(0.2)
            report(
                f"{MEMBERS + 1} consumers, {PARTITIONS} partitions: from the first's start to stable",
                "s",
                time.perf_counter() - begun,
                found,
            )
            time.sleep(QUIET_S)
            killed_ns = time.monotonic_ns()
            victim.kill()
            victim.wait()
            time.sleep(QUIET_S)
            end_ns = time.monotonic_ns()
            stop.set()
            sender.join()
            for process, _ in processes:
                process.send_signal(signal.SIGTERM)
            for process, _ in processes:
                process.wait()
        its_own = {p for p, events in owners([victim_path]).items() if sorted(events)[-1][1] == 1}
        events = owners([path for _, path in processes])
        again = [min(ns for ns, given in events.get(p, []) if given and killed_ns < ns < end_ns) for p in its_own]
        moved = {p for p, rows in events.items() if p not in its_own and any(killed_ns < ns < end_ns for ns, _ in rows)}
        report("SIGKILL of one consumer: until each of its partitions is owned again", "ms", (max(again) - killed_ns) / 1e6, found)
        report("partitions of it", "", len(its_own), found)
        report("other partitions that changed hands", "", len(moved), found)
        gaps = [gap for _, path in processes for gap in json.loads(path.read_text())["gaps"]]
        window_ns = int(QUIET_S * 1e9)
        for name, begin_ns in (("in as much time before", killed_ns - window_ns), ("after the kill", killed_ns)):
            longest = max(
                ((end - begin) / 1e6 for p, begin, end in gaps if begin < begin_ns + window_ns and end > begin_ns and p not in its_own),
                default=0.0,
            )
            report(f"longest gap in a partition that was kept, {name}", "ms", longest, found)


# ---- 2, 3: commits and heartbeats ------------------------------------------------------------------------------------------------------


def committing(address: str, partition: int, seconds: float) -> list[float]:
    """Milliseconds of each commit, one after the other."""
    times = []
    with Consumer(bootstrap=address, group_id="committers", enable_auto_commit=False, auto_offset_reset="earliest") as consumer:
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
        report("one consumer, commits one after the other: p50", "ms", statistics.median(alone), found)
        report("                                           p99", "ms", percentile(alone, 0.99), found)
        cpu = cpu_of(running, "tr-groups-0")
        code = "import sys, json, bench.groups as g; print(json.dumps(g.several(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))"
        command = [sys.executable, "-P", "-c", code, running.address]
        children = [subprocess.Popen([*command, str(first), "10"], stdout=subprocess.PIPE) for first in range(0, COMMITTERS, 10)]
        times = [ms for child in children for ms in json.loads(child.communicate()[0])]
        report(f"{COMMITTERS} consumers together", "commits/s", len(times) / COMMIT_S, found)
        report("                           p50", "ms", statistics.median(times), found)
        report("CPU of the groups process for a commit", "us", (cpu_of(running, "tr-groups-0") - cpu) / len(times) * 1e6, found)
        heartbeats(running, found)
        heartbeats_of_many(running, found)


def several(address: str, first: int, count: int) -> list[float]:
    """`committing` in `count` threads, of partitions from `first` on."""
    times: list[float] = []
    threads = [threading.Thread(target=lambda p=p: times.extend(committing(address, p, COMMIT_S))) for p in range(first, first + count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


class Beating:
    """A member on a connection of its own that has what it is to have."""

    def __init__(self, address: str, group: str, number: int) -> None:
        self.connection = Connection(address, "bench")
        self._said: dict[str, Any] = {"group": group, "kind": "consumer", "member_id": f"{number:032x}"}
        settings = {"session_timeout_ms": 45_000, "rebalance_timeout_ms": 60_000, "heartbeat_interval_ms": 3_000, "client_id": "bench"}
        self._owned: dict[str, list[int]] = {}
        self._epoch = self._ask({**settings, "member_epoch": 0, "topics": ["commits"], "owned": {}})["member_epoch"]

    def _ask(self, more: dict[str, Any]) -> dict[str, Any]:
        return self.connection.call_json(Api.GROUP_HEARTBEAT, {**self._said, **more}, 10_000)

    def settle(self) -> bool:
        """Tell what it has and take what it is given; returns whether that was news."""
        answer = self._ask({"member_epoch": self._epoch, "owned": self._owned})
        before, self._epoch, self._owned = (self._epoch, self._owned), answer["member_epoch"], answer.get("assignment", self._owned)
        return before != (self._epoch, self._owned)

    def quiet(self) -> bytes:
        """A heartbeat without news, as the SDK sends it."""
        return requests.encode_json({**self._said, "member_epoch": self._epoch, "topics": None, "follows_catalog": False, "owned": None})


def heartbeats(running: EmbeddedAppliance, found: list[dict[str, Any]]) -> None:
    """CPU of a heartbeat that brings no news: each waits for the answer to the one before."""
    one = Beating(running.address, "alone", 1)
    while one.settle():
        pass
    beat = one.quiet()
    cpu = [cpu_of(running, name) for name in BUSY]
    for _ in range(HEARTBEATS):
        one.connection.call(Api.GROUP_HEARTBEAT, [beat], 10_000)
    for name, before in zip(BUSY, cpu, strict=True):
        each_us = (cpu_of(running, name) - before) / HEARTBEATS * 1e6
        report(f"CPU of {name} for a heartbeat without news, one after the other", "us", each_us, found)
    one.connection.close()


def heartbeats_of_many(running: EmbeddedAppliance, found: list[dict[str, Any]]) -> None:
    """The same of MEMBERS members, at the moments at which the SDK sends them."""
    members = [Beating(running.address, "many", number) for number in range(MEMBERS)]
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
        each_us = (cpu_of(running, name) - before - without) / (BEATING_S / HEARTBEAT_INTERVAL_S * MEMBERS) * 1e6
        report(f"CPU of {name} for a heartbeat without news, {MEMBERS} members", "us", each_us, found)
    for connection, _ in beats:
        connection.process()
        connection.close()
    assert len(answered) >= (BEATING_S / HEARTBEAT_INTERVAL_S - 1) * MEMBERS
    assert all(answer is not None and answer.code is ErrorCode.OK for answer in answered)


# ---- 4: lag ----------------------------------------------------------------------------------------------------------------------------


def part_lag(found: list[dict[str, Any]]) -> None:
    """Part 4."""
    with appliance(slots=16_384) as running, Admin(running.address, request_timeout_ms=120_000) as admin:
        counts = {f"wide{n}": min(1000, LAG_PARTITIONS - n * 1000) for n in range(-(-LAG_PARTITIONS // 1000))}
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
        report(f"describe a group with {LAG_PARTITIONS} partitions, with their lag", "ms", statistics.median(times), found)


# ---- 5: queues -------------------------------------------------------------------------------------------------------------------------


def taking(address: str, wanted: int) -> tuple[int, float, float]:
    """Accepts records one by one until nothing more comes: how many, and when the first and the last of them were there."""
    count, first, last = 0, 0.0, 0.0
    with ShareConsumer("queue", bootstrap=address, group_id=f"workers-{wanted}", auto_offset_reset="earliest") as consumer:
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
            code = "import sys, bench.groups as g; print(*g.taking(sys.argv[1], int(sys.argv[2])))"
            children = [
                subprocess.Popen([sys.executable, "-P", "-c", code, running.address, str(consumers)], stdout=subprocess.PIPE)
                for _ in range(consumers)
            ]
            rows = [tuple(map(float, child.communicate()[0].split())) for child in children]
            seconds = max(row[2] for row in rows) - min(row[1] for row in rows if row[0])
            report(f"queue: acquired and accepted one by one by {consumers}", "records/s", sum(row[0] for row in rows) / seconds, found)


PARTS = {"death": part_death, "commits": part_commits, "lag": part_lag, "queue": part_queue}


def main() -> int:
    """All parts, or those that are named."""
    where = machine()
    print(f"Groups on {where['cpu']}, {where['cores']} cores, commit {where['commit']}\n")
    found: list[dict[str, Any]] = []
    for name in sys.argv[1:] or PARTS:
        PARTS[name](found)
    path = RESULTS / f"groups-{where['date']}-{where['commit']}.json"
    path.write_text(json.dumps({"command": "make bench-groups", "machine": where, "figures": found}, indent=1) + "\n")
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
