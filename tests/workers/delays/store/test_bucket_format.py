"""The scheduler's files: golden bytes, and what is another version's or damaged is refused."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace

import numpy as np
import pytest

from tailrace.format.directory import checked_json
from tailrace.format.directory.delay_files import (
    HEAD_BYTES,
    KIND_CANCELLED,
    KIND_ROWS,
    BucketEntry,
    Manifest,
    PendingDamagedError,
)
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from workers.delays.store import bucket_files
from workers.delays.store.bucket_files import BucketFile
from workers.log.files.delay_manifest import load_manifest, read_cursor, save_manifest
from workers.segment.files import write_durably

GOLDEN = pathlib.Path(__file__).parents[3] / "golden"
TOPIC_ID = bytes(range(16))
START = 1_700_000_006_144


def written(files: SimFiles) -> BucketFile:
    file = BucketFile(files, "/data", BucketEntry(2, START, 7, 0, 0, 0, 0))
    file.append(KIND_ROWS, np.array([START + 5, START]), np.array([40, 41]), b"an Arrow message")
    file.append(KIND_CANCELLED, np.empty(0, np.int64), np.array([41]), b"")
    return file


def test_the_bytes_of_a_bucket_file_are_the_golden_ones() -> None:
    disk = SimDisk()
    file = written(SimFiles(disk))
    assert file.name == "2-0001700000006144-00000007.pending"
    inode = disk.names[file.path]
    assert inode is not None
    assert bytes(inode.data) == (GOLDEN / "bucket_v2.pending").read_bytes()


def test_the_golden_bucket_file_is_read_and_each_flipped_byte_of_it_is_found() -> None:
    golden = (GOLDEN / "bucket_v2.pending").read_bytes()
    for flipped in (None, *range(len(golden))):
        data = bytearray(golden)
        if flipped is not None:
            data[flipped] ^= 1
        disk = SimDisk()
        files = SimFiles(disk)
        file = BucketFile(files, "/data", BucketEntry(2, START, 7, 0, len(golden), 2, 1))
        fd = files.open_for_write(file.path)
        files.write_at(fd, [bytes(data)], 0)
        if flipped is None:
            assert file.find(40, -1) is not None
            assert file.find(41, -1) is None, "it is cancelled"
            (chunk,) = file.row_chunks()
            assert [keys.tolist() for keys in file.keys_of(chunk)] == [[START + 5, START], [40, 41]]
            continue
        with pytest.raises(PendingDamagedError):
            [file.prove(chunk) for chunk in file.chunks()]


@pytest.mark.parametrize("place", range(HEAD_BYTES, HEAD_BYTES + 4 * 8))
def test_keys_that_a_head_does_not_know_are_damage_also_where_the_checksum_is_not_looked_at(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list looks at ticks and offsets alone: a row with a flipped tick was left out of it without
    a word.
    """
    disk = SimDisk()
    file = written(SimFiles(disk))
    inode = disk.names[file.path]
    assert inode is not None
    inode.data[place] ^= 1
    monkeypatch.setattr(bucket_files, "_keys", {})
    (chunk,) = file.row_chunks()
    with pytest.raises(PendingDamagedError, match="other rows at 0 than its head says"):
        file.keys_of(chunk)


def test_another_buckets_file_under_a_files_name_is_known_as_another() -> None:
    disk = SimDisk()
    files = SimFiles(disk)
    file = written(files)
    other = BucketFile(files, "/data", BucketEntry(2, START, 8, 0, 0, 0, 0))
    other.append(KIND_ROWS, np.array([START + 5, START]), np.array([50, 51]), b"an Arrow message")
    other.append(KIND_CANCELLED, np.empty(0, np.int64), np.array([51]), b"")
    disk.names[file.path] = disk.names[other.path]
    with pytest.raises(PendingDamagedError, match="another bucket"):
        BucketFile(files, "/data", file.entry).chunks()
    assert len(BucketFile(files, "/data", replace(file.entry, first_crc=0)).chunks()) == 2, (
        "what version 2 wrote has nothing to tell by"
    )
    assert len(BucketFile(files, "/data", other.entry).chunks()) == 2


def test_the_bytes_of_a_manifest_are_the_golden_ones_and_another_version_is_refused() -> None:
    files = SimFiles(SimDisk())
    entry = BucketEntry(2, START, 7, 0, 144, 2, 1, first_crc=0xC0FFEE)
    manifest = Manifest(
        TOPIC_ID.hex(),
        42,
        1_700_000_000_001,
        8,
        [entry],
        [{"offset": 3, "repeat": "{}", "due_us": 5, "row": ""}],
    )
    golden = (GOLDEN / "pending_v3.json").read_bytes()
    assert manifest.encode() == golden
    save_manifest(files, "/data", manifest)
    assert load_manifest(files, "/data", TOPIC_ID) == manifest
    assert read_cursor(files, "/data", TOPIC_ID) == 42
    with_batches = replace(manifest, open_batches=[[1 << 62, 3, 20, 30]], committing=[17, 21])
    assert with_batches.encode() == (GOLDEN / "pending_v4.json").read_bytes()
    save_manifest(files, "/data", with_batches)
    assert load_manifest(files, "/data", TOPIC_ID) == with_batches
    assert read_cursor(files, "/data", TOPIC_ID) == 17, "the log is kept from there"
    with_changes = replace(
        with_batches, reserved=[[1 << 62, 3, 12, 0, 1_700_000_000_000, 4, 1_700_000_000_001]]
    )
    assert with_changes.encode() == (GOLDEN / "pending_v5.json").read_bytes()
    save_manifest(files, "/data", with_changes)
    assert load_manifest(files, "/data", TOPIC_ID) == with_changes
    assert read_cursor(files, "/data", TOPIC_ID) == 12, "the log is kept from there"
    assert b'"version":5' in replace(manifest, has_returned=True).encode()
    altered = replace(with_changes, schema_id=22, file_schemas={"12": [7]})
    assert altered.encode() == (GOLDEN / "pending_v6.json").read_bytes()
    save_manifest(files, "/data", altered)
    assert load_manifest(files, "/data", TOPIC_ID) == altered
    write_durably(files, "/data", "pending.json", (GOLDEN / "pending_v2.json").read_bytes())
    assert load_manifest(files, "/data", TOPIC_ID) == replace(
        manifest, files=[replace(entry, first_crc=0)]
    )
    write_durably(
        files,
        "/data",
        "pending.json",
        checked_json.encode({**json.loads(golden)["content"], "version": 1}),
    )
    with pytest.raises(PendingDamagedError):
        load_manifest(files, "/data", TOPIC_ID)
