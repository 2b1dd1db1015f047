"""Consumer groups of topics to which partitions are added: every key in order, nothing missed, and
what operators see of it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from appliance.cli.main import tailrace
from tailrace import Admin, Consumer, Producer, TopicPartition
from tailrace.core.error_codes import ErrorCode
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.members.slot_load import KEYS, Load, add_partitions, create
from tests.kit.members.slots import described
from tests.kit.peers.raw_client import RawClient
from tests.kit.peers.raw_members import RawMember
from tests.kit.processes import kill_and_wait_for_successor, wait_until


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    """An appliance of this test's own."""
    running = start_embedded(data_dir=str(tmp_path / "data"), auto_create_topics=False)
    yield running
    assert running.stop() == 0


def test_a_group_reads_every_key_in_order_while_partitions_are_added_and_processes_are_killed(
    own: EmbeddedAppliance,
) -> None:
    """Two members take what they own, commit, and give partitions to each other; the first record
    of a key that one of them sees out of order fails.
    """
    create(own.address, "orders", 2)
    topic_id = described(own.address, "orders").topic_id.hex()
    load = Load(own.address, "orders", KEYS[:100])
    following = dict.fromkeys(load.counts, 0)
    committed: dict[int, int] = {}
    with (
        RawClient(own.address) as first,
        RawClient(own.address) as second,
    ):
        members = [RawMember(client, "g", ["orders"]) for client in (first, second)]

        def work() -> int:
            """Each member's heartbeat, and what it reads of its partitions, committed; returns how
            many records there were.
            """
            count = 0
            for member in members:
                if member.heartbeat() is not ErrorCode.OK:
                    continue
                owned = [
                    TopicPartition("orders", partition)
                    for partition in member.owned.get(topic_id, [])
                ]
                with Consumer(
                    bootstrap=own.address,
                    auto_offset_reset="none",
                    max_partition_fetch_bytes=16 << 10,
                ) as reader:
                    reader.assign(owned)
                    for key in owned:
                        reader.seek(key, committed.get(key.partition, 0))
                    records = reader.poll(20, max_records=500) if owned else []
                positions: dict[tuple[str, int], int] = {
                    ("orders", key.partition): committed.get(key.partition, 0) for key in owned
                }
                for record in records:
                    assert record.key is not None
                    assert int(record.value or b"") == following[record.key], (
                        f"{record.key!r} at {record.partition}:{record.offset}"
                    )
                    following[record.key] += 1
                    positions["orders", record.partition] = record.offset + 1
                while positions:
                    code, answer = member.commit(positions)
                    if code is ErrorCode.OK:
                        assert answer["refused"] == []
                        break
                committed.update(
                    {partition: offset for (_, partition), offset in positions.items()}
                )
                count += len(records)
            return count

        for partitions, killed in ((3, "tr-groups-0"), (5, "tr-worker-0"), (6, "tr-controller-0")):
            load.wait_for_rounds(3)
            work()
            add_partitions(own.address, "orders", partitions)
            work()
            kill_and_wait_for_successor(own, killed)
            load.wait_for_rounds(3)
            work()
        counts = load.end()
        wait_until(lambda: work() >= 0 and following == counts, "everything is read")
        assert sum(member.count for member in members) == 6


@pytest.mark.parametrize("partitioner", ["hash_slots", "producer"])
def test_a_group_that_begins_at_the_end_misses_nothing_of_partitions_that_are_added_under_load(
    own: EmbeddedAppliance, partitioner: str
) -> None:
    """It is told of the partitions only when they hold records already; with hash slots every key
    is in order, too.
    """
    create(own.address, "orders", 2, partitioner=partitioner)
    following = dict.fromkeys(KEYS[:60], 0)
    seen: dict[bytes, set[int]] = {key: set() for key in following}
    settings: dict[str, Any] = {
        "group_id": "g",
        "auto_offset_reset": "latest",
        "auto_commit_interval_ms": 20,
    }
    with Consumer("orders", bootstrap=own.address, **settings) as consumer:

        def read() -> bool:
            for record in consumer.poll(20):
                assert record.key is not None
                value = int(record.value or b"")
                if partitioner == "hash_slots":
                    assert value == following[record.key], (
                        f"{record.key!r} at {record.partition}:{record.offset}"
                    )
                following[record.key] += 1
                seen[record.key].add(value)
            return True

        wait_until(lambda: read() and len(consumer.assignment()) == 2, "it has joined")
        assert [consumer.position(key) for key in consumer.assignment()] == [0, 0]
        load = Load(own.address, "orders", list(following))
        for partitions in (4, 5):
            load.wait_for_rounds(3)
            add_partitions(own.address, "orders", partitions)
            load.wait_for_rounds(5)  # nobody polls
            read()
        counts = load.end()
        wait_until(
            lambda: read() and following == counts and len(consumer.assignment()) == 5,
            "everything is read, of all partitions",
        )
        assert seen == {key: set(range(count)) for key, count in counts.items()}
        consumer.commit()
        assert consumer.committed(TopicPartition("orders", 4)) == consumer.position(
            TopicPartition("orders", 4)
        )


def test_operators_see_what_a_partition_that_was_added_waits_for(own: EmbeddedAppliance) -> None:
    create(own.address, "orders", 1)
    with (
        Producer(own.address) as producer,
        Admin(own.address) as admin,
        Consumer(
            "orders",
            bootstrap=own.address,
            group_id="g",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer,
    ):
        for key in KEYS[:20]:
            producer.send("orders", b"x", key=key).result(60)
        wait_until(lambda: bool(consumer.poll(100)), "it reads")
        add_partitions(own.address, "orders", 2)
        wait_until(
            lambda: len(admin.describe_groups("g")["g"]["partitions"]) == 2,
            "the group knows of the partition",
        )
        assert [row.get("waits_for") for row in admin.describe_groups("g")["g"]["partitions"]] == [
            None,
            {"0": 20},
        ]
        shown = CliRunner().invoke(tailrace, ["group", "describe", "g", "--bootstrap", own.address])
        assert (
            "waiting: orders-1 was added: it is read when the group has committed orders-0 up to 20"
            in shown.output
        )
        consumer.seek(TopicPartition("orders", 0), 20)
        consumer.commit()
        wait_until(
            lambda: consumer.poll(100) == [] and len(consumer.assignment()) == 2,
            "it is given the partition",
        )
        shown = CliRunner().invoke(tailrace, ["group", "describe", "g", "--bootstrap", own.address])
        assert shown.exit_code == 0
        assert "waiting" not in shown.output
