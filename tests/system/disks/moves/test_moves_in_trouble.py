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
import threading
from functools import partial

import pytest

from tailrace import Admin, Producer, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances import compacted
from tests.kit.appliances.moves import (
    close_for,
    create,
    last_reason,
    move,
    numbers,
    on_their_way,
    produce,
    two_directories,
    where,
)
from tests.kit.cli import run
from tests.kit.hosts.file_systems import (
    failing_disk,
    fill_to_the_byte,
    read_only,
    small_file_system,
)
from tests.kit.processes import children, wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")


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
