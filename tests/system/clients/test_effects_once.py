"""Consumers killed anywhere, and what came of their effects: exact where the helper says so, off by
one for each kill where it does not.

The victims and the places where they die: tests/kit/members/killed_consumers.py.
"""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
from collections import Counter
from collections.abc import Iterator

import pytest
import redis

from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.hosts.redis_server import redis_server
from tests.kit.matrices import short
from tests.kit.members.killed_consumers import AT_ONCE, Plan, run

COUNT = 3000
PARTITIONS = 2


@pytest.fixture
def filled(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic whose values are the numbers below COUNT."""
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, partitions=PARTITIONS)])
    with Producer(appliance.address) as producer:
        for number in range(COUNT):
            producer.send(topic, b"%d" % number, partition=number % PARTITIONS)
    return topic


@pytest.fixture
def database(tmp_path: pathlib.Path) -> str:
    path = str(tmp_path / "results")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "CREATE TABLE sales (partition_number INTEGER, record_offset INTEGER, value INTEGER)"
        )
        connection.execute(
            "CREATE TABLE accounts (id INTEGER PRIMARY KEY, version INTEGER, balance INTEGER)"
        )
        connection.executemany(
            "INSERT INTO accounts VALUES (?, 0, 0)", [(number,) for number in range(PARTITIONS)]
        )
        connection.commit()
    return path


def rows(path: str, query: str) -> list[tuple[int, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def assert_each_once(path: str) -> None:
    """Each record of the topic is there once, and in the order of its partition."""
    found = rows(path, "SELECT partition_number, record_offset, value FROM sales ORDER BY rowid")
    assert sorted(value for _, _, value in found) == list(range(COUNT))
    for partition in range(PARTITIONS):
        assert [offset for its, offset, _ in found if its == partition] == list(
            range(COUNT // PARTITIONS)
        )


@pytest.mark.parametrize(
    ("mode", "side_by_side"),
    short(
        [("group", 2), ("sqlite3", 1), ("sqlite3", 2), ("sqlalchemy", 2), ("group in a loop", 2)]
    ),
)
def test_consumers_killed_anywhere_apply_each_record_once_with_offsets_in_the_transaction(
    mode: str, side_by_side: int, appliance: EmbeddedAppliance, filled: str, database: str
) -> None:
    killed = run(
        Plan(mode, appliance.address, filled, database, seed=16, side_by_side=side_by_side)
    )
    assert_each_once(database)
    assert killed >= 4
    ends = rows(database, "SELECT partition_number, next_offset FROM tailrace_offsets ORDER BY 1")
    assert ends == [(partition, COUNT // PARTITIONS) for partition in range(PARTITIONS)]


@pytest.mark.parametrize("order", short(["commit first", "effect first", "auto commit"]))
def test_members_of_a_group_killed_anywhere_miss_or_repeat_what_was_polled_last_as_the_order_of_commit_and_effect_says(  # noqa: E501
    order: str, appliance: EmbeddedAppliance, filled: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "effects"
    killed = run(
        Plan(order, appliance.address, filled, str(path), seed=16, lives=4, side_by_side=2)
    )
    counts = Counter(map(int, path.read_text().split()))
    assert set(counts) <= set(range(COUNT))
    missed, repeated = COUNT - len(counts), counts.total() - len(counts)
    assert killed >= 4
    if order == "commit first":
        assert (missed <= killed * AT_ONCE, repeated) == (True, 0), (
            f"{missed} missed by {killed} kills"
        )
    elif order == "effect first":
        assert (missed, repeated <= killed * AT_ONCE) == (0, True), (
            f"{repeated} repeated by {killed} kills"
        )
    else:
        assert missed == 0, "auto commit commits only what was polled before"


def test_consumers_killed_anywhere_that_read_everything_again_apply_each_key_once_with_a_dedup_table(  # noqa: E501
    appliance: EmbeddedAppliance, filled: str, database: str
) -> None:
    killed = run(Plan("dedup", appliance.address, filled, database, seed=16, side_by_side=2))
    assert sorted(value for (value,) in rows(database, "SELECT value FROM sales")) == list(
        range(COUNT)
    )
    assert killed >= 4


def test_consumers_of_a_queue_killed_anywhere_apply_each_record_once_with_a_dedup_table(
    appliance: EmbeddedAppliance, filled: str, database: str
) -> None:
    killed = run(
        Plan(
            "queue",
            appliance.address,
            filled,
            database,
            seed=16,
            lives=4,
            side_by_side=2,
            count=COUNT,
        )
    )
    assert sorted(value for (value,) in rows(database, "SELECT value FROM sales")) == list(
        range(COUNT)
    )
    assert killed >= 4


def test_consumers_killed_anywhere_that_read_everything_again_make_each_version_once(
    appliance: EmbeddedAppliance, filled: str, database: str
) -> None:
    killed = run(Plan("versions", appliance.address, filled, database, seed=16, side_by_side=2))
    assert_each_once(database)
    last = COUNT // PARTITIONS - 1
    assert (
        rows(database, "SELECT version, balance FROM accounts")
        == [(last + 1, last * (last + 1) // 2)] * PARTITIONS
    )
    assert killed >= 4


@pytest.fixture(scope="module")
def redis_socket() -> Iterator[str]:
    with redis_server() as path:
        yield path


@pytest.mark.slow_because("each kill starts a consumer")
@pytest.mark.parametrize("order", short(["guard first", "effect first"]))
def test_a_guard_beside_the_effect_is_off_by_one_for_each_kill_in_the_direction_that_was_chosen(
    order: str, appliance: EmbeddedAppliance, filled: str, tmp_path: pathlib.Path, redis_socket: str
) -> None:
    path = tmp_path / "effects"
    killed = run(
        Plan(
            f"redis, {order}",
            appliance.address,
            filled,
            str(path),
            seed=16,
            redis_socket=redis_socket,
        )
    )
    counts = Counter(map(int, path.read_text().split()))
    assert set(counts) <= set(range(COUNT))
    missed, repeated = COUNT - len(counts), counts.total() - len(counts)
    assert killed >= 4
    if order == "guard first":
        assert (missed <= killed, repeated) == (True, 0), f"{missed} missed by {killed} kills"
    else:
        assert (missed, repeated <= killed) == (0, True), f"{repeated} repeated by {killed} kills"


def test_a_guard_in_the_transaction_of_an_effect_in_redis_is_exact(
    appliance: EmbeddedAppliance, filled: str, redis_socket: str
) -> None:
    killed = run(
        Plan("in redis", appliance.address, filled, "", seed=16, redis_socket=redis_socket)
    )
    with redis.Redis(unix_socket_path=redis_socket) as client:
        assert sorted(map(int, client.lrange(filled, 0, -1))) == list(range(COUNT))
    assert killed >= 4
