"""Share groups against a real appliance: many consumers on one partition, kills, locks that pass, dead letters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tailrace import (
    Admin,
    ClientClosedError,
    Consumer,
    InvalidGroupError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidSettingError,
    LockLostError,
    NewTopic,
    Producer,
    Record,
    ShareConsumer,
    TailraceError,
    TopicPartition,
    UnknownTopicError,
)
from tailrace.connection import Connection
from tailrace.private_appliance import EmbeddedAppliance
from tailrace.protocol.wire import Api
from tailrace.share.records import ShareRecord
from tests.kit.processes import children, kill_and_wait_for_successor

LONG_MS = 60_000


def make(appliance: EmbeddedAppliance, topic: str, count: int = 0, partitions: int = 1, **configs: Any) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, partitions, {name.replace("_", "."): value for name, value in configs.items()}))
    fill(appliance, topic, count)


def fill(appliance: EmbeddedAppliance, topic: str, count: int, start: int = 0) -> None:
    with Producer(appliance.address) as producer:
        for number in range(start, start + count):
            producer.send(topic, b"%d" % number, key=b"k%d" % number, headers=[("h", b"x")])


def share(appliance: EmbeddedAppliance, topic: str, group: str = "g", **settings: Any) -> ShareConsumer:
    settings.setdefault("auto_offset_reset", "earliest")
    return ShareConsumer(topic, bootstrap=appliance.address, group_id=f"{group}-{topic}", **settings)


def take(consumer: ShareConsumer, count: int) -> list[ShareRecord]:
    """So many records, however many polls that takes; the consumer is in explicit mode, or this is one poll."""
    found: list[ShareRecord] = []
    while len(found) < count:
        records = consumer.poll(LONG_MS, count - len(found))
        assert records, f"{len(found)} of {count} records came"
        found += records
    return found


def poll_until(consumer: ShareConsumer, condition: Callable[[list[ShareRecord]], bool]) -> list[ShareRecord]:
    """Poll until what came satisfies a condition."""
    found: list[ShareRecord] = []
    for _ in range(600):
        found += consumer.poll(200)
        if condition(found):
            return found
    raise AssertionError(f"never came: {len(found)} records did")


def read(appliance: EmbeddedAppliance, topic: str, count: int) -> list[Record]:
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found: list[Record] = []
        while len(found) < count:
            records = consumer.poll(LONG_MS)
            assert records, f"{len(found)} of {count} records came"
            found += records
        return found


def describe(appliance: EmbeddedAppliance, group: str, part: str) -> list[dict[str, Any]]:
    connection = Connection(appliance.address, "test")
    try:
        rows: list[dict[str, Any]] = connection.call_json(Api.DESCRIBE_GROUP, {"group": group, "part": part}, LONG_MS)[part]
        return rows
    finally:
        connection.close()


def start_offset(appliance: EmbeddedAppliance, group: str) -> int:
    return int(describe(appliance, group, "partitions")[0]["start_offset"])


def test_many_consumers_of_one_partition_accept_each_record_once(appliance: EmbeddedAppliance, topic: str) -> None:
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
"""


def test_what_a_killed_consumer_had_comes_again_and_what_it_committed_does_not(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 20)
    command = [sys.executable, "-P", "-c", PROGRAM, appliance.address, topic]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}) as program:
        assert program.stdout is not None
        assert json.loads(program.stdout.readline()) == list(range(10))
        with share(appliance, topic, share_acknowledgement_mode="explicit") as consumer:
            assert [(r.offset, r.delivery_count) for r in take(consumer, 10)] == [(offset, 1) for offset in range(10, 20)]
            program.kill()
            again = take(consumer, 7)  # long before the locks pass: its connection has closed
            assert [(r.offset, r.delivery_count) for r in again] == [(offset, 2) for offset in range(3, 10)]


def test_the_process_of_groups_is_killed_and_nothing_is_delivered_twice(appliance: EmbeddedAppliance, topic: str) -> None:
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


def test_kills_at_any_moment_lose_nothing_and_accept_nothing_twice(appliance: EmbeddedAppliance, topic: str) -> None:
    count = 2_000
    make(appliance, topic, count, partitions=2)
    accepted: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()
    is_over = threading.Event()

    def work(seed: int) -> None:
        with share(appliance, topic, max_poll_records=20 + seed) as consumer:
            while not is_over.is_set():
                records = consumer.poll(100)
                if not records:
                    continue
                for number, record in enumerate(records):
                    consumer.acknowledge(record, "release" if record.delivery_count == 1 and number % 7 == seed else "accept")
                done = {(r.partition, r.offset) for n, r in enumerate(records) if not (r.delivery_count == 1 and n % 7 == seed)}
                try:
                    consumer.commit()
                except LockLostError as error:
                    done -= {(run[1], offset) for run in error.refused for offset in range(run[2], run[3] + 1)}
                with lock:
                    accepted.update(done)
                    if len(accepted) == count:
                        is_over.set()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for name in ("tr-groups-0", "tr-front-0", "tr-groups-0"):
        if not is_over.is_set():
            kill_and_wait_for_successor(appliance, name)
    assert is_over.wait(120)
    for thread in threads:
        thread.join()
    assert len(accepted) == count
    assert set(accepted.values()) == {1}


def test_a_late_acknowledgement_is_refused_and_the_record_is_with_another(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 3, group_share_record_lock_duration_ms=300)
    with share(appliance, topic) as late, share(appliance, topic) as other:
        records = take(late, 3)
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
        assert (letter.key, letter.value, headers["h"], headers["dlq.offset"], headers["dlq.delivery_count"]) == (
            b"k2",
            b"2",
            b"x",
            b"2",
            b"1",
        )
        assert headers["dlq.reason"] == b"rejected by the consumer"


def test_poison_ends_in_the_dead_letter_topic_and_the_rest_goes_on(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 10, partitions=2, group_share_delivery_count_limit=3, dead_letter_topic=f"{topic}-dead")
    deliveries: Counter[bytes] = Counter()
    with share(appliance, topic) as consumer:
        while consumer.metrics()["dead_letters"] < 1:
            for record in consumer.poll(1_000):
                deliveries[record.value] += 1
                assert record.delivery_count == deliveries[record.value]
                consumer.acknowledge(record, "release" if record.value == b"7" else "accept")
            consumer.commit()
        assert deliveries == {b"%d" % number: 3 if number == 7 else 1 for number in range(10)}
    (letter,) = read(appliance, f"{topic}-dead", 1)
    headers = dict(letter.headers)
    assert (letter.key, letter.value) == (b"k7", b"7")
    assert headers["dlq.topic"] == topic.encode()
    assert int(headers["dlq.partition"]) == letter.partition
    assert headers["dlq.group"] == f"g-{topic}".encode()
    assert headers["dlq.delivery_count"] == b"3"
    assert b"delivered 3 times" in headers["dlq.reason"]
    with Consumer(bootstrap=appliance.address) as plain:
        key = TopicPartition(topic, letter.partition)
        plain.assign([key])
        plain.seek(key, int(headers["dlq.offset"]))
        (origin,) = plain.poll(LONG_MS, 1)
        assert (origin.value, origin.timestamp) == (b"7", int(headers["dlq.timestamp"]))


def test_a_dead_letter_that_cannot_be_written_is_not_given_up(
    appliance: EmbeddedAppliance, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(appliance, topic, 1, group_share_record_lock_duration_ms=300, group_share_delivery_count_limit=1, dead_letter_topic=topic)
    with share(appliance, topic) as consumer:
        (record,) = take(consumer, 1)
        consumer.acknowledge(record, "reject")
        with pytest.raises(TailraceError, match="its own dead-letter topic"):
            consumer.commit()
        consumer.acknowledge(record, "release")
        consumer.commit()
        assert consumer.poll(500) == []
        assert "share_dead_letter_not_written" in caplog.text
        with Admin(appliance.address) as admin:
            admin.alter_topics({topic: {"dead.letter.topic": ""}})
        assert start_offset(appliance, f"g-{topic}") == 0
    with share(appliance, topic) as consumer:
        while consumer.metrics()["dead_letters"] < 1:
            assert consumer.poll(200) == []
    assert read(appliance, f"{topic}.dlq", 1)[0].value == b"0"


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


def test_a_consumer_that_waits_gets_what_comes_and_what_another_releases(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic)
    found: list[ShareRecord] = []
    with share(appliance, topic, auto_offset_reset="latest") as holder, share(appliance, topic) as waiter:
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
        assert [record.offset for record in take(consumer, 5)] == [5, 6, 7, 8, 9]  # and accepts those before
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


def test_a_record_whose_deserializer_fails_is_released_and_dead_lettered_as_it_is_stored(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 6, group_share_delivery_count_limit=2)

    def strict(value: bytes) -> int:
        if value == b"3":
            raise ValueError("three")
        return int(value)

    values: list[int] = []
    failures: list[int | None] = []
    with share(appliance, topic, value_deserializer=strict) as consumer:
        while consumer.metrics()["dead_letters"] < 1 or len(values) < 5:
            try:
                records = consumer.poll(1_000)
            except InvalidRecordError as error:
                failures.append(error.first_offset)
                continue
            for record in records:
                assert record.delivery_count == 1
                values.append(record.value)
                consumer.acknowledge(record)
    assert values == [0, 1, 2, 4, 5]  # those behind it pay nothing for it
    assert failures == [3, 3]
    assert read(appliance, f"{topic}.dlq", 1)[0].value == b"3"


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


def test_a_poll_comes_back_in_its_time_while_the_process_of_groups_stands_still(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 5)
    with share(appliance, topic) as consumer:
        assert len(take(consumer, 2)) == 2
        pid = children(appliance)["tr-groups-0"]
        os.kill(pid, signal.SIGSTOP)
        try:
            assert consumer.poll(300) == []
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [record.offset for record in take(consumer, 3)] == [2, 3, 4]
