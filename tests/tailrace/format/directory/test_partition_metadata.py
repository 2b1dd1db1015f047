"""`partition.json`: whole in both directions, and files of the format before this one are read."""

from __future__ import annotations

import pathlib
from dataclasses import asdict, replace

import pytest

from tailrace.format.directory import checked_json
from tailrace.format.directory.partition_metadata import (
    DamagedRange,
    Decision,
    Epoch,
    PartitionMetadata,
    SlotMapEnd,
)

GOLDEN = pathlib.Path(__file__).parents[3] / "golden"
FILE = PartitionMetadata(
    "orders", 3, bytes(range(16)), {1: b"schema", 4: b"other"}, 50, [Epoch(0, 0), Epoch(1, 70)],
    [DamagedRange(0, 10, 20, 55, 60)], "a disk", "run",
    Decision(7, 12, 4, True, 1_700_000_000_000_000, "", {"retention.ms": -1}, [4, 12]),
    [SlotMapEnd(2, 99)],
)  # fmt: skip


def test_both_directions() -> None:
    assert PartitionMetadata.decode(FILE.encode()) == FILE


def test_the_bytes_are_the_golden_ones_and_those_of_the_format_before_are_read() -> None:
    assert FILE.encode() == (GOLDEN / "partition_v5.json").read_bytes()
    before = PartitionMetadata.decode((GOLDEN / "partition_v4.json").read_bytes())
    assert before == PartitionMetadata.decode((GOLDEN / "partition_v3.json").read_bytes())
    assert before is not None
    assert FILE.decision is not None
    assert replace(before, decision=FILE.decision, map_ends=FILE.map_ends) == FILE
    assert before.decision == replace(FILE.decision, slot_counts=[])


def test_every_cut_and_every_flipped_byte_is_known_as_damage() -> None:
    data = FILE.encode()
    for index in range(len(data)):
        assert PartitionMetadata.decode(data[:index]) is None
        assert (
            PartitionMetadata.decode(data[:index] + bytes([data[index] ^ 4]) + data[index + 1 :])
            is None
        )


@pytest.mark.parametrize(
    ("version", "is_read"), [(1, False), (2, True), (3, True), (4, True), (6, False)]
)
def test_versions(version: int, is_read: bool) -> None:
    """A file of version 2 has no decision of the topic."""
    fields = checked_json.decode(FILE.encode())
    assert fields is not None
    del fields["decision"]
    found = PartitionMetadata.decode(checked_json.encode({**fields, "format": version}))
    assert (found is not None) is is_read
    if found is not None:
        assert found.decision is None
        assert asdict(found) == {**asdict(FILE), "decision": None}


def test_another_checked_file_under_its_name_is_known_as_damage() -> None:
    fields = checked_json.decode(FILE.encode())
    assert fields is not None
    assert PartitionMetadata.decode(checked_json.encode({"offset": 7})) is None
    for name in set(fields) - {"decision", "run_id"}:
        assert PartitionMetadata.decode(checked_json.encode({**fields, name: [1]})) != FILE
        PartitionMetadata.decode(
            checked_json.encode({key: value for key, value in fields.items() if key != name})
        )


def test_a_log_notes_where_each_slot_map_but_the_first_begins_to_hold_once() -> None:
    file = PartitionMetadata("orders", 3, bytes(16), {})
    assert [file.note_map(version, end) for version,
    end in ((0, 5), (1, 5), (2, 7), (2, 9), (3, 9), (1, 12))] == [
        False, False, True, False, True, False,
    ]  # fmt: skip
    assert file.map_ends == [SlotMapEnd(2, 7), SlotMapEnd(3, 9)]
