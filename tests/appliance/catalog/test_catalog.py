"""The catalog: what it refuses decides nothing, what it gives once it never gives again, and what
clients can make grow has an end.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import sqlite3
from collections.abc import Iterator

import pytest

from appliance.catalog.catalog import (
    Catalog,
    CatalogFullError,
    PartitionRow,
    Topic,
)
from appliance.catalog.database import CatalogVersionError, open_database
from appliance.catalog.tables import producer_ids, schemas
from appliance.config.default_schema import DEFAULT_SCHEMA_MESSAGE
from shm.messages.transaction_messages import PRODUCER_IDS_IN_BLOCK
from tailrace.core.errors import DiskFullError, InvalidSchemaError, StorageError
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS

SLOTS = 8


@pytest.fixture
def catalog(tmp_path: pathlib.Path) -> Iterator[Catalog]:
    opened = Catalog(str(tmp_path / "coordinator.db"), SLOTS)
    opened.slots.register([("a", "/a")])
    yield opened
    opened.close()


def create(
    catalog: Catalog, name: str, partitions: int = 1, schema: bytes = DEFAULT_SCHEMA_MESSAGE
) -> bytes:
    return catalog.create_topic(name, partitions, {}, schema, False, 5).topic_id


def create_both(catalog: Catalog) -> None:
    with catalog.together():
        create(catalog, "c", 2)
        create(catalog, "d", 2)


def test_a_topic_that_finds_no_room_leaves_nothing_behind(catalog: Catalog) -> None:
    create(catalog, "a", 5)
    with pytest.raises(CatalogFullError):
        create(catalog, "b", 4)
    with pytest.raises(CatalogFullError):
        create_both(catalog)
    assert [topic.name for topic in catalog.topics()] == ["a"]
    create(catalog, "e", 3)
    assert sorted(row.slot for topic in catalog.topics() for row in topic.partitions) == list(
        range(SLOTS)
    )


def test_slots_are_free_again_when_their_topic_is_forgotten(catalog: Catalog) -> None:
    for _ in range(3):
        catalog.forget(create(catalog, "a", SLOTS))
    assert catalog.topics() == []


def test_schemas_go_with_their_last_topic_and_their_numbers_are_not_given_again(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "SCHEMA_BYTES_MAX", 100)
    numbers = []
    for index in range(5):
        topic_id = create(catalog, "a", 1, bytes([index]) * 60)
        found = catalog.topic("a")
        assert found is not None
        numbers.append(found.schema_id)
        with pytest.raises(InvalidSchemaError, match="more than 100"):
            create(catalog, "b", 1, b"x" * 60)
        catalog.forget(topic_id)
    assert numbers == sorted(set(numbers))


def test_producers_that_are_remembered_have_a_number_and_none_is_given_twice(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_ids, "PRODUCERS_MAX", 3)
    given = [catalog.producers.new()[0] for _ in range(10)]
    assert given == sorted(set(given))
    assert catalog.producers.next_epoch(given[-1], 0) == (given[-1], 1)
    forgotten, epoch = catalog.producers.next_epoch(given[0], 0)
    assert forgotten > given[-1]
    assert epoch == 0


def test_a_disk_that_is_full_or_fails_is_an_error_of_one_change(
    catalog: Catalog, tmp_path: pathlib.Path
) -> None:
    """A full disk, played by SQLite's own limit of pages; a database that another process holds."""
    create(catalog, "before")
    pages = catalog._db.execute("PRAGMA page_count").fetchone()[0]
    catalog._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFullError):
        create(catalog, "large", 1, b"x" * 60_000)
    catalog._db.execute("PRAGMA max_page_count = 1000000")
    other = sqlite3.connect(tmp_path / "coordinator.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="locked"):
        create(catalog, "b")
    other.execute("ROLLBACK")
    other.close()
    create(catalog, "b")
    assert {"before", "b"} <= {topic.name for topic in catalog.topics()}


def test_a_catalog_from_before_hash_slots_is_taken_as_it_is_and_added_to(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "old.db"
    old = sqlite3.connect(path)
    old.executescript((pathlib.Path(__file__).parents[2] / "golden" / "catalog_v3.sql").read_text())
    old.close()
    for _ in range(2):  # upgraded, and upgraded already
        opened = Catalog(str(path), SLOTS)
        opened.slots.register([("a", "/a")])
        topic = opened.topic("orders")
        assert topic == Topic(
            bytes(range(16)), "orders", "active", 4, False, 1, b"\x00\xff", {"retention.ms": -1},
            (PartitionRow(0, 0, 5, 10), PartitionRow(1, 0, 6, 0)), 77,
        )  # fmt: skip
        opened.close()
    opened = Catalog(str(path), SLOTS)
    opened.slots.register([("a", "/a")])
    assert opened.create_topic(
        "slots", 2, {"partitioner": "hash_slots"}, DEFAULT_SCHEMA_MESSAGE, False, 5
    ).slot_counts == (2,)
    assert opened.producers.new()[0] == 8
    opened.close()


def test_a_slot_map_is_in_the_catalog_as_ranges_with_where_what_was_handed_over_ends(
    catalog: Catalog,
) -> None:
    made = catalog.create_topic(
        "orders", 2, {"partitioner": "hash_slots"}, DEFAULT_SCHEMA_MESSAGE, False, 5
    )
    assert [row.slots for row in made.partitions] == ["0-8191", "8192-16383"]
    grown = catalog.alter_topic(made, made.given, 4)
    assert grown.slot_counts == (2, 4)
    assert [row.slots for row in grown.partitions] == [
        "0-4095",
        "8192-12287",
        "4096-8191",
        "12288-16383",
    ]
    catalog.mark_active(grown, {2: ((0, 10),), 3: ((1, 20),)})
    found = catalog.topic("orders")
    assert found is not None
    assert [row.hand_over for row in found.partitions] == [(), (), ((0, 10),), ((1, 20),)]
    same = catalog.alter_topic(found, {**found.given, "retention.ms": 5}, 4)
    assert (same.slot_counts, [row.hand_over for row in same.partitions]) == (
        (2, 4),
        [row.hand_over for row in found.partitions],
    )
    catalog.forget(same.topic_id)
    catalog.restore_topic(same)
    assert catalog.topics() == [same]


@pytest.mark.parametrize("version", [1, 99])
def test_a_database_of_another_build_is_refused_and_stays_as_it_is(
    tmp_path: pathlib.Path, version: int
) -> None:
    path = tmp_path / "coordinator.db"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT")
        other.execute("INSERT INTO meta VALUES ('schema_version', ?)", (version,))
        other.commit()
    before = path.read_bytes()
    with pytest.raises(CatalogVersionError, match=f"version {version}; this build reads"):
        open_database(str(path))
    assert path.read_bytes() == before


def test_blocks_of_transactional_ids_are_given_once_whatever_the_clock_and_the_database_do(
    catalog: Catalog,
) -> None:
    second_us, now_us = 1_000_000, 1_760_000_000_000_000
    times = [now_us, now_us, now_us - 900 * second_us, now_us + 7 * second_us, now_us]
    firsts = [catalog.producers.new_transactional_block(time_us) for time_us in times]
    assert firsts == sorted(set(firsts))
    assert all(b - a >= PRODUCER_IDS_IN_BLOCK for a, b in itertools.pairwise(firsts))
    assert firsts[0] >= TRANSACTIONAL_PRODUCER_IDS
    catalog._db.execute("DELETE FROM meta WHERE name = 'transactional_block'")
    assert catalog.producers.new_transactional_block(now_us + 60 * second_us) > firsts[-1], (
        "it was rebuilt"
    )
    year_2105_us = 4_260_000_000 * second_us
    assert catalog.producers.new_transactional_block(year_2105_us) + PRODUCER_IDS_IN_BLOCK < 1 << 63
