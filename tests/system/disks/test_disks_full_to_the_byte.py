"""Disks that other programs have filled to the last byte: the appliance keeps its own books from
its reserve, each way out makes room, and the reserve is made again.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tailrace.format.directory.data_dir import RESERVE_FILE
from tests.kit.hosts.file_systems import ext4_image, fill_to_the_byte, small_file_system
from tests.kit.processes import HANG_LIMIT_S, children, wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root"),
]
SETTINGS = {"journal_bytes": 1 << 20, "ring_bytes": 4 << 20, "hang_timeout_ms": 4_000}
ORDERS = TopicPartition("orders", 0)
RECORDS = 40
KEPT = 2
"""Records that stay where a part is removed: their copy fits the reserve."""
GROUPS = 5
WayOut = Callable[[Admin], object]
WAYS_OUT: dict[str, WayOut] = {
    "delete_records": lambda admin: admin.delete_records({ORDERS: -1}),
    "delete_records of a part": lambda admin: admin.delete_records({ORDERS: RECORDS - KEPT}),
    "retention.ms": lambda admin: admin.alter_topics({"orders": {"retention.ms": 1}}),
    "retention.bytes": lambda admin: admin.alter_topics(
        {"orders": {"retention.bytes": KEPT * 100_000}}
    ),
    "segment.bytes": lambda admin: admin.alter_topics(
        {"orders": {"segment.bytes": 1 << 20, "retention.bytes": KEPT * 100_000}}
    ),
    "deletion of a topic": lambda admin: admin.delete_topics(["old"]),
}


@contextmanager
def running_on(disk: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    running = start_embedded(data_dir=str(disk / "data"), settings=SETTINGS)
    try:
        yield running
    finally:
        assert running.stop() == 0


def prepare(running: EmbeddedAppliance) -> None:
    """Two topics with records, and a group."""
    with Admin(running.address) as admin, Producer(running.address, acks="all") as producer:
        admin.create_topics([NewTopic("orders"), NewTopic("old")])
        for number in range(RECORDS):
            producer.send("orders", os.urandom(100_000), partition=0)
            producer.send("old", os.urandom(100_000), partition=0)
            if number % 10 == 9:
                producer.flush()
    commit(running, "before", 1)


def commit(running: EmbeddedAppliance, group: str, offset: int) -> None:
    with Consumer(bootstrap=running.address, group_id=group) as consumer:
        consumer.assign([ORDERS])
        consumer.commit({ORDERS: offset})


def state_of(admin: Admin) -> str:
    return str(admin.describe_cluster()["data_dirs"][0]["state"])


def removed_files_open(running: EmbeddedAppliance) -> list[str]:
    found = []
    for pid in children(running).values():
        for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except FileNotFoundError:
                continue
            if target.startswith(running.data_dir) and target.endswith(" (deleted)"):
                found.append(target)
    return found


def reserve_bytes(disk: pathlib.Path) -> int:
    return (disk / "data" / RESERVE_FILE).stat().st_size


def check_way_out(disk: pathlib.Path, way_out: WayOut) -> None:
    """The books are kept on a disk without one free byte; the way out makes room for records."""
    with running_on(disk) as running:
        prepare(running)
        whole = reserve_bytes(disk)
        fill_to_the_byte(disk / "filler")
        for number in range(GROUPS):
            commit(running, f"group-{number}", number)
        assert 0 < reserve_bytes(disk) < whole
        with Admin(running.address) as admin:
            wait_until(lambda: state_of(admin) == "FULL", "the directory counts as full")
            health = admin.describe_cluster()["data_dirs"][0]
            assert health["path"] == f"{disk}/data"
            with Producer(running.address, acks="all", delivery_timeout_ms=1_000) as producer:

                def is_refused() -> bool:
                    handle = producer.send("orders", b"x", partition=0)
                    return "DISK_FULL" in str(handle.exception(60))

                wait_until(is_refused, "a record is refused, and told why")
            before = free_bytes(disk)
            way_out(admin)
            wait_until(lambda: free_bytes(disk) > before + (1 << 20), "there is room on the disk")
            wait_until(lambda: not removed_files_open(running), "what was removed is closed")
            (disk / "filler").unlink()
            wait_until(lambda: state_of(admin) != "FULL", "the directory takes writes")
            with Producer(running.address, acks="all") as producer:
                offset = producer.send("orders", b"after", partition=0).result(HANG_LIMIT_S).offset
            assert offset == RECORDS
            wait_until(lambda: reserve_bytes(disk) == whole, "the reserve is whole again")
    with running_on(disk) as again, Consumer(bootstrap=again.address, group_id="group-3") as reader:
        assert reader.committed([ORDERS])[ORDERS] == 3


def free_bytes(disk: pathlib.Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


@pytest.mark.slow_because("a directory without writes is checked every 5 s")
@pytest.mark.parametrize("way_out", ["delete_records of a part"])
def test_a_disk_filled_to_the_byte_keeps_the_books_and_has_a_way_out(
    way_out: str, tmp_path: pathlib.Path
) -> None:
    with small_file_system(tmp_path, 64) as disk:
        check_way_out(disk, WAYS_OUT[way_out])


@pytest.mark.long
@pytest.mark.parametrize("way_out", WAYS_OUT)
@pytest.mark.parametrize("size_mib", [96, 420])
def test_an_ext4_filled_to_the_byte_keeps_the_books_and_has_each_way_out(
    size_mib: int, way_out: str, tmp_path: pathlib.Path
) -> None:
    with ext4_image(tmp_path, size_mib) as disk:
        check_way_out(disk, WAYS_OUT[way_out])
