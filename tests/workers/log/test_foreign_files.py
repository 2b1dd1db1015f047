"""A file that is whole, but another kind under this name, is damage like any other: checksums prove
bytes, not meanings.
"""

from __future__ import annotations

import pathlib

import pytest

from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import decode_identity
from tailrace.format.directory.delay_files import PENDING_VERSION, Manifest, PendingDamagedError
from tailrace.format.directory.partition_metadata import PartitionMetadata
from workers.log.producers.producer_snapshots import decode_producers, encode_producers
from workers.log.producers.producer_state import ProducerTable
from workers.segment.checkpoint import load_checkpoint
from workers.segment.files import DiskFiles

TOPIC_ID = bytes(range(16))
KINDS = {
    "partition.json": PartitionMetadata("t", 0, TOPIC_ID, {}).encode(),
    "pending.json": checked_json.encode({"version": PENDING_VERSION}),
    "producers": encode_producers(ProducerTable()),
    "a list": checked_json.encode([]),
    "nothing": checked_json.encode({}),
    "of this topic": checked_json.encode({"topic_id": TOPIC_ID.hex(), "sealed": 3}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint(tmp_path: pathlib.Path, kind: str) -> None:
    (tmp_path / "checkpoint.0").write_bytes(KINDS[kind])
    assert load_checkpoint(DiskFiles(), str(tmp_path), TOPIC_ID.hex()) == (None, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_others(kind: str) -> None:
    data = KINDS[kind]
    assert decode_identity(data) is None
    assert kind == "partition.json" or PartitionMetadata.decode(data) is None
    assert kind in ("producers", "a list") or decode_producers(data) is None
    with pytest.raises(PendingDamagedError):
        Manifest.decode(data)
