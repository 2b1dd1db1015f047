"""The topics that groups see: from the controller's news, in whatever order it comes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from shm.memory.layout import SlotState
from shm.messages.lane_messages import Assignment
from tailrace.protocol.frame import Api
from tests.kit.stepped.group_agents import AgentWorld


def topic(
    name: str = "t",
    number: int = 1,
    partitions: int = 2,
    version: int = 1,
    first_slot: int = 0,
    **more: object,
) -> list[Assignment]:
    return [
        Assignment(
            name,
            bytes([number]) * 16,
            p,
            partitions,
            first_slot + p,
            version,
            0,
            0,
            0,
            0,
            b"",
            False,
            **more,  # type: ignore[arg-type]
        )
        for p in range(partitions)
    ]


@pytest.fixture
def world() -> AgentWorld:
    return AgentWorld()


def test_offsets_come_from_the_partition_table_once_the_log_is_open(world: AgentWorld) -> None:
    view = world.agent._topics
    made = topic()
    for item in made:
        assert view.apply(item)
    topic_id = made[0].topic_id.hex()
    assert view.end_offset(topic_id, 0) is None
    world.set_log(made[0], 5, 40)
    assert (view.beginning_offset(topic_id, 0), view.end_offset(topic_id, 0)) == (5, 40)
    world.set_log(made[1], 0, 9, SlotState.UNREADABLE)
    assert view.end_offset(topic_id, 1) is None
    assert view.end_offset(topic_id, 2) is None
    assert view.end_offset("00" * 16, 0) is None
    world.set_log(replace(made[0], topic_id=bytes(16)), 0, 7)
    assert view.end_offset(topic_id, 0) is None, "another topic has the slot now"


def test_partitions_count_when_they_are_known_without_a_gap(world: AgentWorld) -> None:
    made = topic(partitions=5)
    orders = random.Random(7)
    for _ in range(20):
        view = AgentWorld().agent._topics
        for item in orders.sample(made, 5):
            view.apply(item)
        found = view.by_name("t")
        assert found is not None
        assert found.partition_count == 5
    world.agent._topics.apply(made[0])
    world.agent._topics.apply(made[2])
    found = world.agent._topics.by_name("t")
    assert found is not None
    assert found.partition_count == 1


def test_only_what_groups_see_is_a_change(world: AgentWorld) -> None:
    view = world.agent._topics
    made = topic(settings={"delivery.paused": False})
    assert [view.apply(item) for item in made] == [True, True]
    assert [view.apply(item) for item in made] == [False, False], "told twice"
    assert not view.apply(replace(made[0], version=2, delete_before=7))
    assert view.apply(replace(made[0], version=3, settings={"delivery.paused": True}))
    assert not view.apply(replace(made[0], version=2, settings={"delivery.paused": False})), (
        "older news behind newer"
    )
    found = view.by_name("t")
    assert found is not None
    assert found.settings == {"delivery.paused": True}


def test_a_topic_deleted_and_made_again_is_another_one(world: AgentWorld) -> None:
    view = world.agent._topics
    old, new = topic(number=1), topic(number=2)
    for item in old:
        view.apply(item)
    assert view.apply(replace(old[0], dropped=True, version=2))
    assert view.by_name("t") is None
    for item in new:
        view.apply(item)
    assert not view.apply(replace(old[1], dropped=True, version=2)), "the rest of the old one's end"
    found = view.by_name("t")
    assert found is not None
    assert found.topic_id == new[0].topic_id.hex()
    assert view.by_id(old[0].topic_id.hex()) is None
    assert [known.topic_id for known in view.topics()] == [new[0].topic_id.hex()]


def test_delay_logs_are_no_topics(world: AgentWorld) -> None:
    assert not world.agent._topics.apply(topic("t@delay", delay_of="01" * 16)[0])
    assert world.agent._topics.by_name("t@delay") is None


def test_the_service_hears_of_changes_once_a_step(world: AgentWorld) -> None:
    for item in topic(partitions=8):
        world.tell(item)
    world.step()
    assert world.service.topics_changes == 1
    world.tell(topic(partitions=8)[0])
    world.step()
    assert world.service.topics_changes == 1


def test_a_request_behind_a_new_topic_finds_it_though_the_step_had_read_the_catalog_before(
    world: AgentWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic and a request that names it come between a step's look at the catalog and its look
    at the fronts.
    """
    known: list[int] = []
    handle = world.service.handle

    def note(*given: Any) -> None:
        known.append(world.service.topics_changes)
        handle(*given)

    def come() -> None:
        world.on_clock = lambda: None
        for item in topic(partitions=1):
            world.tell(item)
        world.ask(Api.COMMIT_OFFSETS, {})

    monkeypatch.setattr(world.service, "handle", note)
    world.on_clock = come
    world.step()
    assert known == [1]
