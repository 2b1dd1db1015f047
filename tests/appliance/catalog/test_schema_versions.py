"""Schema versions in the catalog: ordered, kept with their topic, and never under a used id."""

from __future__ import annotations

import pathlib
import sqlite3
from collections.abc import Iterator

import pytest

from appliance.catalog.catalog import Catalog, Topic
from appliance.catalog.deleted_topics import DeletedTopics, deleted_topic
from appliance.catalog.rows import SchemaVersion
from appliance.catalog.tables import schemas as module
from tailrace.core.errors import InvalidSchemaError

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


@pytest.fixture
def catalog(tmp_path: pathlib.Path) -> Iterator[Catalog]:
    opened = Catalog(str(tmp_path / "coordinator.db"), 16)
    opened.slots.register([("a", "/a")])
    yield opened
    opened.close()


def typed(catalog: Catalog, name: str, schema: bytes) -> Topic:
    return catalog.create_topic(name, 1, {}, schema, True, 5, author="ann")


def counts(catalog: Catalog) -> tuple[int, int]:
    schemas, versions = (
        catalog.database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for table in ("schemas", "schema_versions")
    )
    return schemas, versions


def test_versions_are_listed_in_order_with_time_and_author(catalog: Catalog) -> None:
    topic = typed(catalog, "t", b"one")
    topic = catalog.alter_schema(topic, b"two", 6, "bob")
    topic = catalog.alter_schema(topic, b"three", 7, "")
    assert topic.versions == (
        SchemaVersion(1, b"one", 5, "ann"),
        SchemaVersion(2, b"two", 6, "bob"),
        SchemaVersion(3, b"three", 7, ""),
    )
    assert (topic.schema_id, topic.schema, topic.version) == (3, b"three", 3)
    assert topic.older_schemas == {1: b"one", 2: b"two"}
    assert catalog.topics() == [topic]


def test_columns_that_come_back_are_a_version_with_an_id_of_its_own(catalog: Catalog) -> None:
    topic = typed(catalog, "t", b"one")
    for schema in (b"two", b"one", b"two"):
        topic = catalog.alter_schema(topic, schema, 6, "")
    assert [version.schema_id for version in topic.versions] == [1, 2, 3, 4]


def test_ids_ascend_where_another_topic_has_the_schema_already(catalog: Catalog) -> None:
    other = typed(catalog, "other", b"two")
    topic = catalog.alter_schema(typed(catalog, "t", b"one"), b"two", 6, "")
    assert topic.schema_id > topic.versions[0].schema_id > other.schema_id
    catalog.forget(topic.topic_id)
    assert catalog.topics() == [other]
    assert counts(catalog) == (1, 1)
    assert catalog.alter_schema(other, b"three", 7, "").schema_id == 4, "2 and 3 were given"


def test_a_topic_without_a_schema_of_its_own_has_no_versions(catalog: Catalog) -> None:
    assert catalog.create_topic("t", 1, {}, b"default", False, 5).versions == ()


def test_versions_survive_the_bin_and_go_with_the_last_files(catalog: Catalog) -> None:
    topic = catalog.alter_schema(typed(catalog, "t", b"one"), b"two", 6, "bob")
    DeletedTopics(catalog).put(deleted_topic(catalog.mark_deleting(topic, 10), 1, 2, 3))
    [deleted] = DeletedTopics(catalog).all()
    assert deleted.topic.versions == topic.versions
    assert DeletedTopics(catalog).undelete(deleted, "u").versions == topic.versions
    DeletedTopics(catalog).put(
        deleted_topic(catalog.mark_deleting(catalog.topics()[0], 10), 1, 2, 3)
    )
    DeletedTopics(catalog).forget(topic.topic_id)
    assert counts(catalog) == (0, 0)


def test_a_restored_topic_has_its_versions(catalog: Catalog) -> None:
    topic = catalog.alter_schema(typed(catalog, "t", b"one"), b"two", 6, "bob")
    catalog.forget(topic.topic_id)
    catalog.restore_topic(topic)
    assert catalog.topics() == [topic]
    assert catalog.alter_schema(topic, b"three", 7, "").schema_id == 3


def test_versions_and_their_bytes_have_a_limit(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = typed(catalog, "t", b"one")
    with pytest.raises(InvalidSchemaError, match="262147 bytes; the limit is 262144: create"):
        catalog.alter_schema(topic, bytes(256 << 10), 6, "")
    monkeypatch.setattr(module, "SCHEMA_VERSIONS_MAX", 2)
    topic = catalog.alter_schema(topic, b"two", 6, "")
    with pytest.raises(InvalidSchemaError, match="2 schema versions, which is the limit"):
        catalog.alter_schema(topic, b"three", 6, "")
    assert catalog.topics() == [topic]


def test_a_catalog_of_the_version_before_gets_a_version_for_each_typed_topic(
    tmp_path: pathlib.Path,
) -> None:
    path = str(tmp_path / "old.db")
    old = sqlite3.connect(path)
    old.executescript((GOLDEN / "catalog_v6.sql").read_text())
    old.close()
    for _ in range(2):  # upgraded, and upgraded already
        opened = Catalog(path, 16)
        opened.slots.register([("a", "/a")])
        plain, topic = opened.topics()
        assert plain.versions == ()
        assert topic.versions == (SchemaVersion(9, b"\x01", 78, ""),)
        [deleted] = DeletedTopics(opened).all()
        assert deleted.topic.versions == (SchemaVersion(11, b"\x02", 79, ""),)
        assert opened.check() == ""
        assert not opened.database.execute("PRAGMA foreign_key_check").fetchall()
        opened.close()
    opened = Catalog(path, 16)
    opened.slots.register([("a", "/a")])
    assert opened.alter_schema(topic, b"\x01\x02", 80, "ann").schema_id == 12
    with pytest.raises(sqlite3.IntegrityError):
        opened.database.execute("DELETE FROM schemas WHERE schema_id = 9")
    opened.close()
