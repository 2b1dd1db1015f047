"""Hash slots and groups: nobody gets a partition that was added before the group has read what its
keys left elsewhere.
"""

from __future__ import annotations

import dataclasses

import pytest

from appliance.groups.base.topic_image import CatalogTopicImage
from appliance.groups.consumer.hash_slot_handover import PATIENCE_NS, is_drained
from tailrace.core.hash_slots import HandOver
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import SECOND_NS, Bench, Client, FakeTopics, settle
from tests.kit.log_files.logs import assignment


@pytest.mark.parametrize(
    ("committed", "start_offsets", "ends", "drained"),
    [
        ({}, {}, {}, False),
        ({0: 10}, {}, {}, False),
        ({0: 10, 2: 19}, {}, {}, False),
        ({0: 10, 2: 20}, {}, {}, True),
        ({0: 11, 1: 0, 2: 25}, {}, {}, True),
        ({0: 10}, {2: 20}, {}, True),  # retention has taken the rest
        ({0: 10}, {2: 19}, {}, False),
        ({0: 10, 2: 15}, {}, {2: 15}, True),  # a disk that failed has
        ({0: 10, 2: 15}, {}, {2: 16}, False),
    ],
)
def test_drained_is_what_all_sources_say(
    committed: dict[int, int], start_offsets: dict[int, int], ends: dict[int, int], drained: bool
) -> None:
    assert is_drained(((0, 10), (2, 20)), committed, start_offsets, ends) is drained
    assert is_drained((), committed)


class SlotTopics(FakeTopics):
    """Topics of which a test says who handed slots over."""

    def hand_over(self, name: str, count: int, hand_overs: dict[int, HandOver]) -> None:
        self.views[name] = dataclasses.replace(
            self.views[name], partition_count=count, hand_overs=hand_overs
        )


def grown(bench: Bench, *clients: Client) -> SlotTopics:
    """Members have partitions 0 and 1; 2 was added, with slots of both up to offsets 100 and 50."""
    settle(*clients)
    assert isinstance(bench.topics, SlotTopics)
    bench.topics.hand_over("orders", 3, {2: ((0, 100), (1, 50))})
    bench.service.topics_changed(bench.now_ns)
    bench.finish_step()
    settle(*clients)
    return bench.topics


@pytest.fixture
def slots(bench: Bench) -> Bench:
    bench.topics = SlotTopics(orders=2)
    bench.restart()
    return bench


def test_a_partition_that_was_added_comes_when_its_sources_are_read_and_its_member_hears_of_it(
    slots: Bench,
) -> None:
    one, two = Client(slots, member_id="m1"), Client(slots, member_id="m2")
    grown(slots, one, two)
    assert sorted(one.partitions + two.partitions) == [("orders", 0), ("orders", 1)]
    described = slots.ask(Api.DESCRIBE_GROUP, group="billing", part="partitions")["partitions"]
    assert [row.get("waits_for") for row in described] == [None, None, {"0": 100, "1": 50}]
    owners = {partition: client for client in (one, two) for _, partition in client.partitions}
    assert owners[0].commit(["orders", 0, 100]) == []
    assert owners[1].commit(["orders", 1, 49]) == []
    settle(one, two)
    assert len(one.partitions + two.partitions) == 2
    slots.pushes.clear()
    assert owners[1].commit(["orders", 1, 50]) == []
    (push,) = slots.pushes
    next_owner = one if push.session == one.session.session else two
    next_owner.heartbeat()
    assert ("orders", 2) in next_owner.partitions
    settle(one, two)
    assert slots.summary("billing")["state"] == "STABLE"
    assert (
        "waits_for"
        not in slots.ask(Api.DESCRIBE_GROUP, group="billing", part="partitions")["partitions"][2]
    )


def test_it_is_held_back_also_behind_a_restart_and_from_members_that_come_later(
    slots: Bench,
) -> None:
    one = Client(slots, member_id="m1")
    grown(slots, one)
    slots.restart()
    one.heartbeat()
    settle(one)
    two = Client(slots, member_id="m2")
    settle(one, two)
    assert sorted(one.partitions + two.partitions) == [("orders", 0), ("orders", 1)]
    for client in (one, two):
        client.leave()
    late = Client(slots, member_id="m3")
    settle(late)
    assert late.partitions == [("orders", 0), ("orders", 1)]
    assert late.commit(["orders", 0, 200], ["orders", 1, 60]) == []
    late.heartbeat()
    assert len(late.partitions) == 3


def test_a_commit_that_is_rolled_back_frees_nothing(slots: Bench) -> None:
    one = Client(slots, member_id="m1")
    grown(slots, one)
    offsets = [["orders", 0, 100], ["orders", 1, 50]]
    request = {"group": "billing", "member_id": "m1", "member_epoch": one.epoch, "offsets": offsets}
    slots.send(Api.COMMIT_OFFSETS, request, one.session)
    slots.service.settle()
    slots.store.rollback()
    slots.service.rolled_back(slots.now_ns)
    slots.service.drain_answers()
    settle(one)
    assert len(one.partitions) == 2
    assert one.commit(*offsets) == []
    settle(one)
    assert len(one.partitions) == 3


def test_what_retention_has_taken_is_not_waited_for(
    slots: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Client(slots, member_id="m1")
    topics = grown(slots, one)
    assert one.commit(["orders", 0, 100], ["orders", 1, 10]) == []
    monkeypatch.setattr(
        topics, "beginning_offset", lambda _topic, partition: 50 if partition == 1 else 0
    )
    one.heartbeat()
    assert len(one.partitions) == 3


def test_a_group_that_commits_nothing_waits_no_longer_than_is_patient_and_one_that_does_waits(
    slots: Bench,
) -> None:
    silent, commits = Client(slots, "silent", "m1"), Client(slots, "commits", "m2")
    grown(slots, silent, commits)
    assert commits.commit(["orders", 0, 100], ["orders", 1, 10]) == []
    for _ in range(4):
        slots.now_ns += PATIENCE_NS // 4 + SECOND_NS
        for client in (silent, commits):
            assert len(client.partitions) == 2
            client.heartbeat()
    settle(silent, commits)
    assert (len(silent.partitions), len(commits.partitions)) == (3, 2)


def test_the_controllers_news_says_what_was_handed_over() -> None:
    topics = CatalogTopicImage([])
    for partition, hand_over in ((0, []), (1, []), (2, [[0, 100], [1, 50]])):
        topics.apply(
            dataclasses.replace(
                assignment(partition=partition), slot_counts=[2, 3], hand_over=hand_over
            )
        )
    (view,) = topics.topics()
    assert view.hand_overs == {2: ((0, 100), (1, 50))}


def test_an_open_transaction_in_a_source_is_waited_for(slots: Bench) -> None:
    one = Client(slots, member_id="m1")
    topics = grown(slots, one)
    source = topics.id_of("orders"), 1
    topics.ends[source], topics.high_watermarks[source] = 10, 60
    assert one.commit(["orders", 0, 100], ["orders", 1, 10]) == []
    settle(one)
    assert len(one.partitions) == 2, "records of its keys may yet be committed there"
    topics.ends[source] = 60
    assert one.commit(["orders", 1, 50]) == []
    settle(one)
    assert len(one.partitions) == 3
