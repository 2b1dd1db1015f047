"""Compaction on a disk that becomes full, and under a wall clock that jumps: the real cleaner."""

from __future__ import annotations

import os
import pathlib
import random

import pytest

from tailrace import Admin, Producer
from tailrace.core.errors import RequestTimeoutError
from tailrace.embedded_appliance import start_embedded
from tests.kit.appliances.compacted import compact, create, read, update
from tests.kit.hosts.file_systems import small_file_system
from tests.kit.hosts.wall_clock import WallClock
from tests.kit.processes import wait_until

DAY_S = 86_400
SETTINGS = {
    "journal_bytes": 1 << 20, "ring_bytes": 4 << 20, "cleaner.check.interval.ms": 100,
    "disk_reserve_bytes": 8 << 20,
}  # fmt: skip


def state_of(admin: Admin, topic: str) -> str:
    return str(admin.describe_topics(topic)[topic]["partitions"][0]["compaction"]["state"])


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_cleaning_without_room_leaves_all_records_and_goes_on_when_there_is_some(
    tmp_path: pathlib.Path, topic: str
) -> None:
    """Nearly every record has a key of its own, so that a cleaned segment is as large as the ones
    before; producers are not held up by it.
    """
    with small_file_system(tmp_path, 64) as disk:
        running = start_embedded(data_dir=str(disk / "data"), settings=SETTINGS)
        try:
            written, rng = create(running, topic, segment_bytes=16 << 20), random.Random(1)
            with (
                Producer(running.address, linger_ms=1) as producer,
                Admin(running.address) as admin,
            ):
                for number in range(20):
                    value = rng.randbytes(800_000)
                    handle = producer.send(topic, value, b"k%d" % number)
                    written.note(handle.result(60).offset or 0, b"k%d" % number, value)
                free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                with open(disk / "ballast", "wb") as file:
                    file.write(bytes(free - (16 << 20)))
                with pytest.raises(RequestTimeoutError, match="the cleaning goes on"):
                    admin.compact_topic(topic, timeout_ms=0)
                wait_until(
                    lambda: state_of(admin, topic) == "retrying", "the cleaner has found no room"
                )
                assert admin.describe_cluster()["data_dirs"][0]["state"] != "FULL"
                update(producer, written, 20, rng)
                assert read(running.address, written.key) == written.by_offset
                (disk / "ballast").unlink()
                compact(running, topic)
                assert read(running.address, written.key) == written.kept
            assert not list((disk / "data").glob(f"{topic}-0/*.cleaned"))
        finally:
            assert running.stop() == 0


def test_a_clock_that_jumps_over_delete_retention_removes_no_tombstone(
    tmp_path: pathlib.Path, topic: str
) -> None:
    clock = WallClock(tmp_path)
    with clock.installed():
        running = start_embedded(
            data_dir=str(tmp_path / "data"), settings={"cleaner.check.interval.ms": 100}
        )
    try:
        written, rng = create(running, topic, delete_retention_ms="1d"), random.Random(2)
        with Producer(running.address, linger_ms=1) as producer:
            update(producer, written, 300, rng)
            compact(running, topic)
            assert read(running.address, written.key) == written.kept
            assert any(value is None for _, value in written.kept.values())
            for days in (3, -3):
                clock.jump(days * DAY_S)
                update(producer, written, 30, rng)
                compact(running, topic)
                assert read(running.address, written.key) == written.kept, "no time has passed"
    finally:
        assert running.stop() == 0
