"""The bin by an injected clock: what expires, what a full disk takes, what is sent to flushers."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from appliance.catalog.catalog import Catalog, PartitionRow, Topic
from appliance.catalog.deleted_topics import DeletedTopics
from appliance.config.default_schema import DEFAULT_SCHEMA_MESSAGE
from appliance.control.request_fields import Requester
from appliance.control.topics.bin import CHECK_NS, REPEAT_NS, REQUESTS_MAX, TopicBin
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, StorageError, TailraceError
from tailrace.core.schedule.delays import delay_log_name
from tailrace.format.directory.data_dir import bin_name
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import decode_json

GOLDEN = pathlib.Path(__file__).parents[3] / "golden"
REQUESTER = Requester(0, 1, 2)


class World:
    """The bin with a catalog; the disks and the flushers are what the test says."""

    def __init__(self, path: pathlib.Path) -> None:
        self.catalog = Catalog(str(path / "coordinator.db"), 100)
        self.catalog.slots.register([("a", "/a")])
        self.elapsed_ms = 0
        self.now_ns = 1
        self.wall_us = 0
        self.names: set[str] = set()
        self.is_short = False
        self.asked: list[bytes] = []
        self.purged: list[str] = []
        self.answers: list[tuple[ErrorCode, dict[str, Any]]] = []
        self.bin = self.successor()

    def successor(self) -> TopicBin:
        """The bin of a controller that starts now."""
        return TopicBin(
            self.catalog, self, lambda _row: 0,  # type: ignore[arg-type]
            lambda _index, topic_id: self.asked.append(topic_id),
            lambda topic: self.purged.append(topic.name), lambda: self.elapsed_ms, lambda _: None,
            lambda: self.wall_us,
        )  # fmt: skip

    # as `appliance.control.host_view.HostView`

    def bin_names(self, _index: int) -> list[str]:
        return sorted(self.names)

    def bin_bytes(self, _index: int, _name: str) -> int:
        return 1000

    def is_short_of_space(self, _index: int) -> bool:
        return self.is_short

    def delete(self, name: str, kept_ms: int) -> Topic:
        """Make a topic, and put it into the bin."""
        return self.put(self.make(name), kept_ms)

    def make(self, name: str, delay_of: bytes = b"") -> Topic:
        return self.catalog.create_topic(name, 2, {}, DEFAULT_SCHEMA_MESSAGE, False, 5, delay_of)

    def put(self, topic: Topic, kept_ms: int) -> Topic:
        self.wall_us += 1
        topic = self.catalog.mark_deleting(topic, kept_ms)
        self.names |= {bin_name(topic.topic_id, row.partition) for row in topic.partitions}
        self.bin.put(topic, topic.bin)
        return topic

    def step(self) -> None:
        """One step, as the controller makes it, behind the longest interval."""
        self.now_ns += REPEAT_NS + CHECK_NS
        self.catalog.begin_step()
        self.bin.finish(self.now_ns)
        self.bin.step(self.now_ns)
        assert self.catalog.commit_step(lambda _what, error: str(error)) in (True, False)
        self.bin.answer(
            self.now_ns, lambda _to, code, body: self.answers.append((code, decode_json(body))),
            1 << 19,
        )  # fmt: skip

    def kept(self) -> list[str]:
        return [topic.name for topic in self.bin.kept()]


@pytest.fixture
def world(tmp_path: pathlib.Path) -> World:
    return World(tmp_path)


def test_a_topic_expires_when_its_own_retention_has_passed(world: World) -> None:
    first, _ = world.delete("first", 10), world.delete("second", 20)
    world.elapsed_ms = 9
    world.step()
    assert world.kept() == ["first", "second"]
    world.elapsed_ms = 10
    world.step()
    assert world.kept() == ["second"]
    assert not world.asked  # the decision is on the disk only now
    world.step()
    assert set(world.asked) == {first.topic_id}
    assert world.purged == ["first"]


def test_a_purge_is_over_when_the_files_are_gone_and_is_repeated_until_then(world: World) -> None:
    topic = world.make("t")
    log = world.make(delay_log_name("t"), topic.topic_id)
    for each in (topic, log):
        world.put(each, 10)
    world.bin.take(REQUESTER, Api.PURGE_TOPICS, {"topics": [{"name": "t"}]}, 1, 1 << 19)
    world.step()
    world.step()
    assert set(world.asked) == {topic.topic_id, log.topic_id}
    world.bin = world.successor()
    world.asked.clear()
    world.step()
    assert set(world.asked) == {topic.topic_id, log.topic_id}
    world.bin.take(REQUESTER, Api.LIST_DELETED_TOPICS, {}, 1, 1 << 19)
    world.names.clear()
    world.step()
    assert DeletedTopics(world.catalog).all() == []


def test_a_request_is_answered_when_all_that_it_names_is_removed(world: World) -> None:
    world.delete("t", 10)
    world.bin.take(
        REQUESTER, Api.PURGE_TOPICS, {"topics": [{"name": "t"}, {"name": "u"}, 5]}, 1, 1 << 19
    )
    world.step()
    assert not world.answers
    world.names.clear()
    world.step()
    [(code, answer)] = world.answers
    assert code is ErrorCode.OK
    assert [result["code"] for result in answer["results"]] == [
        0, int(ErrorCode.UNKNOWN_TOPIC), int(ErrorCode.INVALID_REQUEST),
    ]  # fmt: skip
    assert answer["results"][0]["bytes"] == 2000


def test_more_purges_at_once_than_wait_are_asked_to_come_later(world: World) -> None:
    world.delete("t", 10)
    request = {"topics": [{"name": "t"}]}
    for _ in range(REQUESTS_MAX):
        world.bin.take(REQUESTER, Api.PURGE_TOPICS, request, 1, 1 << 19)
    with pytest.raises(TailraceError, match="try again later"):
        world.bin.take(REQUESTER, Api.PURGE_TOPICS, request, 1, 1 << 19)


def test_a_short_disk_takes_the_oldest_deletion_and_the_next_when_that_is_gone(
    world: World,
) -> None:
    old, _ = world.delete("old", 1000), world.delete("new", 10)
    world.is_short = True
    for _ in range(3):
        world.step()
        assert world.kept() == ["new"]
    world.names = {name for name in world.names if not name.startswith(old.topic_id.hex())}
    world.is_short = False
    world.step()
    assert world.kept() == ["new"]
    world.is_short = True
    world.step()
    assert world.kept() == []


def test_a_topic_with_a_missing_partition_does_not_come_back_empty(world: World) -> None:
    topic = world.delete("t", 10)
    deleted = world.bin.named({"name": topic.topic_id.hex()})
    world.bin.check_whole(deleted)
    world.names.discard(bin_name(topic.topic_id, 1))
    with pytest.raises(StorageError, match="-1 is missing"):
        world.bin.check_whole(deleted)


def test_a_list_has_pages(world: World) -> None:
    for number in range(5):
        world.delete(f"t{number}", number + 1)
    found: list[str] = []
    request: dict[str, Any] = {}
    while True:
        answer = world.bin.take(REQUESTER, Api.LIST_DELETED_TOPICS, request, 1, 600)
        assert answer is not None
        found += [entry["name"] for entry in answer["topics"]]
        if answer["next"] is None:
            break
        request = {"after": answer["next"]}
    assert found == ["t0", "t1", "t2", "t3", "t4"]
    with pytest.raises(InvalidRequestError, match="begin again"):
        world.bin.take(REQUESTER, Api.LIST_DELETED_TOPICS, {"after": "x"}, 1, 600)


def test_a_topic_comes_back_with_new_slots_and_all_else(world: World) -> None:
    topic = world.delete("t", 10)
    world.catalog.create_topic("u", 3, {}, DEFAULT_SCHEMA_MESSAGE, False, 5)
    back = DeletedTopics(world.catalog).undelete(world.bin.named({"name": "t"}), "v")
    assert (back.name, back.version, back.is_coming_back) == ("v", topic.version + 1, True)
    assert back.topic_id == topic.topic_id
    assert [row.slot for row in back.partitions] == [3, 4]
    world.catalog.mark_active(back, {})
    active = world.catalog.topic("v")
    assert active is not None
    assert (active.state, active.bin) == ("active", 0)


def test_the_rows_of_the_bin_are_those_of_the_golden_file(world: World) -> None:
    world.catalog.database.executescript((GOLDEN / "catalog_v6_bin.sql").read_text())
    [deleted] = DeletedTopics(world.catalog).all()
    topic = Topic(
        bytes(range(16)), "orders", "kept", 5, False, 9, b"\x00\xff", {"retention.ms": -1},
        (PartitionRow(0, 0, -1, 10, "0-8191"), PartitionRow(1, 0, -1, 0, "8192-16383", ((0, 7),))),
        77, b"", (1, 2),
    )  # fmt: skip
    assert deleted == (topic, 123, 456, 789)
    DeletedTopics(world.catalog).forget(topic.topic_id)
    schemas = world.catalog.database.execute("SELECT count(*) FROM schemas").fetchone()
    assert schemas == (0,)
    DeletedTopics(world.catalog).restore(deleted)
    assert DeletedTopics(world.catalog).all() == [deleted]
