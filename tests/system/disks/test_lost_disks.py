"""A disk that is gone while the appliance runs: its partitions are offline, the others go on."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.backups import back_up, records_in, restore
from tests.kit.appliances.killed_directories import start
from tests.kit.cli import run
from tests.kit.hosts.file_systems import small_file_system
from tests.kit.processes import HANG_LIMIT_S, wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root"),
]


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    with suppress(subprocess.CalledProcessError), small_file_system(tmp_path, 128) as path:
        yield path


def send(appliance: EmbeddedAppliance, partition: int, value: bytes) -> TailraceError | None:
    with Producer(appliance.address, delivery_timeout_ms=20_000) as producer:
        error = producer.send("orders", value, partition=partition).exception(HANG_LIMIT_S)
    assert error is None or isinstance(error, TailraceError)
    return error


def values(appliance: EmbeddedAppliance, partition: int, count: int) -> list[bytes | None]:
    with Consumer(bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition("orders", partition)])
        found: list[bytes | None] = []
        while len(found) < count:
            found += [record.value for record in consumer.poll(timeout_ms=1_000)]
    return found


def test_a_disk_that_is_gone_takes_only_its_partitions_offline(
    tmp_path: pathlib.Path, disk: pathlib.Path
) -> None:
    second = disk / "data"
    running = start(tmp_path / "data", data_dirs=f"{tmp_path}/data,{second}")
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("orders", 2), NewTopic("other", 1)])
        for partition in (0, 1):
            assert send(running, partition, b"%d" % partition) is None
        assert (second / "orders-1").is_dir()
        back_up(running.data_dir, tmp_path / "target")
        subprocess.run(["umount", "-l", str(disk)], check=True)  # open files stay usable

        wait_until(
            lambda: (
                (error := send(running, 1, b"x")) is not None
                and error.code is ErrorCode.PARTITION_OFFLINE
            ),
            "the partition is offline",
        )
        assert send(running, 0, b"goes on") is None
        assert values(running, 0, 2) == [b"0", b"goes on"]
        with Admin(running.address) as admin:
            described = admin.describe_cluster()
            here, there = (row["state"] for row in described["data_dirs"])
            assert here == "OK"
            assert there in ("LOST", "UNREADABLE")
            offline = {(row["topic"], row["partition"]) for row in described["offline"]}
            assert ("orders", 1) in offline
            assert ("orders", 0) not in offline
            admin.create_topics([NewTopic("new", 2)])  # not there
        assert {path.name for path in (tmp_path / "data").glob("new-*")} == {"new-0", "new-1"}
        status = run(running, "status").stdout.decode()
        assert "cannot be used, its disk is gone" in status

        error = back_up(running.data_dir, tmp_path / "target", status=1)["error"]
        assert "cannot be read" in error
        restore(tmp_path / "target", tmp_path / "orders", "--topic", "orders")
        assert records_in(tmp_path / "orders") == 2
        assert not (tmp_path / "orders" / "other-0").exists()
        error = restore(tmp_path / "target", tmp_path / "x", "--topic", "none", status=1)["error"]
        assert "has no topic 'none'" in error
    finally:
        assert running.stop() == 0
    restored = start(tmp_path / "orders")
    try:
        assert values(restored, 1, 1) == [b"1"]
        with Admin(restored.address) as admin:
            assert admin.list_topics() == ["orders"]
    finally:
        assert restored.stop() == 0
