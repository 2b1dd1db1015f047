"""Share groups against a real appliance: many consumers on one partition, kills, locks that pass,
dead letters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter

import pytest

from tailrace import (
    Admin,
    ClientClosedError,
    Consumer,
    InvalidGroupError,
    InvalidRequestError,
    InvalidSettingError,
    LockLostError,
    RequestTimeoutError,
    ShareConsumer,
    TopicPartition,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.share.record import ShareRecord
from tests.kit.members.queues import (
    LONG_MS,
    describe,
    fill,
    keep_locks,
    make,
    poll_until,
    read,
    share,
    start_offset,
    take,
)
from tests.kit.processes import children, kill_and_wait_for_successor, stopped, wait_until


def test_many_consumers_of_one_partition_accept_each_record_once(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    count = 3_000
    make(appliance, topic, count)
    accepted: list[list[int]] = [[] for _ in range(4)]
    left = threading.Semaphore(0)

    def work(mine: list[int]) -> None:
        with share(appliance, topic, max_poll_records=100) as consumer:
            while sum(map(len, accepted)) < count:
                records = consumer.poll(100)
                for record in records:
                    assert record.delivery_count == 1
                    consumer.acknowledge(record)
                consumer.commit()
                mine += [record.offset for record in records]
        left.release()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in accepted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left.acquire(blocking=False)
    assert sorted(offset for mine in accepted for offset in mine) == list(range(count))
    assert start_offset(appliance, f"g-{topic}") == count


PROGRAM = """
import json, sys, time, tailrace
consumer = tailrace.ShareConsumer(sys.argv[2], bootstrap=sys.argv[1], group_id="g-" + sys.argv[2], auto_offset_reset="earliest")
records = consumer.poll(60_000, 10)
for record in records[:3]:
    consumer.acknowledge(record)
consumer.commit()
print(json.dumps([record.offset for record in records]), flush=True)
sys.stdin.read()
"""  # noqa: E501


def test_what_a_killed_consumer_had_comes_again_and_what_it_committed_does_not(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 20)
    command = [sys.executable, "-P", "-c", PROGRAM, appliance.address, topic]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as program:
        assert program.stdout is not None
        assert json.loads(program.stdout.readline()) == list(range(10))
        with share(appliance, topic, share_acknowledgement_mode="explicit") as consumer:
            assert [(r.offset, r.delivery_count) for r in take(consumer, 10)] == [
                (offset, 1) for offset in range(10, 20)
            ]
            program.kill()
            again = take(consumer, 7)  # long before the locks pass: its connection has closed
            assert [(r.offset, r.delivery_count) for r in again] == [
                (offset, 2) for offset in range(3, 10)
            ]


def test_the_process_of_groups_is_killed_and_nothing_is_delivered_twice(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 30)
    with share(appliance, topic) as one, share(appliance, topic) as two:
        mine = take(one, 10)
        kill_and_wait_for_successor(appliance, "tr-groups-0")
        others = take(two, 20)
        assert [record.offset for record in others] == list(range(10, 30))
        assert {record.delivery_count for record in others} == {1}
        for record in mine:
            one.acknowledge(record)
        one.commit()
        two.commit()
    assert start_offset(appliance, f"g-{topic}") == 30


def test_kills_at_any_moment_lose_nothing_and_accept_nothing_twice(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    count = 2_000
    make(appliance, topic, count, partitions=2)
    accepted: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()
    is_over = threading.Event()

    def commit(consumer: ShareConsumer) -> None:
        while True:
            try:
                return consumer.commit()
            except RequestTimeoutError:
                """It is not known whether the process that was killed did it: ask again."""

    def work(seed: int) -> None:
        with share(appliance, topic, max_poll_records=20 + seed) as consumer:
            while not is_over.is_set():
                records = consumer.poll(100)
                if not records:
                    continue
                for number, record in enumerate(records):
                    consumer.acknowledge(
                        record,
                        "release"
                        if record.delivery_count == 1 and number % 7 == seed
                        else "accept",
                    )
                done = {
                    (r.partition, r.offset)
                    for n, r in enumerate(records)
                    if not (r.delivery_count == 1 and n % 7 == seed)
                }
                try:
                    commit(consumer)
                except LockLostError as error:
                    done -= {
                        (run[1], offset)
                        for run in error.refused
                        for offset in range(run[2], run[3] + 1)
                    }
                with lock:
                    accepted.update(done)
                    if len(accepted) == count:
                        is_over.set()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(accepted) or is_over.is_set(), "records are accepted")
    for name in ("tr-groups-0", "tr-front-0", "tr-groups-0"):
        if not is_over.is_set():
            kill_and_wait_for_successor(appliance, name)
    assert is_over.wait(120)
    for thread in threads:
        thread.join()
    assert len(accepted) == count
    assert set(accepted.values()) == {1}


def test_a_late_acknowledgement_is_refused_and_the_record_is_with_another(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 3, group_share_record_lock_duration_ms=300)
    with share(appliance, topic) as late, share(appliance, topic) as other:
        records = take(late, 3)
        keep_locks(appliance, topic)
        again = poll_until(other, lambda found: len(found) == 3)
        assert {record.delivery_count for record in again} == {2}
        for record in again:
            other.acknowledge(record, "renew")
        other.commit()
        for record in records:
            late.acknowledge(record)
        with pytest.raises(LockLostError, match="offsets 0 to 2") as caught:
            late.commit()
        assert caught.value.refused == [(topic, 0, 0, 2)]
        late.commit()  # it was told; there is nothing more to say
        with pytest.raises(InvalidRequestError, match="not this consumer's"):
            late.acknowledge(records[0])
        assert late.metrics()["acknowledgements_refused"] == 1


def test_outcomes(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 4)
    with share(appliance, topic) as consumer:
        first = take(consumer, 4)
        for record, outcome in zip(first, ["accept", "release", "reject", "renew"], strict=True):
            consumer.acknowledge(record, outcome)
        with pytest.raises(InvalidRequestError, match="allowed are accept, release, reject, renew"):
            consumer.acknowledge(first[0], "eat")
        consumer.commit()
        again = take(consumer, 1)
        assert [(record.offset, record.delivery_count) for record in again] == [(1, 2)]
        consumer.acknowledge(first[3])  # it was renewed: still this consumer's
        consumer.acknowledge(again[0], "release")
        consumer.acknowledge(again[0])  # the last word counts
        consumer.commit()
        assert start_offset(appliance, f"g-{topic}") == 4
        (letter,) = read(appliance, f"{topic}.dlq", 1)
        headers = dict(letter.headers)
        assert (
            letter.key,
            letter.value,
            headers["h"],
            headers["dlq.offset"],
            headers["dlq.delivery_count"],
        ) == (
            b"k2",
            b"2",
            b"x",
            b"2",
            b"1",
        )
        assert headers["dlq.reason"] == b"rejected by the consumer"


def test_retention_under_a_queue(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 30)
    with share(appliance, topic) as consumer, Admin(appliance.address) as admin:
        first = take(consumer, 5)
        admin.delete_records({TopicPartition(topic, 0): 20})
        for record in first:
            consumer.acknowledge(record)
        try:
            consumer.commit()
        except LockLostError:
            pass  # the group had seen before that they are gone
        assert [record.offset for record in take(consumer, 10)] == list(range(20, 30))
        consumer.commit()
        assert start_offset(appliance, f"g-{topic}") == 30


def test_a_consumer_that_waits_gets_what_comes_and_what_another_releases(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    found: list[ShareRecord] = []
    with (
        share(appliance, topic, auto_offset_reset="latest") as holder,
        share(appliance, topic) as waiter,
    ):
        assert holder.poll(0) == []
        poll_until(holder, lambda _: len(describe(appliance, f"g-{topic}", "members")) == 2)
        thread = threading.Thread(target=lambda: found.extend(waiter.poll(LONG_MS)))
        thread.start()
        fill(appliance, topic, 1)
        thread.join()
        assert [(record.offset, record.delivery_count) for record in found] == [(0, 1)]
        waiter.acknowledge(found.pop(), "release")
        thread = threading.Thread(target=lambda: found.extend(holder.poll(LONG_MS)))
        thread.start()
        waiter.commit()
        thread.join()
        assert [(record.offset, record.delivery_count) for record in found] == [(0, 2)]


def test_implicit_acceptance_iteration_and_close(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 20)
    with share(appliance, topic) as consumer:
        assert [record.offset for record in take(consumer, 5)] == [0, 1, 2, 3, 4]
        assert [record.offset for record in take(consumer, 5)] == [
            5,
            6,
            7,
            8,
            9,
        ]  # and accepts those before
    assert start_offset(appliance, f"g-{topic}") == 5  # close() releases
    with share(appliance, topic) as consumer:
        offsets = []
        for record in consumer:
            offsets.append((record.offset, record.delivery_count))
            if len(offsets) == 7:
                break
        assert offsets == [*((offset, 2) for offset in range(5, 10)), (10, 1), (11, 1)]
    assert start_offset(appliance, f"g-{topic}") == 11
    with share(appliance, topic, share_acknowledgement_mode="explicit") as consumer:
        assert len(take(consumer, 3)) == 3
        consumer.commit()
        assert start_offset(appliance, f"g-{topic}") == 11
    with pytest.raises(ClientClosedError):
        consumer.poll()
    with pytest.raises(ClientClosedError):
        consumer.commit()
    consumer.close()


def poll_without_end(consumer: Consumer) -> None:
    while True:
        consumer.poll(1_000)


def test_what_is_wrong_is_said(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 1)
    with pytest.raises(InvalidSettingError, match="needs group_id"):
        ShareConsumer(topic, bootstrap=appliance.address)
    with pytest.raises(InvalidSettingError, match="allowed are implicit and explicit"):
        share(appliance, topic, share_acknowledgement_mode="sometimes")
    with pytest.raises(UnknownTopicError):
        share(appliance, f"{topic}-not-there")
    with share(appliance, topic) as consumer:
        take(consumer, 1)
        with pytest.raises(AttributeError, match="no positions"):
            consumer.seek(0)
        with pytest.raises(InvalidRequestError, match="no record"):
            consumer.acknowledge(7)  # type: ignore[arg-type]
        with (
            Consumer(topic, bootstrap=appliance.address, group_id=f"g-{topic}") as plain,
            pytest.raises(InvalidGroupError, match="share group"),
        ):
            poll_without_end(plain)
    with (
        ShareConsumer(bootstrap=appliance.address, group_id=f"none-{topic}") as consumer,
        pytest.raises(InvalidRequestError, match="subscribe"),
    ):
        consumer.poll()


def test_a_forked_child_says_so_at_once(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 2)
    with share(appliance, topic) as consumer:
        (record,) = take(consumer, 1)
        child = os.fork()
        if not child:
            status = 1
            try:
                consumer.poll()
            except ClientClosedError:
                consumer.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        consumer.acknowledge(record)
        consumer.commit()
        assert take(consumer, 1)[0].offset == 1


def test_a_poll_comes_back_in_its_time_while_the_process_of_groups_stands_still(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 5)
    with share(appliance, topic) as consumer:
        assert len(take(consumer, 2)) == 2
        pid = children(appliance)["tr-groups-0"]
        with stopped(pid):
            assert consumer.poll(300) == []
        assert [record.offset for record in take(consumer, 3)] == [2, 3, 4]
