"""The log's promises with real processes: corruption, truncation, retention, full disks, several directories, kills at named places."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from appliance import manifest
from shm.crash_points import CRASH_POINT_VARIABLE, CRASH_POINTS
from shm.region import names_with
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.data_directory import read_identity
from tailrace.errors import CorruptBatchError, InvalidSettingError, LogTruncatedError, OffsetOutOfRangeError, StorageError, TailraceError
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import children, kill_and_wait_for_successor, wait_until

ORDERS = TopicPartition("orders", 0)


def start(data_dir: pathlib.Path, **settings: Any) -> EmbeddedAppliance:
    return start_embedded(data_dir=str(data_dir), settings=settings, auto_create_topics=False)


def create(appliance: EmbeddedAppliance, partitions: int = 1, **configs: Any) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("orders", partitions, {name.replace("_", "."): value for name, value in configs.items()})])


def produce(appliance: EmbeddedAppliance, first: int, last: int, *, size: int = 0, each: bool = False, acks: Any = "all") -> None:
    """Values "<n>:xxx" from `first` to `last - 1`; `each`: one batch a record."""
    with Producer(appliance.address, acks=acks) as producer:
        for number in range(first, last):
            handle = producer.send("orders", b"%d:" % number + b"x" * size, partition=0)
            if each:
                handle.result(20)


def consumer(appliance: EmbeddedAppliance, offset: int = 0) -> Consumer:
    made = Consumer(bootstrap=appliance.address, auto_offset_reset="none")
    made.assign([ORDERS])
    made.seek(ORDERS, offset)
    return made


def read(appliance: EmbeddedAppliance, count: int, offset: int = 0) -> list[int]:
    """Numbers of the records from `offset` on."""
    with consumer(appliance, offset) as reader:
        found: list[int] = []
        while len(found) < count:
            records = reader.poll(5000)
            assert records, f"only {len(found)} of {count} records came"
            found += [int((record.value or b"").partition(b":")[0]) for record in records]
        return found


def read_all(reader: Consumer, found: list[int]) -> None:
    """Add offsets to `found` until something is raised."""
    while True:
        found += [record.offset for record in reader.poll(5000)]


def kill_everything(appliance: EmbeddedAppliance) -> None:
    os.kill(appliance.pid, signal.SIGKILL)
    appliance.stop()


def segments(data_dir: pathlib.Path) -> list[pathlib.Path]:
    return sorted((data_dir / "orders-0").glob("*.arrows"))


def test_a_damaged_batch_is_never_served_the_range_is_told_and_the_rest_goes_on(tmp_path: pathlib.Path) -> None:
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
            assert [record.offset for record in reader.poll(5000)] == [5, 6, 7, 8]
        verify = subprocess.run(
            [sys.executable, "-P", "-m", "appliance.cli.main", "log", "verify", "--json", str(tmp_path)], capture_output=True, check=False
        )
        assert verify.returncode == 1
        finding = orjson.loads(verify.stdout)["findings"][0]
        assert (finding["severity"], finding["first_offset"], finding["last_offset"]) == ("damage", 4, 4)
    finally:
        assert again.stop() == 0


def test_a_damaged_header_is_found_before_it_is_sent_and_can_be_skipped(tmp_path: pathlib.Path) -> None:
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
                reader.poll(5000)
            assert (caught.value.first_offset, caught.value.next_offset) == (1, 2)
            reader.seek(ORDERS, 2)
            assert [record.offset for record in reader.poll(5000)] == [2, 3, 4]
    finally:
        assert again.stop() == 0


@pytest.mark.parametrize("killed_before_recovery", [False, True])
def test_a_reader_of_a_lost_past_is_told_where_it_parted(tmp_path: pathlib.Path, killed_before_recovery: bool) -> None:
    """Power loss takes what durability=memory never synced: the file is cut, shared memory is gone, the manifest tells of an unclean stop. So it does to
    the next start when the first one after it did not get as far as recovery.
    """
    running = start(tmp_path)
    create(running, durability="memory")
    address = running.address
    produce(running, 0, 6, size=200, each=True, acks=1)
    reader = consumer(running)
    while reader.position(ORDERS) < 6:
        assert reader.poll(5000)
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
        command = [sys.executable, "-P", "-m", "appliance.supervisor", "--data-dir", str(tmp_path), "--listen", address]
        environment = {**os.environ, CRASH_POINT_VARIABLE: "supervisor.after_regions"}
        assert subprocess.run(command, env=environment, capture_output=True, timeout=30, check=False).returncode == -signal.SIGKILL
    again = start_embedded(data_dir=str(tmp_path), listen=address, auto_create_topics=False)
    try:
        with reader, pytest.raises(LogTruncatedError) as caught:
            read_all(reader, [])
        assert caught.value.offset == 3
        produce(again, 100, 102, acks=1)
        assert read(again, 5) == [0, 1, 2, 100, 101]
    finally:
        assert again.stop() == 0


def test_a_partition_that_cannot_be_read_is_asked_for_in_pauses_and_read_again_when_it_is_back(tmp_path: pathlib.Path) -> None:
    appliance = start(tmp_path / "data")
    create(appliance)
    produce(appliance, 0, 10)
    appliance.stop()
    (segment,) = (tmp_path / "data" / "orders-0").glob("*.arrows")
    segment.rename(tmp_path / "kept")
    segment.mkdir()
    appliance = start(tmp_path / "data")
    try:
        with consumer(appliance) as reader:
            refusals = 0
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline or not refusals:
                try:
                    assert reader.poll(10) == []
                except StorageError:
                    refusals += 1
            assert refusals <= reader.metrics()["fetches"] <= 8, "a broken disk does not make its readers busy"
            segment.rmdir()
            (tmp_path / "kept").rename(segment)
            with Admin(appliance.address) as admin:
                admin.bring_online("orders")
            records: list[Any] = []
            while not records:
                try:
                    records = reader.poll(5000)
                except StorageError:
                    continue
            assert len(records) == 10
    finally:
        appliance.stop()


def test_retention_by_bytes_moves_the_log_start_and_readers_below_it_are_told(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path)
    try:
        create(running, segment_bytes=1 << 16, retention_bytes=1 << 17)
        produce(running, 0, 2000, size=400)
        wait_until(lambda: len(segments(tmp_path)) <= 4, "retention removes the oldest segments")
        with consumer(running) as reader:
            first = reader.beginning_offsets([ORDERS])[ORDERS]
            assert first > 0
            with pytest.raises(OffsetOutOfRangeError):
                reader.poll(5000)
        with Consumer("orders", bootstrap=running.address, auto_offset_reset="earliest") as reader:
            assert reader.poll(5000)[0].offset == first
    finally:
        assert running.stop() == 0


def test_delete_records_moves_the_log_start_over_restarts(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path)
    create(running)
    produce(running, 0, 10, each=True)
    with Admin(running.address) as admin:
        assert admin.delete_records({ORDERS: 4}) == {ORDERS: 4}
        with pytest.raises(OffsetOutOfRangeError):
            admin.delete_records({ORDERS: 11})
    kill_everything(running)
    again = start(tmp_path)
    try:
        with pytest.raises(OffsetOutOfRangeError):
            read(again, 1, 3)
        assert read(again, 6, 4) == [4, 5, 6, 7, 8, 9]
        with Admin(again.address) as admin:
            assert admin.delete_records({ORDERS: -1}) == {ORDERS: 10}
        produce(again, 10, 11)
        assert read(again, 1, 10) == [10]
    finally:
        assert again.stop() == 0


def test_a_lease_keeps_segments_from_retention_until_it_ends(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path)
    try:
        create(running, segment_bytes=1 << 16, retention_bytes=1 << 16)
        produce(running, 0, 10, size=400)
        with Admin(running.address) as admin:
            admin.lease_offsets("job", {ORDERS: 0}, 60_000)
            produce(running, 10, 1000, size=400)
            assert read(running, 1000) == list(range(1000))
            admin.lease_offsets("job", {ORDERS: 0}, 0)
        wait_until(lambda: len(segments(tmp_path)) <= 3, "what the lease kept goes")
    finally:
        assert running.stop() == 0


@pytest.mark.parametrize("name", [name for name in CRASH_POINTS if name.startswith(("coordinator.", "supervisor."))])
def test_coordinator_and_supervisor_killed_at_each_named_place(tmp_path: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(tmp_path)
    create(first)
    produce(first, 0, 50)
    kill_everything(first)
    environment = {**os.environ, CRASH_POINT_VARIABLE: name}
    ours, theirs = os.pipe()
    armed = subprocess.Popen(
        [sys.executable, "-P", "-m", "appliance.supervisor", "--data-dir", str(tmp_path), "--listen", f"ipc://{tmp_path}/s", "--set", "ring_bytes=16777216"],
        env=environment, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    address = f"ipc://{tmp_path}/s"
    try:
        if name.startswith("coordinator."):
            with Admin(address) as admin:
                try:
                    admin.create_topics([NewTopic("more")])
                except TailraceError:
                    pass  # killed before it could answer: the decision is carried out all the same
                wait_until(lambda: "more" in admin.list_topics(), "the topic is there")
                with Producer(
                    address, acks="all"
                ) as producer:  # its id is asked for only now: a change that is under way at a kill is given up
                    assert producer.send("more", b"1:").result(30).offset == 0
                wait_until(
                    lambda: any(p["name"] == "coordinator" and p["restarts"] for p in admin.describe_cluster()["processes"]),
                    "it was killed",
                )
            armed.terminate()
            assert armed.wait(30) == 0
        else:
            if name == "supervisor.in_clean_up":
                with Admin(address) as admin:
                    admin.list_topics()
                armed.terminate()
            assert armed.wait(30) == -signal.SIGKILL
    finally:
        armed.kill()
        armed.wait()
    again = start(tmp_path)
    try:
        assert read(again, 50) == list(range(50))
        produce(again, 50, 60)
        assert read(again, 60) == list(range(60))
    finally:
        assert again.stop() == 0
    identity = read_identity(str(tmp_path))
    assert identity is not None
    assert not names_with(identity.prefix)


def test_several_data_directories_share_the_partitions_and_a_forgotten_one_is_named(tmp_path: pathlib.Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    running = start(one, data_dirs=f"{one},{two}")
    try:
        create(running, partitions=4)
        with Producer(running.address, acks="all") as producer:
            for number in range(400):
                producer.send("orders", b"%d:" % number, partition=number % 4)
        assert len(list(one.glob("orders-*"))) == len(list(two.glob("orders-*"))) == 2
    finally:
        kill_everything(running)
    swapped = start(two, data_dirs=f"{two},{one}")  # in another order: the same appliance
    try:
        assert read(swapped, 100) == list(range(0, 400, 4))
    finally:
        assert swapped.stop() == 0
    with pytest.raises(TailraceError, match="data_dirs lacks"):
        start(one)


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_refuses_producers_serves_readers_survives_a_restart_and_resumes(small_disk: pathlib.Path) -> None:
    running = start(small_disk / "data", ring_bytes=1 << 20, lane_bytes=256 << 10, credit_bytes=1 << 20, journal_bytes=1 << 20)
    create(running)
    produce(running, 0, 100, size=1000)
    filler = small_disk / "filler"
    with open(filler, "wb") as file:
        free = os.statvfs(small_disk)
        file.write(bytes(free.f_bavail * free.f_frsize - (3 << 20)))  # less than the reserve is left
    with Producer(running.address, acks="all", delivery_timeout_ms=3000) as producer:

        def is_refused() -> bool:
            return producer.send("orders", b"-1:refused").exception(10) is not None

        wait_until(is_refused, "a full disk refuses")
        error = producer.send("orders", b"-1:refused").exception(10)
        assert error is not None
        assert "DISK_FULL" in str(error)
    with Admin(running.address) as admin:
        assert admin.describe_cluster()["data_dirs"][0]["state"] == "FULL"
    assert read(running, 100)[:100] == list(range(100))
    kill_everything(running)
    with open(filler, "ab") as file:
        free = os.statvfs(small_disk)
        file.write(bytes(free.f_bavail * free.f_frsize))  # nothing at all is left
    again = start(small_disk / "data", ring_bytes=1 << 20, lane_bytes=256 << 10, credit_bytes=1 << 20, journal_bytes=1 << 20)
    try:
        assert read(again, 100)[:100] == list(range(100))
        with Producer(again.address, acks="all") as producer:
            handle = producer.send("orders", b"200:after")
            assert not handle.done()
            filler.unlink()
            assert handle.result(20).offset is not None
    finally:
        assert again.stop() == 0


def test_a_producer_that_was_forgotten_takes_a_new_epoch_and_goes_on_without_a_loss_or_a_duplicate(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path, **{"producer.id.expiration.ms": 1})
    try:
        create(running)
        with Producer(running.address, acks="all") as producer:
            sent = 0

            def is_forgotten() -> bool:
                nonlocal sent
                assert producer.send("orders", b"%d:" % sent, partition=0).result(20).offset == sent
                sent += 1
                return producer.metrics()["epoch_bumps"] > 0

            wait_until(is_forgotten, "a pause of a millisecond between two batches")
        assert read(running, sent) == list(range(sent))
    finally:
        assert running.stop() == 0


def test_retention_by_time_removes_what_is_old_and_a_reader_below_follows_its_reset(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path)
    try:
        create(running, retention_ms=300)
        produce(running, 0, 20, each=True)
        with consumer(running) as reader:
            wait_until(lambda: reader.beginning_offsets([ORDERS])[ORDERS] == 20, "every record is older than 300 ms")
            with pytest.raises(OffsetOutOfRangeError):
                reader.poll(5000)
        with Consumer("orders", bootstrap=running.address, auto_offset_reset="earliest") as reader:
            reader.seek(ORDERS, 0)
            with Admin(running.address) as admin:
                admin.alter_topics({"orders": {"retention.ms": -1}})
            produce(running, 20, 21)
            assert [record.offset for record in reader.poll(5000)] == [20]
    finally:
        assert running.stop() == 0


def test_another_number_of_workers_drains_what_the_old_ones_left(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path, cores="[0]")
    create(running, partitions=3)
    os.kill(children(running)["tr-flusher-0"], signal.SIGSTOP)
    with Producer(running.address, acks=1) as producer:
        for number in range(300):
            producer.send("orders", b"%d:" % number, partition=number % 3)
        producer.flush(20)
    kill_everything(running)
    again = start(tmp_path, cores="[0, 1]" if len(os.sched_getaffinity(0)) > 1 else "auto")
    try:
        assert read(again, 100) == list(range(0, 300, 3))
    finally:
        assert again.stop() == 0


def test_doctor_names_what_is_wrong_and_says_so_by_its_exit_status(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path)

    def doctor() -> tuple[int, dict[str, dict[str, str]]]:
        command = [sys.executable, "-P", "-m", "appliance.cli.main", "doctor", "--json", "--bootstrap", running.address]
        ended = subprocess.run(command, capture_output=True, check=False)
        return ended.returncode, {check["check"]: check for check in orjson.loads(ended.stdout)}

    try:
        create(running)
        code, checks = doctor()
        assert checks["processes"]["level"] == "ok"
        quarantine = tmp_path / "quarantine"
        quarantine.mkdir()
        (quarantine / "orders-0-0-0.json").write_text("{}")
        kill_and_wait_for_successor(running, "tr-worker-0")
        code, checks = doctor()
        assert code == 1
        assert checks[f"quarantine {tmp_path}"]["level"] == "problem"
        assert "worker-0 1 times" in checks["processes"]["detail"]
    finally:
        assert running.stop() == 0


def test_each_partition_of_a_dedicated_topic_has_a_worker_of_its_own_over_kills_and_restarts(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path, dedicated_workers=3, cores="[0]", ring_bytes=1 << 20)
    try:
        create(running, partitions=2, worker_dedicated="true")
        produce(running, 0, 100, acks=1)
        assert {"tr-worker-0", "tr-worker-1", "tr-worker-2"} <= set(children(running))
        with Admin(running.address) as admin:
            assert admin.describe_topics(["orders"])["orders"]["configs"]["worker.dedicated"] is True
            with pytest.raises(InvalidSettingError, match="needs 2 workers more and 1 of dedicated_workers = 3 are free"):
                admin.create_topics([NewTopic("more", 2, {"worker.dedicated": True})])
            with pytest.raises(InvalidSettingError, match="when a topic is created"):
                admin.alter_topics({"orders": {"worker.dedicated": False}})
            admin.create_partitions({"orders": 3})
        wait_until(lambda: "tr-worker-3" in children(running), "the new partition has a worker")
        for name in ("tr-worker-1", "tr-flusher-0", "tr-coord-0", "tr-front-0"):
            kill_and_wait_for_successor(running, name)
        produce(running, 100, 200)
        assert read(running, 200) == list(range(200))
        os.kill(children(running)["tr-flusher-0"], signal.SIGSTOP)
        produce(running, 200, 300, acks=1)
    finally:
        kill_everything(running)
    again = start(tmp_path, dedicated_workers=3)
    try:
        assert read(again, 300) == list(range(300))
        with Admin(again.address) as admin:
            admin.delete_topics(["orders"])
            wait_until(lambda: not {"tr-worker-2", "tr-worker-3", "tr-worker-4"} & set(children(again)), "their workers are gone")
            admin.create_topics([NewTopic("orders", 3, {"worker.dedicated": True})])
        produce(again, 0, 10)
        assert read(again, 10) == list(range(10))
    finally:
        assert again.stop() == 0
    with pytest.raises(TailraceError, match="more partitions than dedicated_workers = 2"):
        start(tmp_path, dedicated_workers=2)
