"""Partitions of a test's appliance that move between its two data directories."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import orjson
import psutil

from shm.crash_points import CRASH_POINT_VARIABLE
from tailrace import Admin, Consumer, NewTopic, Producer, TailraceError, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.killed_directories import start
from tests.kit.cli import run
from tests.kit.processes import HANG_LIMIT_S, wait_until

SEGMENT_BYTES = 1 << 20
_RESERVE = {"journal_bytes": 1 << 20, "disk_reserve_bytes": 4 << 20}


class Armed(NamedTuple):
    """An appliance with a crash point."""

    address: str
    data_dir: str
    supervisor: psutil.Process


class Addressed(Protocol):
    """An appliance of a test."""

    @property
    def address(self) -> str: ...
    @property
    def data_dir(self) -> str: ...


def directories(tmp_path: pathlib.Path) -> str:
    return f"{tmp_path}/data,{tmp_path}/second"


def create(
    appliance: Addressed, name: str = "orders", partitions: int = 1, **configs: object
) -> None:
    given = {key.replace("_", "."): value for key, value in configs.items()}
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name, partitions, {"segment.bytes": SEGMENT_BYTES, **given})])


def produce(appliance: Addressed, values: range, size: int = 1_000) -> None:
    with Producer(appliance.address) as producer:
        handles = [
            producer.send("orders", b"%d" % number + bytes(size), partition=0) for number in values
        ]
        for handle in handles:
            handle.result(HANG_LIMIT_S)


def numbers(appliance: Addressed, topic: str = "orders") -> list[int]:
    """The numbers of partition 0, in order; offsets have no gap but those of markers."""
    key = TopicPartition(topic, 0)
    with Consumer(bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        end = consumer.end_offsets([key])[key]
        consumer.assign([key])
        found = []
        while consumer.position(key) < end:
            found += [int(r.value.rstrip(b"\0")) for r in consumer.poll(timeout_ms=1_000)]
    return found


def where(appliance: Addressed, topic: str = "orders") -> str:
    """Name of the data directory of partition 0."""
    rows = orjson.loads(
        run(None, "partition", "list", "--json", "--data-dir", appliance.data_dir,
            "--bootstrap", appliance.address).stdout
    )  # fmt: skip
    [found] = [row for row in rows if (row["topic"], row["partition"]) == (topic, 0)]
    return pathlib.Path(found["data_dir"]).name


def move(appliance: Addressed, target: pathlib.Path, *options: str, status: int | None = 0) -> str:
    done = run(
        None, "partition", "move", "orders:0", "--to", str(target), "--data-dir",
        appliance.data_dir, "--bootstrap", appliance.address, *options, status=status,
    )  # fmt: skip
    return done.stderr.decode()


def await_removal(directory: pathlib.Path) -> None:
    wait_until(lambda: not directory.exists(), f"{directory} is removed")


@contextmanager
def armed(tmp_path: pathlib.Path, point: str) -> Iterator[Armed]:
    address = f"ipc://{tmp_path}/s"
    running = subprocess.Popen(
        [sys.executable, "-P", "-m", "appliance.supervise.supervisor", "--listen", address,
         "--set", f"data_dirs={directories(tmp_path)}", "--set", "ring_bytes=16777216"],
        env={**os.environ, CRASH_POINT_VARIABLE: point}, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield Armed(address, f"{tmp_path}/data", psutil.Process(running.pid))
    finally:
        running.kill()
        running.wait()


def kill_in_move(appliance: Armed, target: pathlib.Path, *, flusher: bool) -> None:
    """Have partition 0 moved until the armed process is killed, then kill all others."""
    name = "tr-flusher-0" if flusher else "tr-controller"
    [victim] = [
        each
        for each in appliance.supervisor.children()
        if pathlib.Path(f"/proc/{each.pid}/comm").read_text().startswith(name)
    ]
    appliance.supervisor.suspend()  # it starts no other

    def is_killed() -> bool:
        with (
            Admin(appliance.address, request_timeout_ms=1_000, connect_timeout_ms=1_000) as admin,
            suppress(TailraceError),  # it may be killed before the answer, or be moving
        ):
            admin.move_partition("orders", 0, str(target))
        return bool(victim.status() == psutil.STATUS_ZOMBIE)

    wait_until(is_killed, "it is killed")
    others = appliance.supervisor.children(recursive=True)
    for process in [*others, appliance.supervisor]:
        process.kill()
    psutil.wait_procs(others, timeout=HANG_LIMIT_S)


@contextmanager
def two_directories(first: pathlib.Path, second: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    """An appliance with these, and little that it keeps for itself in them."""
    running = start(first, data_dirs=f"{first},{second}", **_RESERVE)
    try:
        yield running
    finally:
        assert running.stop() == 0


def last_reason(appliance: Addressed) -> str:
    """Reason that the last move did not come about; empty: none has failed."""
    with Admin(appliance.address) as admin:
        rows = admin.describe_cluster()["moves"]
    return next((str(row["reason"]) for row in rows if row["state"] == "failed"), "")


def on_their_way(appliance: Addressed) -> list[str]:
    """States of the moves that are not over."""
    with Admin(appliance.address) as admin:
        rows = admin.describe_cluster()["moves"]
    return [str(row["state"]) for row in rows if row["state"] != "failed"]


def close_for(appliance: Addressed, target: pathlib.Path) -> str:
    """Have the partition moved without a copy that was made before. Returns why it stays."""
    with Admin(appliance.address) as admin:
        admin.move_partition("orders", 0, str(target))
    wait_until(lambda: bool(last_reason(appliance)), "the move has failed")
    return last_reason(appliance)
