"""Changes of topics when something fails that nobody expected: the entry or the request is answered
with an id, and the next one is served.
"""

from __future__ import annotations

import base64
import pathlib
from typing import Any

import orjson
import pyarrow as pa
import pytest

from appliance.catalog.catalog import Catalog, Topic
from appliance.catalog.deleted_topics import DeletedTopics, deleted_topic
from appliance.config.default_schema import DEFAULT_SCHEMA_MESSAGE
from appliance.control.request_fields import Requester
from appliance.control.topics.bin import TopicBin
from appliance.control.topics.change_queue import (
    DECIDED_AT_ONCE,
    TopicChangeQueue,
)
from appliance.control.topics.topic_commands import TopicCommands
from shm.memory.layout import SlotState
from tailrace.core import hash_slots
from tailrace.core.error_codes import ErrorCode
from tailrace.format.schema import to_message
from tailrace.protocol.frame import Api


class AppliedAtOnce:
    """A partition table whose flusher has carried out everything."""

    def __init__(self, topic_id: bytes) -> None:
        self.topic_id = topic_id
        self.leader_epoch = 0
        self.reason = 0
        self.applied_version = 1 << 30
        self.log_start_offset = 0
        self.log_end_offset = 0
        self.state = SlotState.ONLINE

    def read(self, _slot: int) -> Any:
        return self


DECIDED_ONLY = AppliedAtOnce(b"")
"""The slot of a partition that the flusher has not made yet."""


class World:
    """`appliance.control.publishing.metadata_publisher` and `shm.runtime.error_handler`, of which
    only what was told and answered is kept.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.shown: list[str] = []
        """Names of the topics that readers were told of, in order."""
        self.catalog = Catalog(f"{directory}/coordinator.db", 2000)
        self.catalog.slots.register([("a", "/a")])
        self.topics: dict[str, Topic] = {}
        self.answers: list[tuple[ErrorCode, dict[str, Any]]] = []
        self.failures: list[str] = []
        self.bin = TopicBin(
            self.catalog, Any, lambda _: None, lambda _index, _id: None, lambda _: None,  # type: ignore[arg-type]
            lambda: 0, lambda _: None, lambda: 5,
        )  # fmt: skip
        decisions = TopicCommands(
            self.catalog, self.topics, Any, self.table, lambda: 5, ring_bytes=1 << 26,  # type: ignore[arg-type]
            lane_bytes=1 << 22, topic_bin=self.bin,
        )  # fmt: skip
        self.decisions = decisions
        self.changes = self.successor()

    def successor(self) -> TopicChangeQueue:
        """Queue of a controller that starts now with the topics that are known."""
        return TopicChangeQueue(
            self.catalog, self.topics, self, self.decisions, self.bin, self, 1 << 19,  # type: ignore[arg-type]
        )  # fmt: skip

    def on_error(self, what: str, error: Exception) -> str:
        self.failures.append(f"{what} {error}")
        return "id=7"

    def table(self, row: Any) -> AppliedAtOnce:
        owner = next(topic for topic in self.topics.values() if row in topic.partitions)
        return AppliedAtOnce(owner.topic_id)

    def answer(
        self, _front: int, _session: int, _correlation_id: int, code: ErrorCode, body: bytes
    ) -> None:
        self.answers.append((code, orjson.loads(body)))

    def publish_to_readers(self, topic: Topic) -> None:
        self.shown.append(topic.name)

    awaits_worker = False

    def awaits_workers_of(self, _topic: Topic) -> bool:
        return self.awaits_worker

    def __getattr__(self, name: str) -> Any:
        if name == "placement":
            return self
        assert name in (
            "publish_to_workers",
            "assign",
            "release",
            "lacks_memory",
        ), name
        return lambda *_, **__: None

    def ask(self, names: list[str], now_ns: int = 0) -> None:
        payload = orjson.dumps({"topics": [{"name": name} for name in names]})
        self.changes.take(Requester(0, 1, 1), Api.CREATE_TOPICS, payload, now_ns)

    def change(self, api: Api, entry: dict[str, Any]) -> dict[str, Any]:
        """The result of a request of one entry."""
        self.changes.take(Requester(0, 1, 1), api, orjson.dumps({"topics": [entry]}), 0)
        self.run()
        code, answer = self.answers.pop()
        assert code is ErrorCode.OK
        result: dict[str, Any] = answer["results"][0]
        return result

    def run(self) -> int:
        """Steps until nothing waits; how many."""
        count = 0
        while self.changes.is_waiting():
            self.changes.step(0)
            count += 1
        return count


def test_a_failure_that_nobody_expected_is_one_entrys_answer(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    create = world.catalog.create_topic

    def failing(name: str, *arguments: Any, **more: Any) -> Topic:
        made = create(name, *arguments, **more)
        if name == "bad":
            raise KeyError(7)
        return made

    monkeypatch.setattr(world.catalog, "create_topic", failing)
    world.ask(["one", "bad", "two"])
    world.run()
    ((code, answer),) = world.answers
    assert code is ErrorCode.OK
    assert [result["code"] for result in answer["results"]] == [0, ErrorCode.INTERNAL_ERROR, 0]
    assert answer["results"][1]["message"] == "id=7"
    assert len(world.failures) == 1
    assert (
        sorted(world.topics) == [topic.name for topic in world.catalog.topics()] == ["one", "two"]
    )


def test_a_failure_between_decision_and_news_is_carried_out_all_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    told: list[str] = []

    def tell(topic: Topic, **_: Any) -> None:
        told.append(topic.name)
        if told == ["one"]:
            raise KeyError(7)

    monkeypatch.setattr(world, "publish_to_workers", tell, raising=False)
    world.ask(["one", "two"])
    world.run()
    assert told.count("two") == 1
    assert {name: topic.state for name, topic in world.topics.items()} == {
        "one": "active",
        "two": "active",
    }


def test_a_new_name_that_kafkas_metrics_would_take_for_another_topics_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    world = World(tmp_path)
    world.ask(["a.b_c", "a_b.c", "a.b_c2", "a.b-c", "ab", "a_b.d"])
    world.run()
    results = world.answers.pop()[1]["results"]
    assert [result["code"] for result in results] == [0, ErrorCode.INVALID_TOPIC_NAME, 0, 0, 0, 0]
    assert results[1]["message"].startswith("Topic 'a_b.c' collides with existing topic: ")
    assert "a.b_c" not in results[1]["message"], "its creator may not be allowed to see it"
    derived = {"name": "a.b.c", "configs": {"derived.from": "0" * 31 + "1"}}
    assert world.change(Api.CREATE_TOPICS, derived)["code"] == 0, "retries go on"
    world.change(Api.DELETE_TOPICS, {"name": "a.b.c"})
    again = world.change(Api.CREATE_TOPICS, {"name": "a.b_c"})
    assert again["code"] == ErrorCode.TOPIC_EXISTS
    world.topics["a_b_d"] = world.topics["a_b.d"]._replace(name="a_b_d")  # of an earlier version
    altered = {"name": "a_b.d", "configs": {"retention.ms": 60_000}}
    assert world.change(Api.ALTER_TOPICS, altered)["code"] == 0
    del world.topics["a_b_d"]
    world.change(Api.DELETE_TOPICS, {"name": "a.b_c"})
    assert world.change(Api.CREATE_TOPICS, {"name": "a_b.c"})["code"] == 0


def test_a_large_request_is_decided_a_few_at_a_time_and_before_what_came_later(
    tmp_path: pathlib.Path,
) -> None:
    world = World(tmp_path)
    names = [f"t{number}" for number in range(DECIDED_AT_ONCE * 4)]
    world.ask(names)
    world.ask([names[-1]])
    assert world.run() >= 4
    assert [result["code"] for result in world.answers[0][1]["results"]] == [0] * len(names)
    assert world.answers[1][1]["results"][0]["code"] == ErrorCode.TOPIC_EXISTS


def test_the_delay_log_of_a_topic_that_had_the_name_before_is_left_to_its_deletion(
    tmp_path: pathlib.Path,
) -> None:
    world = World(tmp_path)
    assert (
        world.change(Api.CREATE_TOPICS, {"name": "later", "configs": {"delay.enabled": True}})[
            "code"
        ]
        == 0
    )
    world.catalog.forget(world.topics.pop("later").topic_id)
    (name,) = world.topics
    log = world.topics[name] = world.catalog.mark_deleting(world.topics[name])
    refused = world.change(Api.CREATE_TOPICS, {"name": "later", "configs": {"delay.enabled": True}})
    assert (refused["code"], "try again" in refused["message"]) == (ErrorCode.TOPIC_EXISTS, True)
    assert world.change(Api.CREATE_TOPICS, {"name": "later"})["code"] == 0
    assert world.change(Api.ALTER_TOPICS, {"name": "later", "partitions": 3})["code"] == 0
    refused = world.change(Api.ALTER_TOPICS, {"name": "later", "configs": {"delay.enabled": True}})
    assert refused["code"] == ErrorCode.TOPIC_EXISTS
    assert world.change(Api.DELETE_TOPICS, {"name": "later"})["code"] == 0
    assert world.catalog.topics() == [log]
    assert world.failures == []


def test_a_refused_schema_refuses_the_settings_beside_it(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path)
    assert world.change(Api.CREATE_TOPICS, {"name": "typed"})["code"] == 0
    refused = world.change(
        Api.ALTER_TOPICS, {"name": "typed", "schema": "AA==", "configs": {"retention.ms": 1}}
    )
    assert refused["code"] == ErrorCode.INVALID_SCHEMA
    assert world.topics["typed"].given == {}


def test_an_altered_schema_is_a_version_of_its_own(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path)
    first, second = (
        base64.b64encode(to_message(pa.schema([("a", kind)]))).decode()
        for kind in (pa.int32(), pa.int64())
    )
    assert (
        world.change(Api.CREATE_TOPICS, {"name": "t", "schema": first, "author": "ann"})["code"]
        == 0
    )
    alter = {"name": "t", "schema": second, "author": "bob", "schema_id": 1}
    assert world.change(Api.ALTER_TOPICS, alter)["code"] == 0
    topic = world.topics["t"]
    assert [(each.schema_id, each.author) for each in topic.versions] == [(1, "ann"), (2, "bob")]
    assert world.decisions.describe_schemas({"topic": "t"})["versions"][1]["schema"] == second
    assert world.change(Api.ALTER_TOPICS, {**alter, "schema_id": 2})["code"] == 0
    assert world.topics["t"].versions == topic.versions, "it has this schema already"
    for wrong in (
        {"schema": first},  # narrower
        {"schema": second, "schema_id": 1},  # altered meanwhile
        {"schema": second, "author": "x" * 129},
        {"schema": second, "author": 7},
        {"schema": second, "schema_id": "2"},
    ):
        assert world.change(Api.ALTER_TOPICS, {"name": "t", **wrong})["code"] != 0
    assert world.topics["t"].versions == topic.versions


class SlotWorld(World):
    """With a topic of two partitions that has hash slots, and logs of which a test says where they
    end.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__(directory)
        self.logs: dict[int, AppliedAtOnce] = {}
        self.told: list[Topic] = []
        assert (
            self.change(
                Api.CREATE_TOPICS,
                {"name": "orders", "partitions": 2, "configs": {"partitioner": "hash_slots"}},
            )["code"]
            == 0
        )
        for partition, end in ((0, 100), (1, 50)):
            self.log(partition).log_end_offset = end
        self.decisions._state_of = lambda row: self.table(row).read(row.slot)
        self.told.clear()

    def log(self, partition: int) -> AppliedAtOnce:
        return self.logs.setdefault(partition, AppliedAtOnce(self.topics["orders"].topic_id))

    def table(self, row: Any) -> AppliedAtOnce:
        return self.log(row.partition)

    def publish_to_readers(self, topic: Topic) -> None:
        self.told.append(topic)

    def grow(self, count: int) -> None:
        self.changes.take(
            Requester(0, 1, 1),
            Api.ALTER_TOPICS,
            orjson.dumps({"topics": [{"name": "orders", "partitions": count}]}),
            0,
        )

    def hand_overs(self) -> dict[int, Any]:
        found = self.catalog.topic("orders")
        assert found is not None
        return {row.partition: row.hand_over for row in found.partitions if row.hand_over}


def test_readers_hear_of_another_slot_map_when_all_have_it_and_with_where_the_old_owners_ended(
    tmp_path: pathlib.Path,
) -> None:
    world = SlotWorld(tmp_path)
    world.log(1).applied_version = 1
    world.grow(4)
    world.changes.step(0)
    world.changes.step(0)
    assert (world.told, world.hand_overs()) == ([], {})
    world.log(0).log_end_offset = 110  # until its worker has the map, too, a log may grow
    world.log(1).applied_version = 2
    world.run()
    assert world.hand_overs() == {2: ((0, 110),), 3: ((1, 50),)}
    (told,) = world.told
    assert {row.partition: row.hand_over for row in told.partitions[2:]} == world.hand_overs()
    world.log(0).log_end_offset = 900
    world.log(1).applied_version = 3
    world.grow(5)
    world.run()
    assert world.hand_overs() == {
        2: ((0, 110),),
        3: ((1, 50),),
        4: tuple((partition, world.log(partition).log_end_offset) for partition in range(4)),
    }


def test_two_changes_at_once_are_told_as_one_and_hand_over_both(tmp_path: pathlib.Path) -> None:
    world = SlotWorld(tmp_path)
    world.log(0).applied_version = 1
    world.grow(3)
    world.changes.step(0)
    world.grow(5)
    world.changes.step(0)
    world.log(0).applied_version = 3
    world.run()
    assert [topic.version for topic in world.told] == [3]
    births = hash_slots.births((2, 3, 5))
    assert {
        partition: tuple(source for source, _ in found)
        for partition, found in world.hand_overs().items()
    } == {partition: birth.sources for partition, birth in births.items()}


def test_a_successor_finds_out_what_its_predecessor_did_not_write(tmp_path: pathlib.Path) -> None:
    world = SlotWorld(tmp_path)
    world.log(0).applied_version = 1
    world.grow(4)
    world.changes.step(0)
    world.topics.update({topic.name: topic for topic in world.catalog.topics()})
    world.changes = world.successor()
    world.changes.step(0)
    assert world.told == []
    world.log(0).applied_version = 2
    world.run()
    assert world.hand_overs() == {2: ((0, 100),), 3: ((1, 50),)}


def test_slots_leave_no_partition_of_which_the_end_is_not_known(tmp_path: pathlib.Path) -> None:
    world = SlotWorld(tmp_path)
    for state in (SlotState.OFFLINE_FOR_WRITES, SlotState.UNREADABLE):
        world.log(1).state = state
        refused = world.change(Api.ALTER_TOPICS, {"name": "orders", "partitions": 3})
        assert refused["code"] == ErrorCode.PARTITION_OFFLINE
        assert "orders-1" in refused["message"]
    world.log(1).state, world.log(1).applied_version = SlotState.ONLINE, 1
    world.grow(4)
    world.changes.step(0)
    world.log(1).state, world.log(1).log_end_offset = SlotState.UNREADABLE, 0  # since
    world.log(1).applied_version = 2
    world.changes.step(0)
    assert world.told == []
    world.log(1).state, world.log(1).log_end_offset = SlotState.ONLINE, 50
    world.run()
    assert world.hand_overs() == {2: ((0, 100),), 3: ((1, 50),)}


def test_a_topic_that_comes_back_counts_against_the_quotas_of_its_prefix(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    old = world.catalog.create_topic("mine.old", 2, {}, DEFAULT_SCHEMA_MESSAGE, False, 5)
    old = world.catalog.mark_deleting(old, 10)
    DeletedTopics(world.catalog).put(deleted_topic(old, 5, 10, 0))
    monkeypatch.setattr(world.bin, "check_whole", lambda _deleted: None)
    world.ask(["mine.new"])
    world.run()
    world.answers.clear()
    entry = {"name": "mine.old"}
    for rule in ("prefix=mine. topics_max=1", "prefix=mine. partitions_max=2"):
        world.decisions.quotas = [rule]
        result = world.change(Api.UNDELETE_TOPICS, entry)
        assert result["code"] == ErrorCode.QUOTA_EXCEEDED
    world.decisions.quotas = ["prefix=mine. topics_max=2", "prefix=mine. partitions_max=3"]
    assert world.decisions.undelete(entry, validate_only=True) == []


def test_who_is_shown_a_topic_knows_its_delay_log_already(tmp_path: pathlib.Path) -> None:
    """Otherwise a client that meets the topic in between is told that it takes no delays."""
    world = World(tmp_path)
    configs = {"delay.enabled": True}
    assert world.change(Api.CREATE_TOPICS, {"name": "orders", "configs": configs})["code"] == 0
    assert world.shown == ["orders@delay", "orders"]
    del world.shown[:]
    assert world.change(Api.ALTER_TOPICS, {"name": "orders", "partitions": 2})["code"] == 0
    assert world.shown == ["orders@delay", "orders"]
    assert {topic.state for topic in world.topics.values()} == {"active"}


def test_no_reader_is_shown_a_topic_whose_own_worker_is_not_started(tmp_path: pathlib.Path) -> None:
    """A flusher that is fed after a start shows the version before the worker's ring is there, and
    a front would end at it.
    """
    world = World(tmp_path)
    world.awaits_worker = True
    world.ask(["own"])
    world.changes.step(0)
    world.changes.step(0)
    assert not world.shown
    world.awaits_worker = False
    world.changes.step(0)
    assert world.shown == ["own"]
