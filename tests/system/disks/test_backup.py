"""Backups of a running appliance, and what a restore of them has: topics, groups, transactions,
delayed records.
"""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import shutil
import signal
import subprocess

import orjson
import pytest

from appliance.backup.source import log_files
from shm.crash_points import CRASH_POINTS
from tailrace import Admin, Consumer, Producer, TopicPartition
from tailrace.core.errors import NotReachableError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.segments.segment import file_name
from tests.kit.appliances.backups import (
    back_up,
    listed,
    records_in,
    restore,
    run_killed_at,
    verify,
)
from tests.kit.appliances.cleaned_segments import clean_segment, merge_segment, sealed_bases
from tests.kit.appliances.contents import committed, everything, produce
from tests.kit.appliances.killed_directories import start
from tests.kit.appliances.topics import create
from tests.kit.cli import TAILRACE, run
from tests.kit.processes import HANG_LIMIT_S, wait_until

SEGMENT_BYTES = 1 << 20


def test_a_restored_appliance_has_topics_groups_transactions_and_delays(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    create(appliance, topic, 3, segment_bytes=SEGMENT_BYTES)
    later = f"{topic}-later"
    create(appliance, later, 1, delay_enabled=True)
    produce(appliance, topic, range(3_000), size=1_000)
    emptied = f"{topic}-emptied"
    create(appliance, emptied)
    produce(appliance, emptied, range(10))
    with Admin(appliance.address) as admin:
        admin.delete_records({TopicPartition(emptied, 0): -1})
    with Producer(appliance.address, transactional_id=f"{topic}-done") as producer:
        with producer.transaction():
            producer.send(topic, b"committed", partition=0)
        producer.begin_transaction()
        producer.send(topic, b"aborted", partition=1).result(HANG_LIMIT_S)
        producer.abort_transaction()
    with Producer(appliance.address) as producer:
        due = producer.send(later, b"soon", deliver_after=dt.timedelta(seconds=1))
        producer.send(later, b"much later", deliver_after=dt.timedelta(days=1))
        producer.flush()
        due.result(HANG_LIMIT_S)
    with Consumer(
        topic, bootstrap=appliance.address, group_id=f"{topic}-group", auto_offset_reset="earliest"
    ) as consumer:
        assert consumer.poll(timeout_ms=60_000)
        consumer.commit()
    open_one = Producer(
        appliance.address, transactional_id=f"{topic}-open", transaction_timeout_ms=8_000
    )
    open_one.init_transactions()
    open_one.begin_transaction()
    open_one.send(topic, b"open", partition=2).result(HANG_LIMIT_S)
    try:
        back_up(appliance.data_dir, tmp_path / "target")
        assert verify(tmp_path / "target") == []
        offsets = committed(appliance, f"{topic}-group", topic)
    finally:
        open_one.abort_transaction()
        open_one.close()
    expected = everything(appliance, topic)
    with Admin(appliance.address) as admin:
        described = admin.describe_topics([topic])[topic]

    restore(tmp_path / "target", tmp_path / "data")
    assert records_in(tmp_path / "data") > 3_000
    restored = start(tmp_path / "data")
    try:
        wait_until(
            lambda: everything(restored, topic) == expected, "the open transaction is aborted"
        )
        assert committed(restored, f"{topic}-group", topic) == offsets
        with Admin(restored.address) as admin:
            again = admin.describe_topics([topic])[topic]
        assert again["topic_id"] == described["topic_id"]
        wait_until(
            lambda: [value for _, value in everything(restored, later)[0]] == [b"soon"],
            "the delayed record is delivered, once",
        )
        produce(restored, topic, range(10))
        produce(restored, emptied, range(1))
        assert everything(restored, emptied) == {0: [(10, b"0")]}
        with (
            Producer(restored.address, transactional_id=f"{topic}-done") as producer,
            producer.transaction(),
        ):
            producer.send(topic, b"after the restore", partition=0)
        wait_until(
            lambda: everything(restored, topic)[0][-1][1] == b"after the restore",
            "the commit's marker has come",
        )
    finally:
        assert restored.stop() == 0


def test_a_second_backup_sends_what_is_new_alone_and_keep_removes_what_nobody_needs(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    target = tmp_path / "target"
    create(appliance, topic, 2, segment_bytes=SEGMENT_BYTES)
    produce(appliance, topic, range(4_000), size=1_000)
    first = back_up(appliance.data_dir, target, "--copy")
    assert first["sent_bytes"] > 4_000_000
    produce(appliance, topic, range(4_000, 4_100), size=1_000)
    second = back_up(appliance.data_dir, target, "--copy")
    assert 100_000 < second["sent_bytes"] < 1_500_000
    assert [row["backup"] for row in listed(target)] == [first["backup"], second["backup"]]
    restore(target, tmp_path / "then", "--until", first["point"].replace("Z", "999Z"))
    restore(target, tmp_path / "now")
    assert records_in(tmp_path / "now") - records_in(tmp_path / "then") == 100
    third = back_up(appliance.data_dir, target, "--copy", "--keep", "1")
    assert third["removed"] == 2
    assert [row["backup"] for row in listed(target)] == [third["backup"]]
    assert verify(target, "--all") == []
    assert (
        "so old"
        in restore(target, tmp_path / "never", "--until", first["point"], status=1)["error"]
    )


@pytest.mark.parametrize("point", [name for name in CRASH_POINTS if name.startswith("backup.")])
def test_a_backup_killed_at_any_point_leaves_the_one_before(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path, point: str
) -> None:
    target = tmp_path / "target"
    create(appliance, topic, segment_bytes=SEGMENT_BYTES)
    produce(appliance, topic, range(1_500), size=1_000)
    back_up(appliance.data_dir, target)
    produce(appliance, topic, range(1_500, 3_000), size=1_000)
    arguments = ("backup", str(target), "--data-dir", appliance.data_dir, "--keep", "1")
    assert run_killed_at(point, *arguments) == -signal.SIGKILL
    assert verify(target, "--all") == []
    expected = 2 if point == "backup.after_manifest" else 1
    assert len(listed(target)) == expected
    back_up(appliance.data_dir, target, "--keep", "1")
    assert len(listed(target)) == 1
    assert verify(target) == []
    restore(target, tmp_path / "data")
    assert records_in(tmp_path / "data") >= 3_000


@pytest.mark.parametrize("point", [name for name in CRASH_POINTS if name.startswith("restore.")])
def test_a_restore_killed_at_any_point_leaves_nothing_that_starts(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path, point: str
) -> None:
    create(appliance, topic)
    produce(appliance, topic, range(10))
    target, data = tmp_path / "target", tmp_path / "data"
    back_up(appliance.data_dir, target)
    assert run_killed_at(point, "restore", str(target), str(data)) == -signal.SIGKILL
    with pytest.raises(NotReachableError):
        start(data).stop()
    assert "did not end" in restore(target, data, status=1)["error"]


def test_a_backup_that_follows_says_how_far_it_is_behind(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    create(appliance, topic)
    target = tmp_path / "target"
    command = [
        TAILRACE, "backup", str(target), "--data-dir", appliance.data_dir, "--json",
        "--follow", "--interval", "50ms", "--keep", "3",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE) as following:
        try:
            assert following.stdout is not None
            first = orjson.loads(following.stdout.readline())
            assert 0 <= first["seconds_behind"] < HANG_LIMIT_S
            error = back_up(appliance.data_dir, target, status=1)["error"]
            assert "another backup is writing" in error
            produce(appliance, topic, range(100))
            row = first
            while row["offsets"] < first["offsets"] + 100:
                row = orjson.loads(following.stdout.readline())
        finally:
            following.terminate()
    assert len(listed(target)) <= 4
    restore(target, tmp_path / "data")
    assert records_in(tmp_path / "data") >= 100
    back_up(appliance.data_dir, target)


def test_an_encrypted_backup_needs_its_key_and_shows_nothing_without(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("cryptography")
    create(appliance, topic)
    with Producer(appliance.address) as producer:
        producer.send(topic, b"a secret of the house").result(HANG_LIMIT_S)
    key, other = tmp_path / "key", tmp_path / "other"
    for path, digit in ((key, "a"), (other, "b")):
        path.write_text(digit * 64)
        path.chmod(0o600)
    target = tmp_path / "target"
    back_up(appliance.data_dir, target, "--key-file", str(key))
    for path in target.rglob("*"):
        assert not path.is_file() or (
            b"a secret" not in path.read_bytes() and topic.encode() not in path.read_bytes()
        )
    assert verify(target, "--key-file", str(key)) == []
    assert "--key-file" in restore(target, tmp_path / "data", status=1)["error"]
    error = restore(target, tmp_path / "data", "--key-file", str(other), status=1)["error"]
    assert "another key" in error
    restore(target, tmp_path / "data", "--key-file", str(key))
    assert records_in(tmp_path / "data") >= 1
    key.chmod(0o644)
    error = restore(target, tmp_path / "again", "--key-file", str(key), status=1)["error"]
    assert "chmod 0600" in error


def test_restores_refuse_what_they_would_destroy_or_cannot_read(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    create(appliance, topic, segment_bytes=SEGMENT_BYTES)
    produce(appliance, topic, range(2_500), size=1_000)
    target = tmp_path / "target"
    back_up(appliance.data_dir, target, "--copy")
    in_use = pathlib.Path(appliance.data_dir)
    assert "in use" in restore(target, in_use, status=1)["error"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a file").write_text("of another")
    assert "not empty" in restore(target, tmp_path / "full", status=1)["error"]
    assert "no backups" in restore(tmp_path / "full", tmp_path / "data", status=1)["error"]
    assert "not empty" in back_up(appliance.data_dir, tmp_path / "full", status=1)["error"]

    largest = max((target / "objects").rglob("?" * 64), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    largest.chmod(0o600)
    largest.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    [finding] = verify(target, status=1)
    assert "damaged" in finding
    assert "damaged" in restore(target, tmp_path / "data", status=1)["error"]
    with pytest.raises(NotReachableError, match="did not end"):
        start(tmp_path / "data").stop()
    largest.write_bytes(whole)
    assert verify(target) == []

    [path] = (target / "backups").iterdir()
    manifest = path.read_bytes()
    path.write_bytes(manifest.replace(b'"point_us"', b'"point_uz"', 1))
    assert "damaged" in restore(target, tmp_path / "other", status=1)["error"]


def test_a_stopped_directory_is_backed_up_and_a_killed_one_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    directories = f"{tmp_path}/data,{tmp_path}/second"
    first = start(tmp_path / "data", data_dirs=directories)
    create(first, "orders", 2, segment_bytes=SEGMENT_BYTES)
    produce(first, "orders", range(2_000), size=1_000)
    expected = everything(first, "orders")
    assert first.stop() == 0
    assert (tmp_path / "second" / "orders-1").is_dir()
    back_up(tmp_path / "data", tmp_path / "target")
    restore(tmp_path / "target", tmp_path / "restored")
    assert records_in(tmp_path / "restored") == 2_000
    again = start(
        tmp_path / "data", data_dirs=directories
    )  # the backup has left its locks and files
    restored = start(tmp_path / "restored")
    try:
        assert everything(restored, "orders") == expected
        produce(again, "orders", range(10))
        run(again, "topic", "delete", "orders", "--yes")
    finally:
        assert restored.stop() == 0
        again.stop()
    error = back_up(tmp_path / "data", tmp_path / "target", "--follow", status=1)["error"]
    assert "no appliance runs" in error
    (tmp_path / "data" / "shm.json").write_text("{}")  # as a kill leaves it
    error = back_up(tmp_path / "data", tmp_path / "target", status=1)["error"]
    assert "did not stop cleanly" in error


def test_a_damaged_object_is_replaced_by_the_backup_after_its_verification(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    target = tmp_path / "target"
    create(appliance, topic, segment_bytes=2 * SEGMENT_BYTES)
    produce(appliance, topic, range(5_000), size=1_000)
    first = back_up(appliance.data_dir, target, "--copy")
    paths = sorted((target / "objects").rglob("?" * 64), key=lambda path: -path.stat().st_size)
    for path in paths[:2]:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    paths[2].unlink()
    assert len(verify(target, status=1)) == 3
    second = back_up(appliance.data_dir, target, "--copy")
    assert second["warnings"] == []
    assert verify(target, "--all") == []
    assert first["bytes"] <= second["bytes"]
    restore(target, tmp_path / "data")
    assert records_in(tmp_path / "data") >= 5_000


def test_a_segment_that_is_damaged_together_with_its_shared_copy_is_reported(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    create(appliance, topic, segment_bytes=2 * SEGMENT_BYTES)
    produce(appliance, topic, range(5_000), size=1_000)
    target = tmp_path / "target"
    back_up(appliance.data_dir, target)
    segment = min(pathlib.Path(appliance.data_dir, f"{topic}-0").glob("*.arrows"))
    times = segment.stat()
    with segment.open("r+b") as file:  # as a disk does that loses a sector
        file.seek(500_000)
        file.write(b"lost sector")
    os.utime(segment, ns=(times.st_atime_ns, times.st_mtime_ns))
    if not verify(target, status=None):
        pytest.skip("the file system shares blocks, not files")
    error = back_up(appliance.data_dir, target, status=1)["error"]
    assert f"{segment} is damaged" in error
    with Admin(appliance.address) as admin:
        results = {found["target"]: found["error"] for found in admin.describe_cluster()["backups"]}
    assert "is damaged" in results[str(target)]


def test_the_result_of_backups_is_described(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    create(appliance, topic)
    target = tmp_path / "target"

    def result() -> dict[str, object]:
        with Admin(appliance.address) as admin:
            backups = admin.describe_cluster()["backups"]
        return next(found for found in backups if found["target"] == str(target))

    made = back_up(appliance.data_dir, target)
    assert (result()["point_us"], result()["error"]) == (made["point_us"], "")
    marker = target / "tailrace-backup.json"
    kept = marker.read_bytes()
    marker.write_text("{}")
    back_up(appliance.data_dir, target, status=1)
    assert (result()["point_us"], "damaged" in str(result()["error"])) == (made["point_us"], True)
    marker.write_bytes(kept)
    again = back_up(appliance.data_dir, target)
    assert (result()["backup_id"], result()["error"]) == (again["backup"], "")


def test_targets_in_a_data_directory_are_refused_before_anything_is_written(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    data_dir = pathlib.Path(appliance.data_dir)
    for target in (data_dir / "backups-here", data_dir.parent):
        assert "choose a" in back_up(data_dir, target, status=1)["error"]
    assert not (data_dir / "backups-here").exists()
    back_up(data_dir, tmp_path / "target")
    error = restore(tmp_path / "target", tmp_path / "target" / "data", status=1)["error"]
    assert "lies in" in error


def test_a_target_that_is_removed_while_a_backup_follows_is_reported_and_not_made_again(
    appliance: EmbeddedAppliance, topic: str, tmp_path: pathlib.Path
) -> None:
    create(appliance, topic)
    produce(appliance, topic, range(10))
    target = tmp_path / "target"
    command = [
        TAILRACE, "backup", str(target), "--data-dir", appliance.data_dir, "--json",
        "--follow", "--interval", "50ms",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
        try:
            assert following.stdout is not None
            assert following.stderr is not None
            orjson.loads(following.stdout.readline())
            shutil.rmtree(target)
            assert b"s behind" in following.stderr.readline()
        finally:
            following.terminate()
    assert not target.exists()


def test_a_segment_that_was_merged_between_two_backups_is_sent_again(
    tmp_path: pathlib.Path,
) -> None:
    """The merged segment has the inode number of the one before, which was backed up in part."""
    data, target = tmp_path / "data", tmp_path / "target"
    first = start(data)
    create(first, "orders", segment_bytes=SEGMENT_BYTES)
    produce(first, "orders", range(250), size=1_000, batch_size=1_024)
    back_up(data, target)
    produce(first, "orders", range(250, 1_500), size=1_000, batch_size=1_024)
    assert first.stop() == 0
    base = sealed_bases(data / "orders-0")[0]
    assert is_as_written(data / "orders-0", base)
    merge_segment(data / "orders-0", base)
    assert not is_as_written(data / "orders-0", base), "no part of it is taken over"
    back_up(data, target)
    restore(target, tmp_path / "restored")
    assert records_in(tmp_path / "restored") == 1_500


def is_as_written(directory: pathlib.Path, base: int) -> bool:
    """True if a part of a segment that an earlier backup has may be taken over."""
    known = PartitionMetadata.decode((directory / "partition.json").read_bytes())
    assert known is not None
    with open(directory / file_name(base), "rb") as file:
        return log_files._is_as_written(file.fileno(), known)


def test_a_segment_that_was_cleaned_between_two_backups_is_sent_again(
    tmp_path: pathlib.Path,
) -> None:
    """The cleaned segment has the inode number of the one before, which was backed up in part."""
    data, target = tmp_path / "data", tmp_path / "target"
    first = start(data)
    create(first, "orders", segment_bytes=SEGMENT_BYTES)
    produce(first, "orders", range(900), size=1_000)
    back_up(data, target)
    produce(first, "orders", range(900, 1_500), size=1_000)
    assert first.stop() == 0
    kept = clean_segment(data / "orders-0", sealed_bases(data / "orders-0")[0], lambda _: True)
    back_up(data, target)
    (data / "orders-0" / "swap.json").write_text("{}")  # a swap is going on: no index is taken
    back_up(data, target, "--copy")
    restore(target, tmp_path / "restored")
    assert records_in(tmp_path / "restored") == 1_500
    assert kept[:2] == [0, 1]
    restored = start(tmp_path / "restored")
    try:
        assert [offset for offset, _ in everything(restored, "orders")[0]] == list(range(1_500))
    finally:
        assert restored.stop() == 0
