"""Data directories whose disk is lost for good: a start without them is refused, and a new
directory takes their place.
"""

from __future__ import annotations

import pathlib
import shutil

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.errors import TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.backups import back_up, restore
from tests.kit.appliances.killed_directories import start
from tests.kit.appliances.moves import directories
from tests.kit.cli import run
from tests.kit.processes import HANG_LIMIT_S

PARTITIONS = 4
KEPT, MORE = 10, 5
"""Records of each partition before the backup, and behind it."""


def send(appliance: EmbeddedAppliance, values: range) -> None:
    with Producer(appliance.address) as producer:
        for number in values:
            for partition in range(PARTITIONS):
                producer.send("orders", b"%d" % number, partition=partition)
        producer.flush(HANG_LIMIT_S)


def numbers(appliance: EmbeddedAppliance, partition: int) -> list[int]:
    key = TopicPartition("orders", partition)
    found: list[int] = []
    with Consumer(bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        end = consumer.end_offsets([key])[key]
        consumer.assign([key])
        while consumer.position(key) < end:
            found += [int(record.value) for record in consumer.poll(timeout_ms=1_000)]
    return found


def replace(tmp_path: pathlib.Path, *options: str, status: int = 0) -> str:
    done = run(
        None, "disk", "replace", str(tmp_path / "second"), "--data-dir", str(tmp_path / "data"),
        *options, status=status,
    )  # fmt: skip
    return done.stderr.decode()


def lose_second(tmp_path: pathlib.Path) -> list[str]:
    """An appliance on two disks with a backup, of which the second is gone. Returns the names of
    the partitions that were there.
    """
    running = start(tmp_path / "data", data_dirs=directories(tmp_path))
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic("orders", PARTITIONS)])
        send(running, range(KEPT))
        back_up(running.data_dir, tmp_path / "target", "--copy")
        send(running, range(KEPT, KEPT + MORE))
        assert "is in use by the appliance" in replace(tmp_path, "--yes", status=1)
    finally:
        assert running.stop() == 0
    assert "has orders-" in replace(tmp_path, "--yes", status=1), "it is not lost"
    lost = sorted(path.name for path in (tmp_path / "second").glob("orders-*"))
    shutil.rmtree(tmp_path / "second")
    return lost


def test_a_new_directory_has_the_place_of_a_lost_one_and_what_a_backup_had_of_it(
    tmp_path: pathlib.Path,
) -> None:
    from_backup, empty = lose_second(tmp_path)
    assert "is no directory" in replace(tmp_path, "--yes", status=1)
    (tmp_path / "second").mkdir(mode=0o700)
    for _ in range(2):  # a start that was refused has left its identity there
        with pytest.raises(TailraceError, match="tailrace disk replace"):
            start(tmp_path / "data", data_dirs=directories(tmp_path))
    told = replace(tmp_path, status=2)
    assert f"would be given up: {from_backup}, {empty}" in told
    with pytest.raises(TailraceError, match="tailrace disk replace"):
        start(tmp_path / "data", data_dirs=directories(tmp_path))
    for _ in range(2):
        assert f"{from_backup}, {empty}" in replace(tmp_path, "--yes")
    restore(tmp_path / "target", tmp_path / "restored")
    (tmp_path / "restored" / from_backup).rename(tmp_path / "second" / from_backup)
    whole = list(range(KEPT + MORE))
    for times in (0, 1):
        running = start(tmp_path / "data", data_dirs=directories(tmp_path))
        try:
            for partition in range(PARTITIONS):
                before = {from_backup: whole[:KEPT], empty: []}.get(f"orders-{partition}", whole)
                assert numbers(running, partition) == before + whole[:1] * times
            send(running, range(1))
        finally:
            assert running.stop() == 0


def test_a_lost_directory_that_had_another_path_is_named_and_no_other_is_replaced(
    tmp_path: pathlib.Path,
) -> None:
    lose_second(tmp_path)
    (tmp_path / "third").mkdir(mode=0o700)
    first, third = str(tmp_path / "data"), str(tmp_path / "third")

    def ask(directory: str, lost: str, data_dir: str, status: int = 1) -> str:
        done = run(
            None, "disk", "replace", directory, "--lost", lost, "--data-dir", data_dir, "--yes",
            status=status,
        )  # fmt: skip
        return done.stderr.decode()

    second = str(tmp_path / "second")
    assert f"knows no directory {third} with partitions" in ask(third, third, first)
    assert "has no coordinator.db" in ask(third, second, third)
    assert "has coordinator.db" in ask(first, second, first)
    assert f"takes the place of {second}" in ask(third, second, first, status=0)
    running = start(tmp_path / "data", data_dirs=f"{first},{third}")
    try:
        assert [len(numbers(running, partition)) for partition in range(PARTITIONS)].count(0) == 2
        send(running, range(1))
    finally:
        assert running.stop() == 0
