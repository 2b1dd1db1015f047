"""A data directory of format 3, whose segments end in `.arrow`: renamed at start, also halfway; two
different files for one offset are refused.
"""

from __future__ import annotations

import pathlib
from datetime import timedelta

import pyarrow as pa
import pytest

from appliance.observe.checks import log_verifier as log_check
from appliance.observe.checks.findings import Severity
from shm.crash_points import armed
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded
from tailrace.format.directory import checked_json
from tailrace.format.directory.partition_metadata import (
    FORMAT_VERSION,
    PARTITION_FILE,
    PartitionMetadata,
)
from tailrace.format.segments.segment import OLD_SEGMENT_SUFFIX, SEGMENT_SUFFIX
from tests.kit.batches import make_batch
from tests.kit.log_files.logs import bench
from tests.kit.processes import HANG_LIMIT_S
from workers.segment.files import DiskFiles
from workers.segment.migrate_suffix import rename_segments


def suffixes(directory: pathlib.Path) -> list[str]:
    return sorted(path.suffix for path in directory.iterdir() if path.suffix.startswith(".arrow"))


def make_old(directory: pathlib.Path, keep: int = 0) -> None:
    """Make what a build of format 3 leaves. So many segments as `keep` have their new name."""
    for path in sorted(directory.glob(f"*{SEGMENT_SUFFIX}"))[keep:]:
        path.rename(path.with_suffix(OLD_SEGMENT_SUFFIX))
    path = directory / PARTITION_FILE
    fields = checked_json.decode(path.read_bytes())
    assert isinstance(fields, dict)
    path.write_bytes(checked_json.encode({**fields, "format": 3}))


class Killed(BaseException):
    """The process is gone."""


def kill() -> None:
    raise Killed


def test_a_kill_at_each_rename_leaves_what_the_next_start_finishes(tmp_path: pathlib.Path) -> None:
    contents = {f"{base:020d}": b"segment %d" % base for base in (0, 7, 300)}
    for killed_at in (1, 2, 3):
        directory = tmp_path / str(killed_at)
        directory.mkdir()
        for stem, data in contents.items():
            (directory / f"{stem}{OLD_SEGMENT_SUFFIX}").write_bytes(data)
            (directory / f"{stem}.index").write_bytes(b"index")
        with armed("recovery.in_suffix_change", kill, killed_at), pytest.raises(Killed):
            rename_segments(DiskFiles(), str(directory))
        assert (
            suffixes(directory)
            == [OLD_SEGMENT_SUFFIX] * (3 - killed_at) + [SEGMENT_SUFFIX] * killed_at
        )
        assert rename_segments(DiskFiles(), str(directory)) == 3 - killed_at
        assert rename_segments(DiskFiles(), str(directory)) == 0
        assert {
            path.stem: path.read_bytes() for path in directory.glob(f"*{SEGMENT_SUFFIX}")
        } == contents
        assert suffixes(directory) == [SEGMENT_SUFFIX] * 3


def test_a_copy_under_both_names_goes_and_two_different_files_are_refused_untouched(
    tmp_path: pathlib.Path,
) -> None:
    old, new = tmp_path / f"{5:020d}{OLD_SEGMENT_SUFFIX}", tmp_path / f"{5:020d}{SEGMENT_SUFFIX}"
    old.write_bytes(b"same")
    new.write_bytes(b"same")
    assert rename_segments(DiskFiles(), str(tmp_path)) == 1
    assert (old.exists(), new.read_bytes()) == (False, b"same")
    for other in (b"diff", b"longer than that"):
        old.write_bytes(other)
        with pytest.raises(OSError, match="move one of the two out of the directory"):
            rename_segments(DiskFiles(), str(tmp_path))
        assert (old.read_bytes(), new.read_bytes()) == (other, b"same")


def test_links_from_one_name_to_the_other_never_cost_the_bytes(tmp_path: pathlib.Path) -> None:
    """Some had given tools, which go by the suffix, a link with the new one."""
    for number, (is_new_link, is_old_link) in enumerate(
        [(True, False), (False, True), (False, False)]
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        old, new = (
            directory / f"{5:020d}{OLD_SEGMENT_SUFFIX}",
            directory / f"{5:020d}{SEGMENT_SUFFIX}",
        )
        (new if is_old_link else old).write_bytes(b"the only copy")
        if is_new_link:
            new.symlink_to(old.name)
        elif is_old_link:
            old.symlink_to(new.name)
        else:
            new.hardlink_to(old)
        assert rename_segments(DiskFiles(), str(directory)) == 1
        assert [path.name for path in directory.iterdir()] == [new.name]
        assert (new.is_symlink(), new.read_bytes()) == (False, b"the only copy")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"the only copy")
    for path in (old, new):
        path.unlink(missing_ok=True)
        path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="move one of the two out of the directory"):
        rename_segments(DiskFiles(), str(directory))
    assert (old.is_symlink(), new.is_symlink(), elsewhere.read_bytes()) == (
        True,
        True,
        b"the only copy",
    )


def test_names_that_only_look_like_segments_are_left_alone(tmp_path: pathlib.Path) -> None:
    for stem in ("\u00b2" * 20, "\u0663" * 20, "9" * 20, "notes", "1"):
        (tmp_path / f"{stem}{OLD_SEGMENT_SUFFIX}").write_bytes(b"")
    assert rename_segments(DiskFiles(), str(tmp_path)) == 0
    assert suffixes(tmp_path) == [OLD_SEGMENT_SUFFIX] * 5


def test_worker_and_flusher_go_on_behind_renamed_segments_whichever_have_their_new_name(
    tmp_path: pathlib.Path,
) -> None:
    with bench(str(tmp_path)) as b:
        directory = tmp_path / "t-0"
        sent = 0
        for keep in (0, 1, 2):
            for count in (3, 4):
                b.send(make_batch(count))
                b.settle()
                sent += count
                log = b.flusher._logs.get(0)
                assert log is not None
                log.roll()
            b.flusher.close()
            make_old(directory, keep)
            assert OLD_SEGMENT_SUFFIX in suffixes(directory)
            b = b.restarted(f"run-{keep}")
            b.settle()
            assert b.table.read(0).log_end_offset == sent
            assert set(suffixes(directory)) == {SEGMENT_SUFFIX}
        b.flusher.close()
        values = [pa.ipc.open_stream(path).read_all().num_rows for path in b.segment_paths()]
        assert sum(values) == sent


def test_an_appliance_serves_a_directory_of_the_previous_format_without_its_catalog_too(
    tmp_path: pathlib.Path,
) -> None:
    topics = ("plain", "later")
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    with Admin(running.address) as admin, Producer(running.address, acks="all") as producer:
        admin.create_topics(
            [
                NewTopic("plain", 2, {"segment.bytes": 65536}),
                NewTopic("later", 1, {"delay.enabled": True}),
            ]
        )
        for number in range(60):
            producer.send("plain", b"%d" % number + bytes(4000), partition=number % 2).result(
                HANG_LIMIT_S
            )
        producer.send("later", b"due now").result(HANG_LIMIT_S)
        producer.send("later", b"due later", deliver_after=timedelta(hours=5)).result(HANG_LIMIT_S)
    assert running.stop() == 0
    directories = [tmp_path / name for name in ("plain-0", "plain-1", "later-0", "later@delay-0")]
    for directory in directories:
        make_old(directory, keep=1 if directory.name == "plain-1" else 0)
    found = log_check.check([str(directory) for directory in directories])
    assert (found.records, found.worst) == (62, Severity.REPAIRABLE), (
        "`log verify` reads both suffixes"
    )
    for path in tmp_path.glob("coordinator.db*"):
        path.unlink()

    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        values: list[bytes] = []
        with Consumer(*topics, bootstrap=running.address, auto_offset_reset="earliest") as consumer:
            while len(values) < 61:
                values += [(record.value or b"").rstrip(b"\0") for record in consumer.poll(10_000)]
        assert sorted(values) == sorted([*(b"%d" % number for number in range(60)), b"due now"])
        with Admin(running.address) as admin, Producer(running.address, acks="all") as producer:
            (delay,) = admin.list_delays("later")
            assert admin.cancel_delays([delay.delay_id]) == {delay.delay_id: None}
            assert producer.send("plain", b"more", partition=0).result(HANG_LIMIT_S).offset == 30
        for directory in directories:
            assert set(suffixes(directory)) == {SEGMENT_SUFFIX}
    finally:
        assert running.stop() == 0
    found = log_check.check([str(directory) for directory in directories])
    assert found.worst is None
    for directory in directories:
        data = (directory / PARTITION_FILE).read_bytes()
        assert PartitionMetadata.decode(data) is not None
        assert f'"format":{FORMAT_VERSION}'.encode() in data
