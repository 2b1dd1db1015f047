"""Objects that a target has lost or damaged: what the next backup takes over and sends again."""

from __future__ import annotations

import pathlib

import pytest

from appliance.backup.errors import BackupError
from appliance.backup.manifest import (
    NO_CRC,
    Manifest,
    Part,
    PartitionEntry,
    SegmentEntry,
    StoredObject,
)
from appliance.backup.reusable import reusable
from appliance.backup.target.object_store import DAMAGED, MARKER, ObjectStore, open_target
from appliance.backup.target.overlap import refuse_overlap
from appliance.backup.verify import verify
from tailrace.format.directory import checked_json
from tests.appliance.backup.kit import INSTANCE, backed_up, begun

TOPIC = "cd" * 16


def damage(store: ObjectStore, name: str) -> None:
    path = f"objects/{name[:2]}/{name}"
    data = store.target.read(path, 0, 1 << 20)
    store.target.put(path, [bytes([data[0] ^ 1]) + data[1:]])


def test_a_damaged_object_is_marked_and_sent_again_for_every_backup_that_needs_it(
    place: str,
) -> None:
    store = begun(place)
    manifest = backed_up(store, 1, b"first", b"second")
    first, second = manifest.objects
    damage(store, first.name)
    store.target.unlock()
    reader = ObjectStore(open_target(place), None)
    [finding] = verify(reader, [manifest.backup_id], lambda _: None)
    assert "damaged" in finding.text
    store = begun(place)
    assert not store.is_sound(first)
    assert store.is_sound(second)
    again = backed_up(store, 2, b"first", b"second")
    assert again.objects == manifest.objects
    assert store.is_sound(first)
    assert store.target.names(DAMAGED) == []
    assert not list(verify(store, [manifest.backup_id, again.backup_id], lambda _: None))


def test_a_mark_stays_until_a_manifest_names_what_was_sent_again(place: str) -> None:
    store = begun(place)
    [stored] = backed_up(store, 1, b"content").objects
    store.mark_damaged([stored.name], [])
    assert store.put(lambda: iter([b"content"])) == (stored, len(b"content"))
    assert len(store.target.names(DAMAGED)) == 1
    backed_up(store, 2, b"other")
    assert store.target.names(DAMAGED) == []


def test_marks_go_with_their_object_or_when_it_is_intact(place: str) -> None:
    store = begun(place)
    [old] = backed_up(store, 1, b"old").objects
    [new] = backed_up(store, 2, b"new").objects
    store.mark_damaged([old.name, new.name], [])
    assert store.keep(1) == 1
    assert [path.rpartition("/")[2] for path in store.target.names(DAMAGED)] == [new.name]
    assert not list(verify(store, store.backup_ids(), lambda _: None))
    assert store.target.names(DAMAGED) == []


def test_an_object_of_a_killed_backup_is_used_if_its_content_is_right(place: str) -> None:
    store = begun(place)
    stored, _ = store.put(lambda: iter([b"content"]))
    assert begun_again(store, place).put(lambda: iter([b"content"])) == (stored, 0)
    damage(store, stored.name)
    assert begun_again(store, place).put(lambda: iter([b"content"])) == (stored, len(b"content"))


def begun_again(store: ObjectStore, place: str) -> ObjectStore:
    store.target.unlock()
    found = begun(place)
    found.target.unlock()
    return found


def test_a_missing_or_short_object_is_not_sound(place: str) -> None:
    store = begun(place)
    manifest = backed_up(store, 1, b"first", b"second")
    for stored in manifest.objects:
        path = f"objects/{stored.name[:2]}/{stored.name}"
        store.target.remove(path)
        if stored.size == 6:
            store.target.put(path, [b"secon"])
    store.begin(INSTANCE)
    assert [store.is_sound(stored) for stored in manifest.objects] == [False, False]


def segment(base: int, number: int, is_whole: bool = True) -> SegmentEntry:
    part = Part(number, 0, 10)
    return SegmentEntry(base, 10, base + 1, is_whole, 1, 1, [part], None, Part(2, 0, 4), None)


def test_nothing_of_an_unsound_object_is_taken_over() -> None:
    store_names = [f"{number}" * 64 for number in range(3)]
    manifest = Manifest("id", 1, "1", INSTANCE, 0, 0)
    manifest.objects = [StoredObject(name, 10) for name in store_names]
    manifest.databases = {"a": Part(0, 0, 5), "b": Part(1, 0, 5)}
    manifest.partitions = [
        PartitionEntry(
            "orders", TOPIC, 0, 0, 3, [], Part(1, 0, 1), [segment(0, 0), segment(1, 1)], None, None
        )
    ]
    assert reusable(manifest, lambda _: True) == (manifest, set())
    left, lost = reusable(manifest, lambda stored: stored.name != store_names[1])
    assert lost == {(TOPIC, 0, 1)}
    assert left.databases == {"a": Part(0, 0, 5)}
    [entry] = left.partitions
    assert [each.base for each in entry.segments] == [0]
    assert entry.metadata is None
    left, lost = reusable(manifest, lambda stored: stored.name != store_names[2])
    assert lost == set()
    assert [each.offset_index for each in left.partitions[0].segments] == [None, None]


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("data", "lies in the data directory"),
        ("data/backups", "lies in the data directory"),
        ("link/backups", "lies in the data directory"),
        ("second/x", "lies in the data directory"),
        (".", "lies in"),
        ("database", ""),
        ("backups", ""),
    ],
)
def test_targets_and_data_directories_lie_apart(
    tmp_path: pathlib.Path, target: str, sentence: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    directories = [f"{tmp_path}/data", f"{tmp_path}/second"]
    for place in (str(tmp_path / target), f"file://{tmp_path / target}"):
        found = open_target(place).local_path
        if sentence:
            with pytest.raises(BackupError, match=sentence):
                refuse_overlap(found, directories)
        else:
            refuse_overlap(found, directories)
    refuse_overlap(None, directories)


def test_urls_name_no_password() -> None:
    pytest.importorskip("fsspec")
    assert str(open_target("memory://user:secret@host/path")) == "memory://host/path"


def test_backups_of_format_1_are_read_and_used_and_the_target_gets_format_2(place: str) -> None:
    store = begun(place)
    made = backed_up(store, 1, b"content")
    [stored] = made.objects
    path = f"backups/{made.backup_id}.json"
    content = checked_json.decode(store.target.read(path, 0, 1 << 20))
    assert content is not None
    old = {**content, "format": 1, "objects": [list(stored[:2])]}
    store.target.put(path, [checked_json.encode(old)])
    marker = checked_json.decode(store.target.read(MARKER, 0, 1 << 20))
    assert marker is not None
    store.target.put(MARKER, [checked_json.encode({**marker, "format": 1})])
    store.target.unlock()

    again = begun(place)
    found = again.manifest(made.backup_id)
    assert found.objects == [StoredObject(stored.name, stored.size)]
    assert b"".join(again.read(found.objects[0], Part(0, 0, 7))) == b"content"
    assert again.is_sound(found.objects[0])
    assert b'"format":2' in again.target.read(MARKER, 0, 1 << 20)


def test_damage_is_found_by_the_crc_and_by_the_name(place: str) -> None:
    store = begun(place)
    [stored] = backed_up(store, 1, b"content").objects
    damage(store, stored.name)
    for each in (stored, stored._replace(crc=NO_CRC)):
        for part in (Part(0, 0, 7), Part(0, 2, 3)):
            with pytest.raises(BackupError, match="damaged"):
                b"".join(ObjectStore(store.target, None).read(each, part))
