"""Moves of compacted partitions, and partitions that cannot move."""

from __future__ import annotations

import pathlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances import compacted
from tests.kit.appliances.killed_directories import start
from tests.kit.appliances.moves import move, where
from tests.kit.cli import run
from tests.kit.processes import wait_until

RESERVE = {"journal_bytes": 1 << 20, "disk_reserve_bytes": 4 << 20}


@contextmanager
def two_directories(first: pathlib.Path, second: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    running = start(first, data_dirs=f"{first},{second}", **RESERVE)
    try:
        yield running
    finally:
        assert running.stop() == 0


@pytest.mark.slow_because("each move waits until no swap is under way")
def test_a_compacted_partition_moves_while_it_is_cleaned(tmp_path: pathlib.Path) -> None:
    rng = random.Random(5)
    with two_directories(tmp_path / "data", tmp_path / "second") as running:
        written = compacted.create(running, "orders")
        ended = threading.Event()

        def clean() -> None:
            while not ended.is_set():
                run(running, "topic", "compact", "orders", status=None)

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


def test_partitions_that_cannot_move_are_named_and_a_drain_moves_the_others(
    tmp_path: pathlib.Path,
) -> None:
    with two_directories(tmp_path / "data", tmp_path / "second") as running:
        with Admin(running.address) as admin:
            admin.create_topics(
                [
                    NewTopic("orders", 2),
                    NewTopic("later", 2, {"delay.enabled": True}),
                    NewTopic("own", 2, {"worker.dedicated": True}),
                ]
            )
        done = run(
            None, "disk", "drain", str(tmp_path / "second"), "--data-dir", running.data_dir,
            "--bootstrap", running.address, status=1,
        )  # fmt: skip
        text = done.stderr.decode()
        assert "orders" not in text
        assert "delayed records" in text
        assert "worker.dedicated" in text
