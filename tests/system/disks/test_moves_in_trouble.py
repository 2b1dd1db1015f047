"""Moves of partitions whose target fails, and of partitions that cannot move: the partition stays
where it was, with all records, and takes others.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from tailrace import Admin, Producer, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances import compacted
from tests.kit.appliances.killed_directories import start
from tests.kit.appliances.moves import create, move, numbers, produce, where
from tests.kit.cli import run
from tests.kit.hosts.file_systems import fill_to_the_byte, small_file_system
from tests.kit.processes import children, wait_until

RESERVE = {"journal_bytes": 1 << 20, "disk_reserve_bytes": 4 << 20}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")


@contextlib.contextmanager
def two_directories(first: pathlib.Path, second: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    running = start(first, data_dirs=f"{first},{second}", **RESERVE)
    try:
        yield running
    finally:
        assert running.stop() == 0


def last_reason(appliance: EmbeddedAppliance) -> str:
    """Why the last move did not come about; empty: none has failed."""
    with Admin(appliance.address) as admin:
        rows = admin.describe_cluster()["moves"]
    return next((str(row["reason"]) for row in rows if row["state"] == "failed"), "")


def on_their_way(appliance: EmbeddedAppliance) -> list[str]:
    """States of the moves that are not over."""
    with Admin(appliance.address) as admin:
        rows = admin.describe_cluster()["moves"]
    return [str(row["state"]) for row in rows if row["state"] != "failed"]


def close_for(appliance: EmbeddedAppliance, target: pathlib.Path) -> str:
    """Have the partition moved without a copy that was made before. Returns why it stays."""
    with Admin(appliance.address) as admin:
        admin.move_partition("orders", 0, str(target))
    wait_until(lambda: bool(last_reason(appliance)), "the move has failed")
    return last_reason(appliance)


def check_stays(appliance: EmbeddedAppliance, count: int) -> int:
    """The partition is where it was. Returns its number of records with those that it took now."""
    assert where(appliance) == "data"
    produce(appliance, range(count, count + 10))
    assert numbers(appliance) == list(range(count + 10))
    return count + 10


@pytest.mark.root
@needs_root
def test_a_partition_stays_when_its_target_is_full_or_takes_no_writes(
    tmp_path: pathlib.Path,
) -> None:
    with (
        small_file_system(tmp_path, 48) as disk,
        two_directories(tmp_path / "data", disk / "second") as running,
    ):
        target = disk / "second"
        create(running)
        produce(running, range(130), size=200_000)
        filler = disk / "filler"
        filler.write_bytes(bytes(20 << 20))
        error = move(running, target, status=1)
        assert "free some space there" in error
        assert not list((target / "moving").glob("*/*"))
        count = check_stays(running, 130)

        fill_to_the_byte(filler)
        assert "could not be completed" in close_for(running, target)
        assert not list((target / "moving").iterdir()), "a full disk keeps no part of a copy"
        count = check_stays(running, count)

        filler.unlink()
        with Admin(running.address) as admin:
            wait_until(
                lambda: admin.describe_cluster()["data_dirs"][1]["state"] == "OK",
                "the directory takes writes",
            )
        with read_only(target / "moving"):
            assert "stays where it was" in move(running, target, status=1)
            assert "could not be completed" in close_for(running, target)
            count = check_stays(running, count)
        move(running, target)
        assert where(running) == "second"
        produce(running, range(count, count + 10))
        assert numbers(running) == list(range(count + 10))


@contextlib.contextmanager
def read_only(directory: pathlib.Path) -> Iterator[None]:
    """Mount it upon itself, without the right to write."""
    subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(directory)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@contextlib.contextmanager
def failing_disk(directory: pathlib.Path, good_mib: int) -> Iterator[pathlib.Path]:
    """An ext4 whose device has no more than so many good MiB: writes of further ones are EIO."""
    with small_file_system(directory, good_mib) as backing:
        image, path = backing / "image", directory / "failing"
        path.mkdir()
        with image.open("wb") as file:
            file.truncate(256 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop,errors=remount-ro", str(image), str(path)], check=True)
        try:
            yield path
        finally:
            subprocess.run(["umount", str(path)], check=True)


@pytest.mark.root
@needs_root
def test_a_partition_stays_when_the_disk_of_its_target_fails(tmp_path: pathlib.Path) -> None:
    with (
        failing_disk(tmp_path, 24) as disk,
        two_directories(tmp_path / "data", disk / "second") as running,
    ):
        create(running)
        produce(running, range(180), size=200_000)
        assert "stays where it was" in move(running, disk / "second", status=1)
        assert "could not be completed" in close_for(running, disk / "second")
        check_stays(running, 180)


@pytest.mark.slow_because("each move waits until no swap is under way")
def test_a_compacted_partition_moves_while_it_is_cleaned(tmp_path: pathlib.Path) -> None:
    rng = random.Random(5)
    with two_directories(tmp_path / "data", tmp_path / "second") as running:
        written = compacted.create(running, "orders")
        ended = threading.Event()

        def clean() -> None:
            while not ended.is_set():
                with contextlib.suppress(TailraceError):  # where it moves just now
                    compacted.compact(running, "orders")

        with Producer(running.address) as producer:
            compacted.update(producer, written, 1_000, rng)
            cleaning = threading.Thread(target=clean)
            cleaning.start()
            try:
                for target in ("second", "data", "second"):
                    compacted.update(producer, written, 300, rng)
                    wait_until(
                        partial(move_ends, running, tmp_path / target),
                        "it moves when no swap is under way",
                    )
            finally:
                ended.set()
                cleaning.join()
            compacted.update(producer, written, 100, rng)
        assert where(running) == "second"
        compacted.compact(running, "orders")
        assert compacted.read(running.address, written.key) == written.kept
    verified = run(None, "log", "verify", f"{tmp_path}/second", status=None)
    assert b"intact" in verified.stdout + verified.stderr


def move_ends(appliance: EmbeddedAppliance, target: pathlib.Path) -> bool:
    """Move the partition. False if it stays this time."""
    move(appliance, target, status=None)
    return where(appliance) == target.name


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("killed", [(), ("tr-controller-0", "tr-worker-0", "tr-flusher-0")])
def test_a_partition_goes_back_when_its_disk_fails_behind_the_decision(
    tmp_path: pathlib.Path, killed: tuple[str, ...]
) -> None:
    with two_directories(tmp_path / "data", tmp_path / "second") as running:
        create(running)
        produce(running, range(1_500))
        pids = children(running)
        os.kill(pids["tr-flusher-1"], signal.SIGSTOP)
        with Admin(running.address) as admin:
            admin.move_partition("orders", 0, str(tmp_path / "second"))
            wait_until(lambda: on_their_way(running) == ["arriving"], "it arrives")
            for name in killed:
                os.kill(pids[name], signal.SIGKILL)
            with read_only(tmp_path / "second"):
                os.kill(pids["tr-flusher-1"], signal.SIGCONT)
                wait_until(lambda: "could not be opened" in last_reason(running), "it goes back")
                count = check_stays(running, 1_500)
        wait_until(lambda: not on_their_way(running), "nothing is left of it")
        if (tmp_path / "second" / "orders-0").exists():
            shutil.rmtree(tmp_path / "second" / "orders-0")  # as the refusal says
        move(running, tmp_path / "second")
        assert where(running) == "second"
        assert numbers(running) == list(range(count))
