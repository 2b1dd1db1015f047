"""Parts of files that grow from backup to backup."""

from __future__ import annotations

import os
import pathlib
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.backup.manifest import Manifest, Part
from appliance.backup.target.object_store import ObjectStore, open_target
from appliance.backup.writer import BackupWriter

INSTANCE = "ab" * 16


def content(store: ObjectStore, manifest: Manifest, parts: list[Part]) -> bytes:
    return b"".join(b"".join(store.read(manifest.objects[part.number], part)) for part in parts)


def finished(writer: BackupWriter) -> Manifest:
    writer.finish()
    manifest = Manifest("00000001-20270101T000000.000000Z", 1, "1", INSTANCE, 0, 0)
    manifest.objects = writer.objects
    return manifest


@settings(max_examples=20)
@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=30))
def test_a_growing_file_is_read_back_from_each_backup_and_has_few_parts(
    growths: list[int],
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        store = ObjectStore(open_target(f"{scratch}/target"), None)
        store.target.lock()
        store.begin(INSTANCE)
        path = pathlib.Path(scratch) / "segment"
        path.touch()
        previous: Manifest | None = None
        parts: list[Part] = []
        size, sent = 0, 0
        for number, growth in enumerate(growths):
            with path.open("ab") as file:
                file.write(bytes([number]) * growth)
            writer = BackupWriter(store, previous, may_share=False)
            fd = os.open(path, os.O_RDONLY)
            try:
                parts = writer.grown(fd, parts, size, size + growth)
            finally:
                os.close(fd)
            previous = finished(writer)
            size, sent = size + growth, sent + writer.sent_bytes
            assert content(store, previous, parts) == path.read_bytes()
        assert len(parts) <= max(1, size).bit_length() + 1
        assert sent <= max(1, size) * (max(1, len(growths)).bit_length() + 1)
        store.target.unlock()


def test_a_small_file_that_did_not_change_is_taken_over(tmp_path: pathlib.Path) -> None:
    store = ObjectStore(open_target(str(tmp_path / "target")), None)
    store.target.lock()
    store.begin(INSTANCE)
    writer = BackupWriter(store, None, may_share=False)
    first = [writer.add_small(data, None) for data in (b"one", b"two")]
    manifest = finished(writer)
    again = BackupWriter(store, manifest, may_share=False)
    second = [again.add_small(b"one", first[0]), again.add_small(b"TWO", first[1])]
    newest = finished(again)
    assert content(store, newest, second) == b"oneTWO"
    assert again.sent_bytes == 3
    assert newest.objects[0] == manifest.objects[0]
