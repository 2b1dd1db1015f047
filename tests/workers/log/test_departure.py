"""A copy that goes to another data directory is completed from what the log has now."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pathlib
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from appliance.data import partition_copy
from appliance.data.partition_copy import CopyInUseError, Pace
from shm.messages.lane_messages import Assignment
from tailrace.format.crc32c import Readable
from tailrace.format.directory.data_dir import ARRIVAL_FILE, bin_name
from tailrace.format.directory.delay_files import PENDING_FILE, BucketEntry, Manifest
from tailrace.format.segments.segment import INDEX_SUFFIX, file_name
from tests.kit.batches import TIME_US, TOPIC_ID, make_batch, stamped
from tests.kit.log_files.logs import assignment, bench
from workers.log.files import departure
from workers.segment.files import DiskFiles

NAME = bin_name(TOPIC_ID, 0)
COUNT = 200
"""Rows of a batch: it is longer than what is compared of the beginning."""
LENGTH = len(make_batch(COUNT))


def departing(target: pathlib.Path) -> Assignment:
    return replace(assignment(version=2), departing=str(target), move="this")


def written(tmp_path: pathlib.Path, batches: int) -> pathlib.Path:
    """A log of these batches, whose files nobody writes any more; its active segment."""
    (tmp_path / "data").mkdir()
    (tmp_path / "target").mkdir()
    with bench(str(tmp_path / "data")) as b:
        for _ in range(batches):
            b.send(make_batch(COUNT))
        b.settle()
        [path] = b.segment_paths()
    return pathlib.Path(path)


def copy(segment: pathlib.Path, tmp_path: pathlib.Path) -> int:
    """Copy as `tailrace partition move` does before the partition is closed."""
    with partition_copy.opened(
        str(segment.parent), str(tmp_path / "target"), TOPIC_ID, 0, Pace(0)
    ) as made:
        return made.catch_up(lambda _: None)


def complete(
    segment: pathlib.Path,
    tmp_path: pathlib.Path,
    files: DiskFiles | None = None,
    *,
    delays: bool = False,
) -> int:
    """Complete the copy as the flusher does then. `delays`: it is a delay log."""
    leaving = replace(departing(tmp_path / "target"), delay_of="ab" * 16 if delays else "")
    return departure.complete_copy(files or DiskFiles(), str(segment.parent), leaving)


def replace_batch(segment: pathlib.Path, number: int, batches: int) -> None:
    """Another batch in place of one of the log's, as after a cut."""
    other = stamped(make_batch(COUNT), COUNT * number, append_time_us=TIME_US + 1_000 + number)
    with segment.open("r+b") as file:  # the file keeps its inode
        file.seek(segment.stat().st_size - (batches - number) * LENGTH)
        file.write(other)


@pytest.mark.parametrize("mover_runs_again", [True, False])
def test_batches_that_were_cut_and_written_anew_are_copied_anew(
    tmp_path: pathlib.Path, mover_runs_again: bool
) -> None:
    segment = written(tmp_path, 3)
    copy(segment, tmp_path)
    replace_batch(segment, 1, 3)
    replace_batch(segment, 2, 3)
    if mover_runs_again:
        assert copy(segment, tmp_path) == segment.stat().st_size
        assert (
            tmp_path / "target" / "moving" / NAME / segment.name
        ).read_bytes() == segment.read_bytes()
    complete(segment, tmp_path)
    arrived = tmp_path / "target" / "bin" / NAME / segment.name
    assert arrived.read_bytes() == segment.read_bytes()


@pytest.mark.parametrize("mover_runs_again", [True, False])
def test_a_copy_from_before_the_last_boot_begins_anew(
    tmp_path: pathlib.Path, mover_runs_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = written(tmp_path, 3)
    copy(segment, tmp_path)
    for module in (partition_copy, departure):
        monkeypatch.setattr(module, "this_boot", lambda: 7)
    if mover_runs_again:
        assert copy(segment, tmp_path) == segment.stat().st_size
    assert (complete(segment, tmp_path) >= segment.stat().st_size) is not mover_runs_again
    arrived = tmp_path / "target" / "bin" / NAME / segment.name
    assert arrived.read_bytes() == segment.read_bytes()


def test_a_copy_goes_on_where_it_ended(tmp_path: pathlib.Path) -> None:
    segment = written(tmp_path, 2)
    whole = segment.read_bytes()
    with segment.open("r+b") as file:
        file.truncate(len(whole) - LENGTH)
    assert copy(segment, tmp_path) == len(whole) - LENGTH
    assert copy(segment, tmp_path) == 0
    with segment.open("ab") as file:
        file.write(whole[-LENGTH:])
    assert copy(segment, tmp_path) == LENGTH


def test_a_copy_that_a_mover_works_on_is_not_completed(tmp_path: pathlib.Path) -> None:
    segment = written(tmp_path, 1)
    moving = tmp_path / "target" / "moving" / NAME
    with partition_copy.opened(
        str(segment.parent), str(tmp_path / "target"), TOPIC_ID, 0, Pace(0)
    ) as made:
        made.catch_up(lambda _: None)
        with pytest.raises(OSError, match="copies this partition") as raised:
            complete(segment, tmp_path)
        assert raised.value.errno == errno.EBUSY
        assert moving.is_dir()
    complete(segment, tmp_path)
    assert not moving.exists()


def test_a_mover_that_waited_for_a_completed_copy_leaves_it_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = written(tmp_path, 1)
    lock = fcntl.flock

    def completed_before(fd: int, operation: int) -> None:
        monkeypatch.undo()
        complete(segment, tmp_path)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", completed_before)
    with pytest.raises(CopyInUseError, match="completed meanwhile"):
        copy(segment, tmp_path)


def test_a_copy_that_a_killed_flusher_has_completed_is_left_alone(tmp_path: pathlib.Path) -> None:
    """Its successor reads the order in the ring again; the other flusher may take the copy then."""
    segment = written(tmp_path, 1)
    complete(segment, tmp_path)
    arrived = tmp_path / "target" / "bin" / NAME
    inode = arrived.stat().st_ino
    assert complete(segment, tmp_path) == 0
    assert arrived.stat().st_ino == inode
    arrived.rename(tmp_path / "target" / "t-0")
    with pytest.raises(FileExistsError):
        complete(segment, tmp_path)
    assert not arrived.exists()


class UnreadableArrival(DiskFiles):
    """Files of a process that has no descriptor left for the name of a move, once."""

    has_failed = False

    def open_for_read(self, path: str) -> int:
        if path.endswith(ARRIVAL_FILE) and not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EMFILE, "no descriptors")
        return super().open_for_read(path)


def test_a_complete_copy_whose_name_cannot_be_read_now_is_left_alone(
    tmp_path: pathlib.Path,
) -> None:
    """It may be decided: the partition has no other place then."""
    segment = written(tmp_path, 2)
    complete(segment, tmp_path)
    kept = tmp_path / "target" / "bin" / NAME
    inode = kept.stat().st_ino
    with pytest.raises(OSError, match="no descriptors"):
        departure.complete_copy(
            UnreadableArrival(), str(segment.parent), departing(tmp_path / "target")
        )
    assert kept.stat().st_ino == inode
    assert (kept / segment.name).read_bytes() == segment.read_bytes()
    assert (kept / ARRIVAL_FILE).exists()


def test_copies_that_no_move_can_use_are_removed_and_others_stay(tmp_path: pathlib.Path) -> None:
    segment = written(tmp_path, 1)
    copy(segment, tmp_path)
    moving = tmp_path / "target" / "moving"
    (moving / "gone-0").mkdir()
    (moving / "gone-0" / segment.name).write_bytes(b"of a deleted topic")
    with partition_copy.opened(
        str(segment.parent), str(tmp_path / "target"), bytes(16), 1, Pace(0)
    ):
        partition_copy.remove_left(str(tmp_path / "target"), {NAME})
        assert {path.name for path in moving.iterdir()} == {NAME, bin_name(bytes(16), 1)}
    partition_copy.remove_left(str(tmp_path / "target"), {NAME})
    assert [path.name for path in moving.iterdir()] == [NAME]
    partition_copy.remove_left(str(tmp_path / "nowhere"), set())


class FailingSegments(DiskFiles):
    """Files whose segments cannot be synced, nor written anew, once `fails` is set."""

    fails = False

    def sync_data(self, fd: int) -> None:
        self._check(os.readlink(f"/proc/self/fd/{fd}"))
        super().sync_data(fd)

    def open_for_write(self, path: str, *, exclusive: bool = False) -> int:
        self._check(path)
        return super().open_for_write(path, exclusive=exclusive)

    def _check(self, path: str) -> None:
        if self.fails and ".arrows" in path and "/target/" not in path:
            raise OSError(errno.EIO, "injected")


def test_a_log_that_cannot_be_synced_stays(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "target").mkdir()
    files = FailingSegments()
    with bench(str(tmp_path / "data"), files) as b:
        item = assignment(durability="memory")
        b.assign(item)
        b.settle()
        b.send(make_batch())
        b.settle()
        files.fails = True
        with caplog.at_level(logging.WARNING):
            b.assign(departing(tmp_path / "target"))
            b.settle()
    assert "partition_not_moved" in caplog.text
    assert not (tmp_path / "target" / "bin" / NAME).exists()


class FailsOnce(DiskFiles):
    """Files of which one change in the target directory fails."""

    def __init__(self, number: int, error: int) -> None:
        self.left, self._error = number, error

    def _touch(self, path: str) -> None:
        if "/target" in path:
            self.left -= 1
            if self.left == -1:
                raise OSError(self._error, os.strerror(self._error), path)

    def open_for_write(self, path: str, *, exclusive: bool = False) -> int:
        self._touch(path)
        return super().open_for_write(path, exclusive=exclusive)

    def write_at(self, fd: int, pieces: Sequence[Readable], position: int) -> None:
        self._touch(os.readlink(f"/proc/self/fd/{fd}"))
        super().write_at(fd, pieces, position)

    def truncate(self, fd: int, length: int) -> None:
        self._touch(os.readlink(f"/proc/self/fd/{fd}"))
        super().truncate(fd, length)

    def sync_data(self, fd: int) -> None:
        self._touch(os.readlink(f"/proc/self/fd/{fd}"))
        super().sync_data(fd)

    def sync_directory(self, path: str) -> None:
        self._touch(path)
        super().sync_directory(path)

    def make_directory(self, path: str) -> None:
        self._touch(path)
        super().make_directory(path)

    def rename(self, source: str, target: str) -> None:
        self._touch(source)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._touch(path)
        super().unlink(path)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("delays", [False, True])
def test_a_target_that_fails_at_any_step_leaves_the_log_and_the_next_move_is_complete(
    tmp_path: pathlib.Path, delays: bool, error: int
) -> None:
    segment = written(tmp_path, 3)
    if delays:
        (segment.parent / BUCKET.file_name).write_bytes(b"rows")
        write_pending(segment.parent, replace(BUCKET, end=4))
    before = {path.name: path.read_bytes() for path in segment.parent.iterdir()}
    target = tmp_path / "target"
    for number in range(200):
        files = FailsOnce(number, error)
        with suppress(OSError):
            complete(segment, tmp_path, files, delays=delays)
        if files.left >= 0:
            break  # no step is left to fail
        assert not (target / "bin" / NAME / ARRIVAL_FILE).exists(), "it is not taken for complete"
        if error == errno.ENOSPC:
            assert not list((target / "moving").glob("*/*")), "no space is kept"
        assert {path.name: path.read_bytes() for path in segment.parent.iterdir()} == before
        complete(segment, tmp_path, delays=delays)  # the next move
        arrived = target / "bin" / NAME
        assert {n: (arrived / n).read_bytes() for n in before} == before
        shutil.rmtree(target)
        target.mkdir()
    else:
        raise AssertionError("a copy has not so many steps")


def test_a_swap_between_a_segment_and_its_index_is_copied_anew(tmp_path: pathlib.Path) -> None:
    """The mover copies them one after the other: it has the former segment, and the new index."""
    segment = written(tmp_path, 1)
    directory = segment.parent
    first, second = (
        file_name(1_000),
        file_name(2_000),
    )  # which sort behind: they are the sealed ones
    for name in (first, file_name(1_000, INDEX_SUFFIX), second):
        (directory / name).write_bytes(b"former " + name.encode())

    moving = tmp_path / "target" / "moving" / NAME

    def swap(_: int) -> None:
        is_former = (directory / first).read_bytes().startswith(b"former")
        if is_former and (moving / first).exists():
            for name in (first, file_name(1_000, INDEX_SUFFIX)):
                (directory / "new").write_bytes(b"cleaned " + name.encode())
                (directory / "new").rename(directory / name)

    with partition_copy.opened(str(directory), str(tmp_path / "target"), TOPIC_ID, 0, Pace(0)) as m:
        m.catch_up(swap)
    assert (moving / first).read_bytes().startswith(b"former")
    assert (moving / file_name(1_000, INDEX_SUFFIX)).read_bytes().startswith(b"cleaned")
    complete(segment, tmp_path)
    arrived = tmp_path / "target" / "bin" / NAME
    for name in (first, file_name(1_000, INDEX_SUFFIX), second, segment.name):
        assert (arrived / name).read_bytes() == (directory / name).read_bytes()


BUCKET = BucketEntry(2, 4096, 0, 0, 0, 1, 0)


def write_pending(directory: pathlib.Path, *entries: BucketEntry, cursor: int = 0) -> None:
    manifest = Manifest(TOPIC_ID.hex(), cursor, files=list(entries))
    (directory / PENDING_FILE).write_bytes(manifest.encode())


def test_bucket_files_are_copied_up_to_what_the_manifest_names(tmp_path: pathlib.Path) -> None:
    segment = written(tmp_path, 1)
    bucket = segment.parent / BUCKET.file_name
    bucket.write_bytes(b"a" * 9_000 + b"not valid")
    (segment.parent / "2-0000000000008192-00000001.pending").write_bytes(b"not named")
    (segment.parent / "00000000000000000007.refused").write_bytes(b"refused")
    write_pending(segment.parent, replace(BUCKET, end=9_000))
    assert copy(segment, tmp_path) == segment.stat().st_size + 9_000
    with bucket.open("r+b") as file:  # it is appended to behind the mover
        file.seek(9_000)
        file.write(b"b" * 2_000)
    write_pending(segment.parent, replace(BUCKET, end=10_000), cursor=9)
    pending = (segment.parent / PENDING_FILE).read_bytes()
    index = segment.with_suffix(INDEX_SUFFIX).stat().st_size
    assert (
        complete(segment, tmp_path, DiskFiles(), delays=True) < 1_000 + len(pending) + index + 4_000
    )
    arrived = tmp_path / "target" / "bin" / NAME
    assert (arrived / BUCKET.file_name).read_bytes() == b"a" * 9_000 + b"b" * 1_000
    assert (arrived / PENDING_FILE).read_bytes() == pending
    assert (arrived / "00000000000000000007.refused").read_bytes() == b"refused"
    assert [path.name for path in arrived.glob("*.pending")] == [BUCKET.file_name]


class MovingRows(DiskFiles):
    """The scheduler moves the rows of a bucket to another one while the copy is made."""

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__()
        self._directory = directory

    def open_for_read(self, path: str) -> int:
        old = self._directory / BUCKET.file_name
        if path == str(old) and old.exists():
            lower = replace(BUCKET, number=1, end=5)
            (self._directory / lower.file_name).write_bytes(b"moved")
            write_pending(self._directory, lower)
            old.unlink()
        return super().open_for_read(path)


def test_a_manifest_that_is_replaced_while_it_is_copied_is_read_again(
    tmp_path: pathlib.Path,
) -> None:
    segment = written(tmp_path, 1)
    (segment.parent / BUCKET.file_name).write_bytes(b"rows")
    write_pending(segment.parent, replace(BUCKET, end=4))
    complete(segment, tmp_path, MovingRows(segment.parent), delays=True)
    arrived = tmp_path / "target" / "bin" / NAME
    assert [path.read_bytes() for path in arrived.glob("*.pending")] == [b"moved"]
    assert (arrived / PENDING_FILE).read_bytes() == (segment.parent / PENDING_FILE).read_bytes()


@pytest.mark.parametrize(
    ("content", "reason"), [(b"{", "is damaged"), (None, "of delayed records is missing")]
)
def test_a_damaged_manifest_or_a_missing_bucket_file_keeps_the_partition(
    tmp_path: pathlib.Path, content: bytes | None, reason: str
) -> None:
    segment = written(tmp_path, 1)
    write_pending(segment.parent, replace(BUCKET, end=4))
    if content is not None:
        (segment.parent / PENDING_FILE).write_bytes(content)
    copy(segment, tmp_path)
    with pytest.raises(OSError, match=reason):
        complete(segment, tmp_path, DiskFiles(), delays=True)
    assert not list((tmp_path / "target").glob("bin/*"))
