"""Freeing files: large files lose their names at once, and are freed by a thread."""

from __future__ import annotations

import errno
import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tailrace.format.directory.files import DiskFiles
from workers.delays import scheduler
from workers.flush import flusher
from workers.segment.disk_space import CHECK_NS, DiskSpace
from workers.segment.files import write_durably
from workers.segment.freeing_files import LARGE_BYTES, FreeingFiles


class Gate(FreeingFiles):
    """Files whose thread waits for a gate before it closes one."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.closed: list[tuple[bool, bool]] = []
        """(was a file without a name, was closed by the thread) of each."""

    def close(self, fd: int) -> None:
        by_thread = threading.current_thread() is self._thread
        if by_thread:
            self.opened.wait()
        self.closed.append((self.is_removed(fd), by_thread))
        super().close(fd)


@pytest.fixture
def files() -> Any:
    gate = Gate()
    yield gate
    gate.opened.set()
    gate.wait_until_free()


def large(path: pathlib.Path) -> str:
    """A file of LARGE_BYTES, sparse."""
    path.touch()
    os.truncate(path, LARGE_BYTES)
    return str(path)


def test_a_large_file_loses_its_name_at_once_and_is_freed_by_the_thread(
    files: Gate, tmp_path: pathlib.Path
) -> None:
    files.unlink(large(tmp_path / "removed"))
    small = tmp_path / "small"
    small.write_bytes(b"new")
    files.rename(str(small), large(tmp_path / "replaced"))
    assert files.list(str(tmp_path)) == ["replaced"]
    assert (tmp_path / "replaced").read_bytes() == b"new"
    assert not files.closed
    files.opened.set()
    files.wait_until_free()
    assert files.closed == [(True, True), (True, True)]


def test_a_directory_goes_when_its_room_is_free(files: Gate, tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "partition"
    directory.mkdir()
    files.unlink(large(directory / "segment"))
    opener = threading.Timer(0.05, files.opened.set)
    opener.start()
    files.remove_directory(str(directory))
    opener.join()
    assert files.closed == [(True, True)]
    assert not directory.exists()


def test_readers_go_on_with_a_file_that_was_freed(files: Gate, tmp_path: pathlib.Path) -> None:
    path = large(tmp_path / "read")
    fd = DiskFiles().open_for_read(path)
    files.opened.set()
    files.unlink(path)
    files.wait_until_free()
    assert (files.is_removed(fd), files.size(fd)) == (True, LARGE_BYTES)
    assert files.read_at(fd, 10, LARGE_BYTES - 10) == bytes(10)
    os.close(fd)


def test_small_files_links_and_missing_ones_are_not_left_to_the_thread(
    files: Gate, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "small").write_bytes(b"x")
    kept = large(tmp_path / "kept")
    (tmp_path / "link").symlink_to(kept)
    files.unlink(str(tmp_path / "small"))
    files.unlink(str(tmp_path / "link"))
    with pytest.raises(FileNotFoundError):
        files.unlink(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        files.rename(str(tmp_path / "missing"), str(tmp_path / "other"))
    assert files.list(str(tmp_path)) == ["kept"]
    assert files._thread is None


def test_a_failed_removal_leaves_no_descriptor_open(files: Gate, tmp_path: pathlib.Path) -> None:
    files.opened.set()
    with pytest.raises(FileNotFoundError):
        files.rename(str(tmp_path / "missing"), large(tmp_path / "kept"))
    files.wait_until_free()
    assert files.closed == [(False, True)]


def test_more_files_than_may_wait_are_freed_by_the_caller(
    files: Gate, tmp_path: pathlib.Path
) -> None:
    files._removed.maxsize = 2
    for number in range(5):
        files.unlink(large(tmp_path / f"{number}"))
    assert files.closed.count((True, False)) >= 2
    assert not files.list(str(tmp_path))


def test_what_waits_to_be_freed_counts_as_free(
    files: Gate, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flusher said for a moment that a disk is full whose room had just been given up."""
    monkeypatch.setattr(DiskFiles, "free_bytes", lambda *_: 0)
    space = DiskSpace(files, str(tmp_path), LARGE_BYTES // 2)
    paths = [tmp_path / name for name in ("removed", "linked")]
    for path in paths:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, LARGE_BYTES)
    (tmp_path / "other").hardlink_to(paths[1])
    for path in paths:
        files.unlink(str(path))
    assert LARGE_BYTES <= files.free_bytes(str(tmp_path)) < 2 * LARGE_BYTES
    assert not space.check(CHECK_NS)
    files.opened.set()
    files.wait_until_free()
    assert files.free_bytes(str(tmp_path)) == 0
    assert space.check(2 * CHECK_NS)


def test_a_write_without_room_waits_for_what_was_removed(
    files: Gate, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_at = DiskFiles.write_at

    def full_until_free(self: Gate, fd: int, pieces: Sequence[Any], position: int) -> None:
        if not self.closed:
            self.opened.set()
            raise OSError(errno.ENOSPC, "no space left on device")
        write_at(self, fd, pieces, position)

    monkeypatch.setattr(DiskFiles, "write_at", full_until_free)
    files.unlink(large(tmp_path / "removed"))
    write_durably(files, str(tmp_path), "new", b"content")
    assert (tmp_path / "new").read_bytes() == b"content"
    assert files.closed[0] == (True, True)


def test_a_write_without_room_fails_if_nothing_was_removed(
    files: Gate, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(DiskFiles, "write_at", full)
    with pytest.raises(OSError):
        write_durably(files, str(tmp_path), "new", b"content")


@pytest.mark.parametrize("process", [flusher, scheduler], ids=["flusher", "scheduler"])
def test_processes_whose_messages_wait_for_removals_use_it(
    process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BuiltError(Exception):
        """The process was built."""

    def build(_: object, files: object) -> None:
        raise BuiltError(type(files))

    for name in ("start", "configure_logging"):
        monkeypatch.setattr(process, name, lambda *_: None)
    monkeypatch.setattr(process, "build", build)
    with pytest.raises(BuiltError) as built:
        process.main()
    assert built.value.args == (FreeingFiles,)
