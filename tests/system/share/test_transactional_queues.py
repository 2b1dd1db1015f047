"""A queue's work, exactly once: acknowledgements of share consumers that go with a transaction,
against a real appliance.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tailrace import (
    Admin,
    Consumer,
    InvalidRequestError,
    NewTopic,
    Producer,
    ShareConsumer,
    TailraceError,
    TopicPartition,
    TransactionAbortedError,
)
from tailrace.aio import AsyncProducer, AsyncShareConsumer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.orders import kill_everything, start
from tests.kit.members.queues import keep_locks, make, share, start_offset, take
from tests.kit.processes import HANG_LIMIT_S, kill_and_wait_for_successor, wait_until


def outputs(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes]:
    """The committed values of a topic; there are no more than `count`."""
    with Consumer(
        f"{topic}-out", bootstrap=appliance.address, auto_offset_reset="earliest"
    ) as consumer:
        found = [record.value for record in consumer.consume(count, timeout=HANG_LIMIT_S)]
        assert not consumer.poll(timeout_ms=50)
    return [bytes(value) for value in found if value is not None]


def make_both(appliance: EmbeddedAppliance, topic: str, count: int, **settings: Any) -> None:
    make(appliance, topic, count, **settings)
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(f"{topic}-out")])


def producer_of(appliance: EmbeddedAppliance, topic: str) -> Producer:
    return Producer(appliance.address, transactional_id=topic)


def work(producer: Producer, consumer: ShareConsumer, topic: str, records: list[Any]) -> None:
    for record in records:
        producer.send(f"{topic}-out", record.value)
    producer.send_acknowledgements_to_transaction(consumer, records)


def test_committed_work_is_visible_and_never_delivered_again(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make_both(appliance, topic, 10)
    with producer_of(appliance, topic) as producer:
        with share(appliance, topic) as consumer:
            records = take(consumer, 10)
            with producer.transaction():
                work(producer, consumer, topic, records)
                with pytest.raises(InvalidRequestError, match="acknowledged with a transaction"):
                    consumer.acknowledge(records[0])
                with pytest.raises(InvalidRequestError, match="in a transaction already"):
                    producer.send_acknowledgements_to_transaction(consumer, records[0])
            assert start_offset(appliance, f"g-{topic}") == 10
            consumer.commit()
            with pytest.raises(InvalidRequestError, match="acknowledged before"):
                consumer.acknowledge(records[0])
        with share(appliance, topic) as other:
            assert not other.poll(100)
    assert outputs(appliance, topic, 10) == [b"%d" % number for number in range(10)]


def test_an_abort_releases_the_records_and_a_repeated_block_takes_them(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make_both(appliance, topic, 4)
    with producer_of(appliance, topic) as producer, share(appliance, topic) as consumer:
        records = take(consumer, 4)
        for attempt in range(2):
            try:
                with producer.transaction():
                    work(producer, consumer, topic, records[:2])
                    if not attempt:
                        raise KeyError
            except KeyError:
                assert start_offset(appliance, f"g-{topic}") == 0
        producer.begin_transaction()
        work(producer, consumer, topic, records[2:])
        producer.abort_transaction()
        consumer.commit()  # sends the release
        with share(appliance, topic) as other:
            found = take(other, 2)
            assert [(one.offset, one.delivery_count) for one in found] == [(2, 2), (3, 2)]
            with producer.transaction():
                work(producer, other, topic, found)
    assert outputs(appliance, topic, 4) == [b"0", b"1", b"2", b"3"]


def test_a_record_whose_lock_was_lost_aborts_and_the_other_member_makes_the_output(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make_both(appliance, topic, 1, group_share_record_lock_duration_ms=1_000)
    with (
        producer_of(appliance, topic) as first_producer,
        producer_of(appliance, f"{topic}-2") as second_producer,
        share(appliance, topic) as first,
        share(appliance, topic) as second,
    ):
        records = take(first, 1)
        keep_locks(appliance, topic)
        first_producer.begin_transaction()
        work(first_producer, first, topic, records)
        found = take(second, 1)  # the lock has passed
        with pytest.raises(TransactionAbortedError, match="not locked by this member"):
            first_producer.commit_transaction()
        first_producer.abort_transaction()
        with second_producer.transaction():
            work(second_producer, second, topic, found)
    assert outputs(appliance, topic, 1) == [b"0"]
    assert start_offset(appliance, f"g-{topic}") == 1


def test_locks_of_records_in_a_transaction_are_renewed_while_it_is_open(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make_both(appliance, topic, 2)
    with producer_of(appliance, topic) as producer, share(appliance, topic) as consumer:
        records = take(consumer, 2)
        with producer.transaction():
            work(producer, consumer, topic, records)
            for _ in range(3):
                for record in records:
                    consumer.acknowledge(record, "renew")
                consumer.commit()
            with pytest.raises(InvalidRequestError, match="can only be renewed"):
                consumer.acknowledge(records[0])
        consumer.commit()
    assert outputs(appliance, topic, 2) == [b"0", b"1"]
    assert start_offset(appliance, f"g-{topic}") == 2


def test_work_of_a_consumer_that_left_is_not_committed(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make_both(appliance, topic, 1)
    with producer_of(appliance, topic) as producer:
        producer.begin_transaction()
        with share(appliance, topic) as consumer:
            work(producer, consumer, topic, take(consumer, 1))
        with pytest.raises(TransactionAbortedError, match="has no member"):
            producer.commit_transaction()
        producer.abort_transaction()
        with share(appliance, topic) as other, producer.transaction():
            work(producer, other, topic, take(other, 1))
    assert outputs(appliance, topic, 1) == [b"0"]


def test_a_release_goes_with_the_commit_and_a_reject_is_refused(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make_both(appliance, topic, 2)
    with producer_of(appliance, topic) as producer, share(appliance, topic) as consumer:
        accepted, released = take(consumer, 2)
        with producer.transaction():
            with pytest.raises(InvalidRequestError, match="dead-letter topic in the transaction"):
                producer.send_acknowledgements_to_transaction(consumer, accepted, "reject")
            with pytest.raises(InvalidRequestError, match="accept or release"):
                producer.send_acknowledgements_to_transaction(consumer, accepted, "renew")
            with pytest.raises(InvalidRequestError, match="no share consumer"):
                producer.send_acknowledgements_to_transaction(producer, accepted)  # type: ignore[arg-type]
            producer.send_acknowledgements_to_transaction(consumer, [accepted])
            producer.send_acknowledgements_to_transaction(consumer, released, "release")
        (found,) = take(consumer, 1)
        assert (found.offset, found.delivery_count) == (1, 2)


def test_asyncio_makes_a_queues_work_exactly_once(appliance: EmbeddedAppliance, topic: str) -> None:
    make_both(appliance, topic, 3)

    async def main() -> None:
        async with (
            AsyncProducer(appliance.address, transactional_id=topic) as producer,
            AsyncShareConsumer(
                topic, bootstrap=appliance.address, group_id=f"g-{topic}",
                auto_offset_reset="earliest",
            ) as consumer,
        ):  # fmt: skip
            done = 0
            while done < 3:
                records = await consumer.poll(1_000)
                async with producer.transaction():
                    for record in records:
                        await producer.send(f"{topic}-out", record.value)
                    await producer.send_acknowledgements_to_transaction(consumer, records)
                done += len(records)

    asyncio.run(main())
    assert start_offset(appliance, f"g-{topic}") == 3
    assert outputs(appliance, topic, 3) == [b"0", b"1", b"2"]


def test_kills_of_the_process_of_groups_leave_each_input_exactly_one_output(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    count, rng = 300, random.Random(4)
    make_both(appliance, topic, count)
    done = threading.Event()
    failures: list[BaseException] = []

    def has_accepted(least: int) -> bool:
        """True when so many are accepted, or a worker has failed."""
        try:
            return bool(failures) or start_offset(appliance, f"g-{topic}") >= least
        except (TailraceError, IndexError):
            return False  # the process of groups starts

    def worker(number: int, mine: random.Random) -> None:
        try:
            with producer_of(appliance, f"{topic}-{number}") as producer:
                while not done.is_set():
                    # Some workers leave with records; their successors join under the same id.
                    with share(appliance, topic, max_poll_records=2) as consumer:
                        for _ in range(mine.randrange(1, 8)):
                            records = consumer.poll(200)
                            try:
                                with producer.transaction():
                                    work(producer, consumer, topic, records)
                                    if mine.random() < 0.2:
                                        raise KeyError
                            except (KeyError, TransactionAbortedError):
                                continue
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=worker, args=(number, random.Random(rng.random())))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for accepted in (20, 60, 120, 180):
        wait_until(partial(has_accepted, accepted), f"{accepted} accepted")
        kill_and_wait_for_successor(appliance, "tr-groups-0")
    wait_until(partial(has_accepted, count), "all are accepted")
    done.set()
    for thread in threads:
        thread.join(2 * HANG_LIMIT_S)
        assert not thread.is_alive()
    assert not failures
    assert sorted(map(int, outputs(appliance, topic, count))) == list(range(count))


def test_a_restart_of_the_appliance_keeps_what_was_committed_and_only_that(
    tmp_path: Path, topic: str
) -> None:
    running = start(tmp_path)
    make_both(running, topic, 2)
    producer, consumer = producer_of(running, topic), share(running, topic)
    first, second = take(consumer, 2)
    with producer.transaction():
        work(producer, consumer, topic, [first])
    producer.begin_transaction()
    work(producer, consumer, topic, [second])
    producer.flush()
    with Admin(running.address) as admin:  # the start begins locks anew, with this duration
        admin.alter_topics({topic: {"group.share.record.lock.duration.ms": 1_000}})
    kill_everything(running)
    del producer, consumer
    running = start(tmp_path)
    try:
        with producer_of(running, topic) as producer, share(running, topic) as consumer:
            (found,) = take(consumer, 1)
            assert found.offset == 1
            with producer.transaction():
                work(producer, consumer, topic, [found])
        assert outputs(running, topic, 2) == [b"0", b"1"]
    finally:
        assert running.stop() == 0


def test_offsets_of_a_consumer_that_assigns_its_partitions_go_with_the_transaction(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make_both(appliance, topic, 4)
    key = TopicPartition(topic, 0)
    with (
        producer_of(appliance, topic) as producer,
        Consumer(
            bootstrap=appliance.address, group_id=topic, enable_auto_commit=False,
            auto_offset_reset="earliest",
        ) as consumer,
    ):  # fmt: skip
        consumer.assign([key])
        for is_kept in itertools.islice(itertools.cycle((True, False)), 2):
            records = consumer.consume(2, timeout=HANG_LIMIT_S)
            producer.begin_transaction()
            for record in records:
                producer.send(f"{topic}-out", record.value)
            producer.send_offsets_to_transaction(consumer.positions(), consumer.group_metadata())
            if is_kept:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        assert consumer.committed(key) == 2
        # A member of the group has the partitions now: offsets of nobody are refused.
        with Consumer(topic, bootstrap=appliance.address, group_id=topic) as member:
            poll_member(member)
            producer.begin_transaction()
            producer.send_offsets_to_transaction({key: 4}, consumer.group_metadata())
            with pytest.raises(TransactionAbortedError):
                producer.commit_transaction()
            producer.abort_transaction()
    assert outputs(appliance, topic, 2) == [b"0", b"1"]


def poll_member(member: Consumer) -> None:
    """Poll until the member has its partitions."""
    while not member.assignment():
        member.poll(timeout_ms=100)
