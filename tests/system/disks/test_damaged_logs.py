"""Segments that are damaged, cut or unreadable: readers are told the range, never served it, and go
on behind it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import orjson
import pytest

from appliance.data import region_manifest as manifest
from shm.crash_points import CRASH_POINT_VARIABLE
from tailrace import Admin
from tailrace.core.errors import CorruptBatchError, LogTruncatedError, StorageError
from tailrace.embedded_appliance import start_embedded
from tailrace.format.segments.segment import SEGMENT_SUFFIX
from tests.kit.appliances.orders import (
    ORDERS,
    consumer,
    create,
    kill_everything,
    produce,
    read,
    read_all,
    segments,
    start,
)
from tests.kit.processes import HANG_LIMIT_S


def test_a_damaged_batch_is_never_served_the_range_is_told_and_the_rest_goes_on(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path)
    create(running)
    produce(running, 0, 9, size=500, each=True)
    running.stop()
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[bytes(data).index(b"4:xxx") + 20] ^= 1
    path.write_bytes(data)
    again = start(tmp_path)
    try:
        with consumer(again) as reader:
            found: list[int] = []
            with pytest.raises(CorruptBatchError, match="offsets 4 to 4 are damaged") as caught:
                read_all(reader, found)
            assert found == [0, 1, 2, 3]
            assert caught.value.next_offset == 5
            reader.seek(ORDERS, caught.value.next_offset)
            assert [record.offset for record in reader.poll(60_000)] == [5, 6, 7, 8]
        verify = subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "appliance.cli.main",
                "log",
                "verify",
                "--json",
                str(tmp_path),
            ],
            capture_output=True,
            check=False,
        )
        assert verify.returncode == 1
        finding = orjson.loads(verify.stdout)["findings"][0]
        assert (finding["severity"], finding["first_offset"], finding["last_offset"]) == (
            "damage",
            4,
            4,
        )
    finally:
        assert again.stop() == 0


def test_a_damaged_header_is_found_before_it_is_sent_and_can_be_skipped(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path)
    create(running)
    produce(running, 0, 5, size=500, each=True)
    running.stop()
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    second = bytes(data).index(b"TRB1", bytes(data).index(b"TRB1") + 1)
    data[second : second + 4] = b"XXXX"
    path.write_bytes(data)
    again = start(tmp_path)
    try:
        with consumer(again, 1) as reader:
            with pytest.raises(CorruptBatchError) as caught:
                reader.poll(60_000)
            assert (caught.value.first_offset, caught.value.next_offset) == (1, 2)
            reader.seek(ORDERS, 2)
            assert [record.offset for record in reader.poll(60_000)] == [2, 3, 4]
    finally:
        assert again.stop() == 0


@pytest.mark.parametrize("killed_before_recovery", [False, True])
def test_a_reader_of_a_lost_past_is_told_where_it_parted(
    tmp_path: pathlib.Path, killed_before_recovery: bool
) -> None:
    """Power loss takes what durability=memory never synced: the file is cut, shared memory is gone,
    the manifest tells of an unclean stop. So it does to the next start when the first one after it
    did not get as far as recovery.
    """
    address = f"ipc://{tmp_path}/socket"
    running = start_embedded(data_dir=str(tmp_path), listen=address, auto_create_topics=False)
    create(running, durability="memory")
    produce(running, 0, 6, size=200, each=True, acks=1)
    reader = consumer(running)
    while reader.position(ORDERS) < 6:
        assert reader.poll(60_000)
    kill_everything(running)
    told = manifest.read(str(tmp_path)).manifest
    assert told is not None
    for name in told.regions.values():
        pathlib.Path("/dev/shm" + name).unlink(missing_ok=True)
    manifest.write(str(tmp_path), dataclasses.replace(told, boot_id="00" * 16))
    path = segments(tmp_path)[0]
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"3:xxx") - 20])
    for checkpoint in path.parent.glob("checkpoint.*"):
        checkpoint.unlink()
    if killed_before_recovery:
        command = [
            sys.executable,
            "-P",
            "-m",
            "appliance.supervise.supervisor",
            "--data-dir",
            str(tmp_path),
            "--listen",
            address,
        ]
        environment = {**os.environ, CRASH_POINT_VARIABLE: "supervisor.after_regions"}
        assert (
            subprocess.run(
                command, env=environment, capture_output=True, timeout=HANG_LIMIT_S, check=False
            ).returncode
            == -signal.SIGKILL
        )
    again = start_embedded(data_dir=str(tmp_path), listen=address, auto_create_topics=False)
    try:
        with reader, pytest.raises(LogTruncatedError) as caught:
            read_all(reader, [])
        assert caught.value.offset == 3
        produce(again, 100, 102, acks=1)
        assert read(again, 5) == [0, 1, 2, 100, 101]
    finally:
        assert again.stop() == 0


def test_a_partition_that_cannot_be_read_is_asked_for_in_pauses_and_read_again_when_it_is_back(
    tmp_path: pathlib.Path,
) -> None:
    appliance = start(tmp_path / "data")
    create(appliance)
    produce(appliance, 0, 10)
    appliance.stop()
    (segment,) = (tmp_path / "data" / "orders-0").glob(f"*{SEGMENT_SUFFIX}")
    segment.rename(tmp_path / "kept")
    segment.mkdir()
    appliance = start(tmp_path / "data")
    try:
        with consumer(appliance) as reader:
            refusals, begun = 0, time.monotonic()
            while time.monotonic() < begun + 1 or not refusals:
                try:
                    assert reader.poll(10) == []
                except StorageError:
                    refusals += 1
            fetches_a_second = reader.metrics()["fetches"] / (time.monotonic() - begun)
            assert fetches_a_second <= 8, "a broken disk does not make its readers busy"
            assert refusals <= reader.metrics()["fetches"]
            segment.rmdir()
            (tmp_path / "kept").rename(segment)
            with Admin(appliance.address) as admin:
                admin.bring_online("orders")
            records: list[Any] = []
            while not records:
                try:
                    records = reader.poll(60_000)
                except StorageError:
                    continue
            assert len(records) == 10
    finally:
        appliance.stop()
