"""Disks that are full, against a real appliance: what removes records makes room although no append
seals a segment, and the room is there at once.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TailraceError, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.console import console_of
from tests.kit.cli import TAILRACE, run
from tests.kit.hosts.file_systems import small_file_system
from tests.kit.matrices import short
from tests.kit.processes import HANG_LIMIT_S, children, wait_until

SETTINGS = {"journal_bytes": 1 << 20, "ring_bytes": 4 << 20}
PARTITIONS = 2
LAST = 10
"""Records that are to stay where a part is removed."""


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    with small_file_system(tmp_path, 64) as path:
        yield path


def fill(running: EmbeddedAppliance, admin: Admin) -> dict[int, int]:
    """Send until the disk counts as full; how many records each partition has."""
    with Producer(running.address, acks="all", delivery_timeout_ms=2_000, linger_ms=0) as producer:
        for number in range(10_000):
            error = producer.send(
                "orders", os.urandom(100_000), partition=number % PARTITIONS
            ).exception(60)
            if error is not None and "DISK_FULL" in str(error):
                break
    assert admin.describe_cluster()["data_dirs"][0]["state"] == "FULL"
    partitions = [TopicPartition("orders", partition) for partition in range(PARTITIONS)]
    return {
        key.partition: found["offset"]
        for key, found in admin.offsets(dict.fromkeys(partitions, "latest")).items()
    }


def held_deleted(running: EmbeddedAppliance) -> list[str]:
    """Files that were removed and that a process of the appliance has open."""
    found = []
    for pid in children(running).values():
        for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except FileNotFoundError:
                continue
            if target.endswith(" (deleted)") and "/orders-" in target:
                found.append(target)
    return found


def delete_all(admin: Admin, _counts: dict[int, int]) -> None:
    admin.delete_records(
        {TopicPartition("orders", partition): -1 for partition in range(PARTITIONS)}
    )


def delete_most(admin: Admin, counts: dict[int, int]) -> None:
    admin.delete_records(
        {TopicPartition("orders", partition): count - LAST for partition, count in counts.items()}
    )


def lower(**configs: int) -> Callable[[Admin, dict[int, int]], None]:
    return lambda admin, _: admin.alter_topics(
        {"orders": {name.replace("_", "."): value for name, value in configs.items()}}
    )


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize(
    ("remove", "least"),
    short(
        [
            (delete_all, 0), (delete_most, LAST), (lower(retention_ms=1), 0),
            (lower(retention_bytes=0), 0), (lower(retention_bytes=LAST * 100_000), LAST),
            (lower(retention_bytes=LAST * 100_000, segment_bytes=1 << 20), LAST),
        ],
        1, 2, 4,
    ),
    ids=["delete_records of all", "delete_records of a part", "retention.ms", "retention.bytes 0",
    "retention.bytes", "retention.bytes and segment.bytes"],
)  # fmt: skip
def test_a_disk_that_one_segment_has_filled_has_a_way_out(
    small_disk: pathlib.Path, remove: Callable[[Admin, dict[int, int]], None], least: int
) -> None:
    """The live segment was sealed by an append alone, and appends are refused on a full disk."""
    running = start_embedded(data_dir=str(small_disk / "data"), settings=SETTINGS)
    try:
        with Admin(running.address) as admin:
            admin.create_topics(NewTopic("orders", PARTITIONS))
            counts = fill(running, admin)
            with Consumer(
                "orders", bootstrap=running.address, auto_offset_reset="earliest"
            ) as reader:
                assert reader.poll(60_000, 1), "the front has the segments open"
            remove(admin, counts)
            wait_until(
                lambda: admin.describe_cluster()["data_dirs"][0]["state"] != "FULL",
                "there is room",
            )
            admin.alter_topics({"orders": {"retention.ms": -1, "retention.bytes": -1}})
            with Producer(running.address, acks="all") as producer:
                for partition, count in counts.items():
                    assert (
                        producer.send("orders", b"after", partition=partition).result(60).offset
                        == count
                    )
            wait_until(lambda: not held_deleted(running), "what was removed is closed")
            beginnings = {
                p["partition"]: p["beginning_offset"]
                for p in admin.describe_topics("orders")["orders"]["partitions"]
            }
            for partition, count in counts.items():
                assert count - beginnings[partition] >= least
                assert beginnings[partition] > 0
        again = read_all(
            running,
            {partition: count + 1 - beginnings[partition] for partition, count in counts.items()},
        )
        assert again == {
            partition: list(range(beginnings[partition], count + 1))
            for partition, count in counts.items()
        }
    finally:
        assert running.stop() == 0
    restarted = start_embedded(data_dir=str(small_disk / "data"), settings=SETTINGS)
    try:
        assert (
            read_all(restarted, {partition: len(offsets) for partition, offsets in again.items()})
            == again
        )
    finally:
        assert restarted.stop() == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_named_wherever_one_looks(small_disk: pathlib.Path) -> None:
    """Health, status, metrics and a waiting `tailrace produce`; all go on when there is room."""
    running = start_embedded(
        data_dir=str(small_disk / "data"), settings={**SETTINGS, "http.listen": "127.0.0.1:0"}
    )
    full = f"{small_disk}/data takes no writes because its disk is full: free some space"
    try:
        with Admin(running.address) as admin:
            admin.create_topics(NewTopic("orders", PARTITIONS))
            counts = fill(running, admin)
            console = console_of(running)
            status, page = get(console, "/health/ready")
            assert status == 503
            assert full in page
            assert (
                f'tailrace_log_dir_online{{path="{small_disk}/data"}} 0.0'
                in get(console, "/metrics")[1]
            )
            assert full in run(running, "status").stdout.decode()
            producing = subprocess.Popen(
                [TAILRACE, "produce", "orders", "--bootstrap", running.address],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert producing.stdin is not None
            assert producing.stderr is not None
            producing.stdin.write(b"waits\n")
            producing.stdin.close()
            assert (
                b"the producer waits: the appliance's disk is full" in producing.stderr.readline()
            )
            assert producing.poll() is None, "it goes on waiting"
            delete_all(admin, counts)
            said = producing.stderr.read()
            producing.stderr.close()
            assert producing.wait(HANG_LIMIT_S) == 0, said
            assert b"the appliance's disk has room; the producer goes on" in said
            wait_until(lambda: get(console, "/health/ready")[0] == 200, "it is ready")
    finally:
        assert running.stop() == 0


def get(address: str, path: str) -> tuple[int, str]:
    """(status, text)."""
    try:
        with urllib.request.urlopen(address + path, timeout=HANG_LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def read_all(running: EmbeddedAppliance, counts: dict[int, int]) -> dict[int, list[int]]:
    """The offsets of each partition."""
    found: dict[int, list[int]] = {partition: [] for partition in counts}
    with Consumer("orders", bootstrap=running.address, auto_offset_reset="earliest") as consumer:
        while sum(map(len, found.values())) < sum(counts.values()):
            records = consumer.poll(60_000)
            assert records
            for record in records:
                found[record.partition].append(record.offset)
    return found


def test_what_retention_has_removed_is_closed_though_nobody_reads_on(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """Files of a topic that was read once were held for minutes: `du` said 71 MB, `df` 378 MB."""
    orders = f"{topic}-orders"
    with Admin(appliance.address) as admin, Producer(appliance.address, linger_ms=0) as producer:
        admin.create_topics(NewTopic(orders, 1, {"segment.bytes": 64 << 10}))
        for _ in range(10):
            producer.send(orders, os.urandom(50_000)).result(60)
        with Consumer(orders, bootstrap=appliance.address, auto_offset_reset="earliest") as reader:
            found = 0
            while found < 10:
                found += len(reader.poll(60_000))
        admin.delete_records({TopicPartition(orders, 0): -1})

    def held() -> list[str]:
        links = [
            link
            for pid in children(appliance).values()
            for link in pathlib.Path(f"/proc/{pid}/fd").iterdir()
        ]
        found = []
        for link in links:
            try:
                found.append(os.readlink(link))
            except (FileNotFoundError, TailraceError):
                continue
        return [path for path in found if path.endswith(" (deleted)") and f"/{orders}-" in path]

    wait_until(lambda: not held(), "what was removed is closed")
