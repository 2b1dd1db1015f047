"""Targets of backups: a directory and a URL behave alike, and fail with a sentence."""

from __future__ import annotations

import os
import pathlib
import time
import uuid
from collections.abc import Iterator

import orjson
import pytest

from appliance.backup.errors import BackupError
from appliance.backup.manifest import Manifest, Part, StoredObject
from appliance.backup.restore import chosen
from appliance.backup.target.local_target import LocalTarget
from appliance.backup.target.object_store import MARKER, ObjectStore, open_target
from appliance.backup.target.url_target import LOCK_STALE_S, UrlTarget
from appliance.observe.overview.problems import backup_checks
from tailrace.format.directory import checked_json
from tests.appliance.backup.kit import INSTANCE, backed_up, begun
from tests.kit.hosts.file_systems import small_file_system

Target = LocalTarget | UrlTarget


def read(store: ObjectStore, stored: StoredObject, start: int, length: int) -> bytes:
    return b"".join(store.read(stored, Part(0, start, length)))


def test_objects_and_manifests_are_read_back(place: str) -> None:
    store = begun(place)
    manifest = backed_up(store, 1, b"first", bytes(9_000_000), b"")
    assert [read(store, each, 0, each.size) for each in manifest.objects] == [
        b"first", bytes(9_000_000), b"",
    ]  # fmt: skip
    assert read(store, manifest.objects[0], 1, 3) == b"irs"
    store.target.unlock()
    again = ObjectStore(open_target(place), None)
    assert again.check() == INSTANCE
    assert again.backup_ids() == [manifest.backup_id]
    assert again.newest() == manifest


def test_content_that_is_there_is_not_sent_again(place: str) -> None:
    store = begun(place)
    _, sent = store.put(lambda: iter([b"the same"]))
    again, sent_again = store.put(lambda: iter([b"the ", b"same"]))
    assert (sent, sent_again) == (8, 0)
    assert read(store, again, 0, 8) == b"the same"


def test_keep_removes_what_only_removed_backups_need(place: str) -> None:
    store = begun(place)
    backed_up(store, 1, b"old", b"shared")
    backed_up(store, 2, b"shared", b"middle")
    newest = backed_up(store, 3, b"shared", b"new")
    assert store.keep(1) == 2
    assert store.backup_ids() == [newest.backup_id]
    assert len(store.target.names("objects")) == 2
    assert [read(store, each, 0, each.size) for each in newest.objects] == [b"shared", b"new"]
    assert store.keep(1) == 0


def test_the_newest_backup_has_the_highest_number_also_after_the_clock_was_set_back(
    place: str,
) -> None:
    store = begun(place)
    ids = ["00000001-20270101T000000.000000Z", "00000002-20200101T000000.000000Z"]
    points = [1_798_761_600_000_000, 1_577_836_800_000_000]
    for backup_id, point_us in zip(ids, points, strict=True):
        store.put_manifest(Manifest(backup_id, int(backup_id[:8]), "1", INSTANCE, 0, point_us))
    assert store.backup_ids() == ids
    newest = store.newest()
    assert newest is not None
    assert newest.backup_id == chosen(store, None, None).backup_id == ids[1]
    assert chosen(store, None, points[1]).backup_id == ids[1]
    shown = {"target": place, "point_us": points[0], "backup_id": ids[0], "error": ""}
    assert backup_checks([shown], points[1]) == []
    assert store.keep(1) == 1
    assert store.backup_ids() == [ids[1]]


def test_a_second_backup_at_once_is_refused(place: str) -> None:
    first = begun(place)
    with pytest.raises(BackupError, match="another backup"):
        open_target(place).lock()
    first.target.unlock()
    begun(place).target.unlock()


def test_another_appliance_and_other_files_are_refused(place: str) -> None:
    store = begun(place)
    with pytest.raises(BackupError, match="another appliance"):
        store.begin("cd" * 16)
    store.target.unlock()
    store.target.put("backups/of another", [b"program"])
    store.target.remove(MARKER)
    with pytest.raises(BackupError, match="not empty"):
        begun(place)


def test_damage_is_found_when_it_is_read(place: str) -> None:
    store = begun(place)
    manifest = backed_up(store, 1, b"content")
    [path] = store.target.names("objects")
    for wrong in (b"contenu", b"cont", b""):
        store.target.put(path, [wrong])
        other = ObjectStore(open_target(place), None)
        with pytest.raises(BackupError, match=manifest.objects[0].name):
            other.verify(manifest.objects[0])
    store.target.remove(path)
    with pytest.raises(BackupError, match="missing"):
        ObjectStore(open_target(place), None).verify(manifest.objects[0])


def test_a_damaged_manifest_is_passed_over_and_keeps_its_objects(place: str) -> None:
    store = begun(place)
    first = backed_up(store, 1, b"first")
    second = backed_up(store, 2, b"second")
    store.target.put(f"backups/{second.backup_id}.json", [b"half a mani"])
    assert store.newest() == first
    with pytest.raises(BackupError, match="damaged"):
        store.keep(1)
    assert len(store.target.names("objects")) == 2


def test_a_later_format_is_refused_with_what_to_do(place: str) -> None:
    store = begun(place)
    manifest = backed_up(store, 1, b"first")
    content = orjson.loads(manifest.encode())["content"]
    later = checked_json.encode({**content, "format": 3, "version": "9.1"})
    store.target.put(f"backups/{manifest.backup_id}.json", [later])
    with pytest.raises(BackupError, match=r"format 3 and was made by Tailrace 9\.1"):
        store.manifest(manifest.backup_id)
    store.target.put(MARKER, [checked_json.encode({"format": 3, "instance": INSTANCE})])
    with pytest.raises(BackupError, match="format 3"):
        store.check()


def test_a_source_that_changes_while_it_is_read_is_noticed(place: str) -> None:
    store = begun(place)
    contents = iter([b"one", b"two"])
    with pytest.raises(BackupError, match="changed"):
        store.put(lambda: iter([next(contents)]))


def test_the_lock_of_a_killed_backup_at_a_url_is_taken_over() -> None:
    pytest.importorskip("fsspec")
    place = f"memory://{uuid.uuid4().hex}/target"
    left = {"token": "x", "host": "elsewhere", "pid": 7, "renewed_s": time.time() - LOCK_STALE_S}
    target = open_target(place)
    target.put("lock", [orjson.dumps(left)])
    target.lock()
    target.put("lock", [orjson.dumps({**left, "renewed_s": time.time()})])
    with pytest.raises(BackupError, match="host elsewhere"):
        open_target(place).lock()


def test_a_full_target_leaves_the_backup_before_and_nothing_half(tmp_path: pathlib.Path) -> None:
    with small_file_system(tmp_path, 4) as disk:
        store = begun(str(disk / "target"))
        first = backed_up(store, 1, os.urandom(1 << 20))

        def too_much() -> Iterator[bytes]:
            yield from (bytes([number]) * (1 << 20) for number in range(8))

        with pytest.raises(OSError, match="No space left"):
            store.put(too_much)
        assert list(disk.rglob("*.tmp")) == []
        assert store.newest() == first
        store.verify(first.objects[0])
        store.target.unlock()


def test_a_target_that_vanishes_is_not_made_again(tmp_path: pathlib.Path) -> None:
    store = begun(str(tmp_path / "disk"))
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    with pytest.raises(FileNotFoundError):
        store.put(lambda: iter([b"content"]))
    assert not (tmp_path / "disk").exists()
    (tmp_path / "disk").mkdir()  # the empty directory below a mount
    with pytest.raises(FileNotFoundError):
        store.put(lambda: iter([b"content"]))


def test_a_first_backup_that_was_killed_at_once_does_not_block_the_target(
    tmp_path: pathlib.Path,
) -> None:
    target = LocalTarget(str(tmp_path / "target"))
    target.lock()
    (tmp_path / "target" / f"{MARKER}.tmp").write_text("half")
    target.unlock()
    begun(str(tmp_path / "target")).target.unlock()


def test_a_reader_keeps_objects_from_being_removed(tmp_path: pathlib.Path) -> None:
    store = begun(str(tmp_path / "target"))
    backed_up(store, 1, b"old")
    backed_up(store, 2, b"new")
    with store.target.reading():
        assert store.keep(1) == 0
    assert store.keep(1) == 1


def test_a_shared_file_is_durable_before_it_has_its_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The appliance may have synced a journal in the place of the segment itself."""
    store = begun(str(tmp_path / "target"))
    source = tmp_path / "segment"
    source.write_bytes(bytes(5_000))
    inode, steps = source.stat().st_ino, []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(fd: int) -> None:
        steps.append(("sync", os.fstat(fd).st_ino))
        fsync(fd)

    def seen_rename(old: str, new: str) -> None:
        steps.append(("name", os.stat(old).st_ino))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    fd = os.open(source, os.O_RDONLY)
    try:
        store.put(lambda: iter([bytes(5_000)]), (fd, str(source)))
    finally:
        os.close(fd)
    [(_, named)] = [step for step in steps if step[0] == "name"]
    assert steps.index(("sync", named)) < steps.index(("name", named))
    assert named == inode or ("sync", inode) not in steps  # linked, or blocks shared


def test_a_file_of_the_same_file_system_is_shared(tmp_path: pathlib.Path) -> None:
    store = begun(str(tmp_path / "target"))
    source = tmp_path / "segment"
    source.write_bytes(bytes(5_000))
    fd = os.open(source, os.O_RDONLY)
    try:
        stored, sent = store.put(lambda: iter([bytes(5_000)]), (fd, str(source)))
    finally:
        os.close(fd)
    assert sent == 0
    source.unlink()
    assert read(store, stored, 0, 5_000) == bytes(5_000)
