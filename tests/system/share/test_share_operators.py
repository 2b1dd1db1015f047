"""Operators' changes to a queue that is worked off: settings, pauses, moved groups, deletions; and
loops that are slower than a lock.
"""

from __future__ import annotations

import threading

import pytest

from tailrace import Admin, GroupNotEmptyError, TopicPartition, UnknownGroupError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import run
from tests.kit.members.queues import (
    LONG_MS,
    describe,
    fill,
    make,
    poll_until,
    read,
    share,
    start_offset,
    take,
)


def test_settings_of_a_topic_hold_for_the_next_acquisition_and_wake_who_waits(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(
        appliance,
        topic,
        30,
        group_share_partition_max_record_locks=10,
        group_share_record_lock_duration_ms=60_000,
    )
    with (
        Admin(appliance.address) as admin,
        share(appliance, topic, share_acknowledgement_mode="explicit") as consumer,
        share(appliance, topic, share_acknowledgement_mode="explicit") as other,
    ):
        first = take(consumer, 10)
        assert consumer.acquisition_lock_timeout_ms() == 60_000
        assert other.poll(0) == other.poll(300) == []
        admin.alter_topics({topic: {"group.share.partition.max.record.locks": 17}})
        assert [record.offset for record in take(other, 7)] == list(range(10, 17))
        admin.alter_topics({topic: {"delivery.paused": True}})
        for record in first:
            consumer.acknowledge(record, "release")
        consumer.commit()  # a pause holds nobody's acknowledgements up
        assert consumer.poll(300) == []
        admin.alter_topics(
            {
                topic: {
                    "delivery.paused": False,
                    "group.share.delivery.count.limit": 2,
                    "group.share.record.lock.duration.ms": 1_000,
                }
            }
        )
        again = take(consumer, 10)
        assert {record.delivery_count for record in again} == {2}
        assert consumer.acquisition_lock_timeout_ms() == 1_000
        admin.alter_topics({topic: {"dead.letter.topic": f"{topic}-given-up"}})
        for record in again:
            consumer.acknowledge(record, "release")  # delivered as often as it may be now
        while consumer.metrics()["dead_letters"] < 10:
            for record in consumer.poll(100):
                consumer.acknowledge(record)
            consumer.commit()
    assert sorted(letter.value for letter in read(appliance, f"{topic}-given-up", 10)) == [
        b"%d" % number for number in range(10)
    ]


def test_a_group_is_moved_and_deleted_when_it_has_no_members_and_refused_while_it_has(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 10)
    group = f"g-{topic}"
    key = TopicPartition(topic, 0)
    with Admin(appliance.address) as admin:
        with share(appliance, topic) as consumer:
            take(consumer, 4)
            consumer.commit()
            with pytest.raises(GroupNotEmptyError):
                admin.delete_groups(group)
            with pytest.raises(GroupNotEmptyError):
                admin.alter_group_offsets(group, {key: 0})
            refused = run(
                appliance,
                "group",
                "reset-offsets",
                group,
                "--topic",
                topic,
                "--to-earliest",
                status=1,
            )
            assert b"GROUP_NOT_EMPTY" in refused.stderr
            assert len(take(consumer, 3)) == 3
        assert start_offset(appliance, group) == 4
        run(appliance, "group", "reset-offsets", group, "--topic", topic, "--to-offset", "2")
        assert start_offset(appliance, group) == 2
        with share(appliance, topic) as consumer:
            assert [(record.offset, record.delivery_count) for record in take(consumer, 8)] == [
                (offset, 1) for offset in range(2, 10)
            ]
            consumer.commit()
        admin.delete_groups(group)
        with pytest.raises(UnknownGroupError):
            admin.delete_groups(group)
    with share(appliance, topic) as consumer:
        assert len(take(consumer, 10)) == 10


def test_retention_that_overtakes_a_queue_leaves_what_is_held_to_its_holder(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 20)
    with (
        share(appliance, topic) as consumer,
        share(appliance, topic) as other,
        Admin(appliance.address) as admin,
    ):
        held = take(consumer, 5)
        admin.delete_records({TopicPartition(topic, 0): 15})
        poll_until(other, lambda found: [record.offset for record in found] == list(range(15, 20)))
        row = describe(appliance, f"g-{topic}", "partitions")[0]
        assert (row["start_offset"], row["lag"]) == (15, 5)
        other.commit()
        assert describe(appliance, f"g-{topic}", "partitions")[0]["lag"] == 0
        assert [record.value for record in held] == [b"%d" % number for number in range(5)]
        fill(appliance, topic, 1)
        assert [record.offset for record in take(consumer, 1)] == [20]


def test_a_loop_slower_than_a_lock_says_in_time_what_it_has_done(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """Ten records are taken at once, and together they take longer than a lock lasts. Said at the
    end only, none of it would ever be accepted.
    """
    make(appliance, topic, 10, group_share_record_lock_duration_ms=1_000)
    work = threading.Event()
    worked = 0
    with share(appliance, topic) as consumer:
        for _ in consumer:
            work.wait(0.2)  # the work: no synchronisation
            worked += 1
            assert worked < 60
            if start_offset(appliance, f"g-{topic}") >= 8:
                break


def test_a_consumer_leaves_and_comes_back(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 4)
    with share(appliance, topic, share_acknowledgement_mode="explicit") as consumer:
        records = take(consumer, 4)
        consumer.acknowledge(records[0])
        consumer.unsubscribe()
        assert consumer.subscription() == set()
        assert start_offset(appliance, f"g-{topic}") == 1
        consumer.subscribe(topic)
        assert [(record.offset, record.delivery_count) for record in consumer.poll(LONG_MS)] == [
            (1, 2),
            (2, 2),
            (3, 2),
        ]
