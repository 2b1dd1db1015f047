"""Files that a start depends on, damaged or replaced: recovered with nothing lost, or refused with
a sentence.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from typing import Any

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
from tests.kit.matrices import short

COPIES = ("shm.json", "shm.json.copy")


def damage_cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def damage_flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_remove(path: pathlib.Path) -> None:
    path.unlink()


def damage_link(path: pathlib.Path) -> None:
    target = path.parent.parent / f"{path.name}.target"
    target.write_bytes(b"precious")
    path.unlink()
    path.symlink_to(target)


DAMAGES = [damage_cut, damage_empty, damage_flip, damage_link]


@pytest.mark.parametrize(
    ("damaged", "damage"),
    short(
        [
            (COPIES, damage_remove),
            (COPIES[:1], damage_cut),
            (COPIES[1:], damage_flip),
            *((COPIES, damage) for damage in DAMAGES),
        ],
        0,
        2,
    ),
)
def test_acknowledged_batches_in_memory_survive_a_damaged_manifest(
    tmp_path: pathlib.Path, damaged: tuple[str, ...], damage: Any
) -> None:
    directory = tmp_path / "data"
    killed_with_acknowledged_batches_in_the_ring(directory)
    for name in damaged:
        damage(directory / name)
    again = start(directory)
    try:
        assert read(again, 51) == list(range(51))
        produce(again, 51, 52)
        assert "memory_lost" not in pathlib.Path(again.log_path).read_text()
    finally:
        assert again.stop() == 0
    assert all(path.read_bytes() == b"precious" for path in tmp_path.glob("*.target"))
    identity = read_identity(str(directory))
    assert identity is not None
    assert not names_with(identity.prefix)


def test_a_damaged_manifest_and_no_memory_are_said(tmp_path: pathlib.Path) -> None:
    killed_with_acknowledged_batches_in_the_ring(tmp_path)
    identity = read_identity(str(tmp_path))
    assert identity is not None
    for name in names_with(identity.prefix):
        os.unlink(f"/dev/shm{name}")
    for name in COPIES:
        damage_cut(tmp_path / name)
    again = start(tmp_path)
    try:
        assert read(again, 1) == [0]
        assert "memory_lost" in pathlib.Path(again.log_path).read_text()
    finally:
        assert again.stop() == 0


def test_rings_of_another_worker_are_drained_though_one_is_gone(tmp_path: pathlib.Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    killed_with_acknowledged_batches_in_the_ring(tmp_path, cores=str(cores))
    identity = read_identity(str(tmp_path))
    assert identity is not None
    os.unlink(
        f"/dev/shm{next(name for name in names_with(identity.prefix) if name.endswith('-ring-1'))}"
    )
    again = start(tmp_path)
    try:
        assert read(again, 51) == list(range(51))
        assert "memory_lost" in pathlib.Path(again.log_path).read_text()
    finally:
        assert again.stop() == 0


def test_a_ring_without_its_table_is_refused(tmp_path: pathlib.Path) -> None:
    killed_with_acknowledged_batches_in_the_ring(tmp_path)
    identity = read_identity(str(tmp_path))
    assert identity is not None
    os.unlink(
        f"/dev/shm{next(name for name in names_with(identity.prefix) if name.endswith('-table-0'))}"
    )
    said = refusal(tmp_path)
    assert "-ring-0" in said
    assert "to give them up" in said
    for name in names_with(identity.prefix):
        os.unlink(f"/dev/shm{name}")


@pytest.mark.parametrize("damage", short([damage_flip, damage_remove, damage_link]))
def test_one_damaged_identity_is_mended_by_the_other(tmp_path: pathlib.Path, damage: Any) -> None:
    directory = tmp_path / "data"
    killed_with_acknowledged_batches_in_the_ring(directory)
    damage(directory / "instance.json")
    again = start(directory)
    try:
        assert read(again, 51) == list(range(51))
    finally:
        assert again.stop() == 0
    damage(directory / "instance.json.copy")
    again = start(directory)
    try:
        assert read(again, 51) == list(range(51))
    finally:
        assert again.stop() == 0


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The data directory of an appliance that had a topic and was stopped; tests damage copies of
    it.
    """
    directory = tmp_path_factory.mktemp("stopped") / "data"
    running = start(directory)
    create(running)
    assert running.stop() == 0
    return directory


@pytest.fixture
def copy(stopped: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(stopped, tmp_path / "data")


@pytest.mark.parametrize("damage", [damage_cut, damage_remove])
def test_without_any_identity_a_used_directory_is_refused_and_named(
    copy: pathlib.Path, damage: Any
) -> None:
    for name in ("instance.json", "instance.json.copy"):
        damage(copy / name)
    assert str(copy / "instance.json") in refusal(copy)


@pytest.mark.parametrize(
    "name",
    ["shm.json", "shm.json.copy", "shm.json.tmp", "instance.json", "instance.lock", "journal"],
)
def test_a_directory_where_a_file_belongs_is_refused_and_named(
    copy: pathlib.Path, name: str
) -> None:
    (copy / name).unlink(missing_ok=True)
    (copy / name).mkdir()
    assert str(copy / name) in refusal(copy)


@pytest.mark.parametrize(
    "name", ["instance.lock", "shm.json.tmp", "shm.json", "instance.json.copy"]
)
def test_a_link_in_the_data_directory_is_never_followed(
    copy: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(target)
    if name == "instance.lock":
        assert str(copy / name) in refusal(copy)
    else:
        assert start(copy).stop() == 0
    assert target.read_bytes() == b"precious"
