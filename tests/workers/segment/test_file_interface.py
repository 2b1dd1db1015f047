"""The file interface's conformance suite: the real disk, the one that frees removed files apart and
the simulated one behave alike, in what they return and in what they raise.
"""

from __future__ import annotations

import errno
import os
import pathlib
import random

import pytest

from tailrace.format.directory.files import (
    IOV_MAX,
    NO_PLAIN_FILE,
    TEMPORARY_SUFFIX,
    DiskFiles,
    Files,
    replace_file,
)
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.segment.files import read_whole, remove_tree, write_durably
from workers.segment.freeing_files import FreeingFiles


@pytest.fixture(params=["disk", "freeing", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> tuple[Files, str]:
    """Files, and an empty directory there."""
    if request.param == "disk":
        return DiskFiles(), str(tmp_path)
    if request.param == "freeing":
        return FreeingFiles(), str(tmp_path)
    return SimFiles(SimDisk(("/data",))), "/data"


def put(files: Files, path: str, data: bytes) -> None:
    fd = files.open_for_write(path)
    files.truncate(fd, 0)
    files.write_at(fd, [data], 0)
    files.close(fd)


def test_bytes_lie_where_they_were_written_and_a_gap_reads_as_zeroes(
    place: tuple[Files, str],
) -> None:
    files, root = place
    fd = files.open_for_write(f"{root}/a")
    assert (files.size(fd), files.read_at(fd, 10, 0)) == (0, b"")
    files.write_at(fd, [b"one", b"", memoryview(b"two"), bytearray(b"three")], 4)
    assert files.read_at(fd, 100, 0) == b"\0\0\0\0onetwothree"
    assert (files.read_at(fd, 3, 4), files.read_at(fd, 3, 14), files.read_at(fd, 3, 50)) == (
        b"one",
        b"e",
        b"",
    )
    files.write_at(fd, [b"TWO"], 7)
    files.write_at(fd, [], 0)
    many = [b"%d," % number for number in range(3 * IOV_MAX + 1)]
    files.write_at(fd, many, 15)
    assert files.read_at(fd, 1 << 20, 4) == b"oneTWOthree" + b"".join(many)
    files.truncate(fd, 9)
    assert (files.size(fd), files.read_at(fd, 100, 0)) == (9, b"\0\0\0\0oneTW")
    files.truncate(fd, 12)
    assert files.read_at(fd, 100, 0) == b"\0\0\0\0oneTW\0\0\0"
    files.sync_data(fd)
    files.close(fd)
    with pytest.raises(OSError) as error:
        files.read_at(fd, 1, 0)
    assert error.value.errno == errno.EBADF


def test_a_file_that_is_removed_or_replaced_is_known_by_its_descriptor(
    place: tuple[Files, str],
) -> None:
    files, root = place
    for name in ("kept", "removed", "replaced", "other"):
        put(files, f"{root}/{name}", b"x")
    fds = {
        name: files.open_for_read(f"{root}/{name}")
        for name in ("kept", "removed", "replaced", "other")
    }
    assert not any(files.is_removed(fd) for fd in fds.values())
    files.unlink(f"{root}/removed")
    files.rename(f"{root}/other", f"{root}/replaced")
    assert {name: files.is_removed(fd) for name, fd in fds.items()} == {
        "kept": False,
        "removed": True,
        "replaced": True,
        "other": False,
    }
    for fd in fds.values():
        files.close(fd)


def test_opening_keeps_what_is_there_and_says_what_is_not(place: tuple[Files, str]) -> None:
    files, root = place
    put(files, f"{root}/a", b"kept")
    fd = files.open_for_write(f"{root}/a")
    assert files.read_at(fd, 10, 0) == b"kept"
    files.close(fd)
    with pytest.raises(FileExistsError):
        files.open_for_write(f"{root}/a", exclusive=True)
    files.close(files.open_for_write(f"{root}/b", exclusive=True))
    assert read_whole(files, f"{root}/b") == b""
    for missing in (f"{root}/c", f"{root}/none/c"):
        with pytest.raises(FileNotFoundError):
            files.open_for_read(missing)
    with pytest.raises(FileNotFoundError):
        files.open_for_write(f"{root}/none/c")
    files.make_directory(f"{root}/d")
    for opened in (files.open_for_read, files.open_for_write):
        with pytest.raises(OSError) as error:
            opened(f"{root}/d")
        assert error.value.errno in NO_PLAIN_FILE


def test_directories_are_listed_in_order_and_without_what_lies_deeper(
    place: tuple[Files, str],
) -> None:
    files, root = place
    for name in ("b", "a", "a.b"):
        put(files, f"{root}/{name}", b"")
    files.make_directory(f"{root}/d")
    put(files, f"{root}/d/inner", b"")
    assert files.list(root) == ["a", "a.b", "b", "d"]
    assert files.list(f"{root}/d") == ["inner"]
    assert [files.exists(f"{root}/{name}") for name in ("a", "d", "d/inner", "none", "inner")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(FileNotFoundError):
        files.list(f"{root}/none")
    with pytest.raises(FileNotFoundError):
        files.sync_directory(f"{root}/none")
    with pytest.raises(FileExistsError):
        files.make_directory(f"{root}/d")
    with pytest.raises(FileNotFoundError):
        files.make_directory(f"{root}/none/d")
    files.sync_directory(root)


def test_a_rename_replaces_a_file_takes_a_directory_with_what_it_has_and_keeps_what_is_open(
    place: tuple[Files, str],
) -> None:
    files, root = place
    put(files, f"{root}/new", b"new")
    put(files, f"{root}/old", b"old")
    fd = files.open_for_read(f"{root}/old")
    files.rename(f"{root}/new", f"{root}/old")
    assert (files.list(root), read_whole(files, f"{root}/old"), files.read_at(fd, 10, 0)) == (
        ["old"],
        b"new",
        b"old",
    )
    files.close(fd)
    with pytest.raises(FileNotFoundError):
        files.rename(f"{root}/none", f"{root}/old")
    files.make_directory(f"{root}/d")
    put(files, f"{root}/d/inner", b"inner")
    files.rename(f"{root}/d", f"{root}/e")
    assert (files.list(root), read_whole(files, f"{root}/e/inner")) == (["e", "old"], b"inner")
    files.make_directory(f"{root}/f")
    with pytest.raises(OSError) as error:
        files.rename(f"{root}/f", f"{root}/e")
    assert error.value.errno in (errno.ENOTEMPTY, errno.EEXIST)
    with pytest.raises(IsADirectoryError):
        files.rename(f"{root}/old", f"{root}/e")
    with pytest.raises(NotADirectoryError):
        files.rename(f"{root}/f", f"{root}/old")


def test_a_loss_of_power_leaves_a_renamed_file_with_one_of_its_names() -> None:
    disk = SimDisk(("/data",))
    files = SimFiles(disk)
    write_durably(files, "/data", "old", b"content")
    files.rename("/data/old", "/data/new")
    found = {tuple(disk.lose_power(random.Random(seed)).names) for seed in range(20)}
    assert found == {("/data", "/data/old"), ("/data", "/data/new")}


def test_what_is_removed_is_gone_by_name_and_readable_where_it_is_open(
    place: tuple[Files, str],
) -> None:
    files, root = place
    put(files, f"{root}/a", b"still")
    fd = files.open_for_read(f"{root}/a")
    files.unlink(f"{root}/a")
    assert (files.exists(f"{root}/a"), files.read_at(fd, 10, 0), files.size(fd)) == (
        False,
        b"still",
        5,
    )
    files.close(fd)
    with pytest.raises(FileNotFoundError):
        files.unlink(f"{root}/a")
    with pytest.raises(FileNotFoundError):
        files.remove_directory(f"{root}/a")
    files.make_directory(f"{root}/d")
    put(files, f"{root}/d/inner", b"")
    with pytest.raises(IsADirectoryError):
        files.unlink(f"{root}/d")
    with pytest.raises(OSError) as error:
        files.remove_directory(f"{root}/d")
    assert error.value.errno == errno.ENOTEMPTY
    with pytest.raises(NotADirectoryError):
        files.remove_directory(f"{root}/d/inner")
    files.make_directory(f"{root}/d/deeper")
    put(files, f"{root}/d/deeper/inner", b"")
    remove_tree(files, f"{root}/d")
    remove_tree(files, f"{root}/d")
    assert files.list(root) == []


def test_room_is_known_and_can_be_taken(place: tuple[Files, str]) -> None:
    files, root = place
    assert 0 < files.free_bytes(root) <= files.total_bytes(root)
    files.allocate(f"{root}/reserve", 4096)
    fd = files.open_for_read(f"{root}/reserve")
    assert files.size(fd) == 4096
    files.close(fd)


def test_a_small_file_is_replaced_whole_also_where_a_kill_left_its_temporary(
    place: tuple[Files, str],
) -> None:
    files, root = place
    for data, leftover in ((b"first", b""), (b"", b"left by a kill, and longer"), (b"third", b"x")):
        if leftover:
            put(files, f"{root}/f{TEMPORARY_SUFFIX}", leftover)
        write_durably(files, root, "f", data)
        assert (read_whole(files, f"{root}/f"), files.list(root)) == (data, ["f"])

    class KilledError(BaseException):
        pass

    def kill() -> None:
        raise KilledError

    with pytest.raises(KilledError):
        replace_file(files, f"{root}/f", b"fourth", before_rename=kill)
    assert read_whole(files, f"{root}/f") == b"third"
    replace_file(files, f"{root}/f", b"fifth", sync=False)
    assert (read_whole(files, f"{root}/f"), files.list(root)) == (b"fifth", ["f"])


def test_a_write_that_the_disk_refuses_leaves_the_old_file_and_no_temporary(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk(("/data",))
    files = SimFiles(disk)
    write_durably(files, "/data", "f", b"old")

    def full(operation: str, path: str) -> None:
        if operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    disk.hook = full
    with pytest.raises(OSError, match="No space"):
        write_durably(files, "/data", "f", b"new")
    assert (files.list("/data"), bytes(disk.names["/data/f"].data)) == (["f"], b"old")  # type: ignore[union-attr]

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "f").write_bytes(b"old")
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="No space"):
        write_durably(DiskFiles(), str(tmp_path), "f", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("f", b"old")]
