"""Ownership of a data directory: copies, renamed and moved ones, the lock, other users' and those
that everybody may write in.
"""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

from shm.memory.region import names_with
from tailrace.format.directory.data_dir import read_identity
from tests.kit.appliances.killed_directories import (
    create,
    killed_with_acknowledged_batches_in_the_ring,
    produce,
    read,
    refusal,
    start,
)
from tests.kit.appliances.running_directories import copy_of_running
from tests.kit.processes import kill_and_wait_for_successor, shared_memory, wait_until


def test_a_copy_beside_its_original_leaves_the_originals_memory_alone(
    tmp_path: pathlib.Path,
) -> None:
    original = start(tmp_path / "data")
    try:
        create(original)
        produce(original, 0, 10)
        before = sorted(shared_memory(original))
        copy_of_running(tmp_path / "data", tmp_path / "copy")
        copy = start(tmp_path / "copy")
        try:
            assert read(copy, 10) == list(range(10))
            produce(copy, 10, 12)
        finally:
            assert copy.stop() == 0
        assert sorted(shared_memory(original)) == before
        kill_and_wait_for_successor(original, "tr-worker-0")
        produce(original, 100, 103)
        assert read(original, 13) == [*range(10), 100, 101, 102]
    finally:
        assert original.stop() == 0


def test_a_copy_of_a_killed_directory_leaves_its_batches_to_the_original(
    tmp_path: pathlib.Path,
) -> None:
    killed_with_acknowledged_batches_in_the_ring(tmp_path / "data")
    copy_of_running(tmp_path / "data", tmp_path / "copy")
    copy = start(tmp_path / "copy")
    try:
        assert read(copy, 1) == [0]
        said = pathlib.Path(copy.log_path).read_text()
        assert "copied_directory" in said
        assert f"memory_not_copied data_dir={tmp_path}/copy original={tmp_path}/data" in said
        assert "memory_lost" not in said, "nothing of this appliance is lost"
    finally:
        assert copy.stop() == 0
    original = start(tmp_path / "data")
    try:
        assert read(original, 51) == list(range(51))
    finally:
        assert original.stop() == 0


def test_a_directory_renamed_after_a_kill_drains_what_it_left_in_memory(
    tmp_path: pathlib.Path,
) -> None:
    killed_with_acknowledged_batches_in_the_ring(tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "moved")
    again = start(tmp_path / "moved")
    try:
        assert read(again, 51) == list(range(51))
    finally:
        assert again.stop() == 0


def test_a_directory_moved_to_another_file_system_after_a_kill_is_refused_while_memory_holds_batches(  # noqa: E501
    tmp_path: pathlib.Path,
) -> None:
    killed_with_acknowledged_batches_in_the_ring(tmp_path / "data")
    identity = read_identity(str(tmp_path / "data"))
    assert identity is not None
    copy_of_running(tmp_path / "data", tmp_path / "moved")
    shutil.rmtree(tmp_path / "data")
    said = refusal(tmp_path / "moved")
    assert f"{identity.prefix}-" in said
    for name in names_with(identity.prefix):
        os.unlink(f"/dev/shm{name}")
    again = start(tmp_path / "moved")
    try:
        assert read(again, 1) == [0]
    finally:
        assert again.stop() == 0


def test_a_lock_file_removed_lets_no_second_appliance_in_and_is_made_again(
    tmp_path: pathlib.Path,
) -> None:
    running = start(tmp_path, hang_timeout_ms=4000)  # locks are looked at four times in this
    try:
        create(running)
        (tmp_path / "instance.lock").unlink()
        assert f"process id {running.pid}" in refusal(tmp_path)
        wait_until(
            lambda: (
                (tmp_path / "instance.lock").exists()
                and bool((tmp_path / "instance.lock").stat().st_size)
            ),
            "the lock is made again",
        )
        assert "lock_file_gone" in pathlib.Path(running.log_path).read_text()
        assert f"process id {running.pid}" in refusal(tmp_path)
        kill_and_wait_for_successor(running, "tr-flusher-0")
        produce(running, 0, 5)
        assert read(running, 5) == list(range(5))
    finally:
        assert running.stop() == 0


def test_a_directory_that_every_user_may_write_in_is_refused(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    directory.chmod(0o777)
    said = refusal(directory)
    assert str(directory) in said
    assert "chmod o-w" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused_to_root_too(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    os.chown(directory, 65534, 65534)
    assert "belongs to user" in refusal(directory)
    os.chown(directory, 0, 0)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_files_are_readable_by_their_owner_alone_whatever_the_umask(
    tmp_path: pathlib.Path, umask: int
) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    before = os.umask(0o022)
    log = directory / "tailrace.log"
    log.touch(0o600)
    os.umask(umask)
    try:
        running = start(directory)
    finally:
        os.umask(before)
    try:
        create(running)
        produce(running, 0, 3)
        open_to_others = [
            str(path)
            for path in directory.rglob("*")
            if path != log and path.stat().st_mode & 0o077
        ]
        assert open_to_others == []
        assert read(running, 3) == [0, 1, 2]
    finally:
        assert running.stop() == 0
