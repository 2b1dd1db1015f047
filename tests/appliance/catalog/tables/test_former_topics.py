"""Times of creation of topics whose names were in use before: they lie behind all leader epochs
that Kafka's clients may have seen of the former topic.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from appliance.catalog.catalog import Catalog
from appliance.catalog.tables.former_topics import KEPT_US
from appliance.config.default_schema import DEFAULT_SCHEMA_MESSAGE
from netfront.kafka.apis.cluster.leader_epochs import OF_DELETED, from_kafka, to_kafka
from shm.messages.lane_messages import Assignment

NOW_US = 1_790_000_000_123_456
SECOND_US = 1_000_000


@pytest.fixture
def catalog(tmp_path: pathlib.Path) -> Iterator[Catalog]:
    opened = Catalog(str(tmp_path / "coordinator.db"), 8)
    opened.slots.register([("a", "/a")])
    yield opened
    opened.close()


def create(catalog: Catalog, now_us: int, name: str = "t") -> int:
    made = catalog.create_topic(name, 1, {}, DEFAULT_SCHEMA_MESSAGE, False, now_us)
    return made.created_us


def delete(catalog: Catalog, leader_epoch: int, now_us: int) -> None:
    topic = catalog.known("t")
    catalog.former_topics.note("t", topic.created_us, leader_epoch, now_us)
    catalog.forget(topic.topic_id)


def route(created_us: int) -> Assignment:
    made = Assignment.__new__(Assignment)
    object.__setattr__(made, "created_us", created_us)
    return made


@pytest.mark.parametrize("leader_epoch", [-1, 0, 3, 1 << 16])
@pytest.mark.parametrize("now_us", [NOW_US, NOW_US + 1, NOW_US - 60 * SECOND_US])
def test_epochs_of_a_topic_made_again_at_once_are_above_those_of_the_former_one(
    catalog: Catalog, leader_epoch: int, now_us: int
) -> None:
    """The clock may have been set back meanwhile."""
    former = route(create(catalog, NOW_US))
    for _ in range(3):
        delete(catalog, leader_epoch, now_us)
        made = route(create(catalog, now_us))
        seen = to_kafka(former, max(leader_epoch, 0))
        assert to_kafka(made, 0) > seen
        assert from_kafka(made, seen) == OF_DELETED
        former = made


def test_a_topic_counts_as_made_now_where_its_name_is_new_or_long_free(catalog: Catalog) -> None:
    assert create(catalog, NOW_US) == NOW_US
    delete(catalog, 0, NOW_US)
    assert create(catalog, NOW_US, "other") == NOW_US
    assert create(catalog, NOW_US + 9 * SECOND_US) == NOW_US + 9 * SECOND_US


def test_names_are_forgotten_with_time(catalog: Catalog) -> None:
    create(catalog, NOW_US)
    delete(catalog, 0, NOW_US)
    create(catalog, NOW_US + 2 * KEPT_US)
    delete(catalog, 0, NOW_US + 4 * KEPT_US)
    (rows,) = catalog.database.execute("SELECT count(*) FROM former_topics").fetchone()
    assert rows == 0


def test_a_restarted_controller_knows_them(catalog: Catalog, tmp_path: pathlib.Path) -> None:
    create(catalog, NOW_US)
    delete(catalog, 5, NOW_US)
    catalog.close()
    catalog.__init__(str(tmp_path / "coordinator.db"), 8)  # type: ignore[misc]
    assert create(catalog, NOW_US) > NOW_US + 5 * SECOND_US
