"""Faults of a member: user code that takes long, fork, gevent, and processes of the appliance that
die in a rebalance.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tailrace import Admin, Consumer, Producer, Record, TopicPartition
from tailrace.client.connections.runtime import SYSTEM
from tailrace.core.errors import ClientClosedError, CommitFailedError, InvalidRequestError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.topics import create
from tests.kit.members.groups import (
    Remembers,
    heartbeats,
    member,
    offsets_by_partition,
    poll_until,
    poll_until_shared,
    read_until,
)
from tests.kit.processes import (
    HANG_LIMIT_S,
    children,
    kill_and_wait_for_successor,
    stopped,
    wait_until,
)

PARTITIONS = 4
RECORDS = 200


@pytest.fixture
def filled(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of 4 partitions with 50 records each."""
    create(appliance, topic, PARTITIONS)
    fill(appliance, topic)
    return topic


def fill(appliance: EmbeddedAppliance, topic: str, count: int = RECORDS, first: int = 0) -> None:
    with Producer(appliance.address) as producer:
        for number in range(first, first + count):
            producer.send(topic, b"%d" % number, partition=number % PARTITIONS)
        producer.flush(60)


def test_heartbeats_go_on_while_user_code_runs_long(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    settings = {"session_timeout_ms": 10_000, "heartbeat_interval_ms": 200}
    told = Remembers()
    with member(appliance, filled, **settings) as busy, member(appliance, filled, filled) as other:
        busy.subscribe([filled], listener=told)
        poll_until_shared([busy, other], PARTITIONS)
        told.calls.clear()
        count, until = heartbeats(busy), time.monotonic() + HANG_LIMIT_S
        while (
            heartbeats(busy) <= count + 3
        ):  # works, and never lets go of the interpreter by itself
            sum(range(1000))
            assert time.monotonic() < until, "no heartbeats while user code runs"
        other.poll(0)
        assert len(other.assignment()) == 2
        busy.commit()
        poll_until_shared([busy, other], PARTITIONS)
        assert told.calls == []


def test_a_consumer_that_does_not_poll_is_given_up_told_so_and_joins_again(
    appliance: EmbeddedAppliance, filled: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = Remembers()
    with (
        member(appliance, filled, max_poll_interval_ms=4_000) as stuck,
        member(appliance, filled, filled) as other,
    ):
        stuck.subscribe([filled], listener=told)
        read = poll_until_shared([stuck, other], PARTITIONS)
        had = stuck.assignment()
        told.calls.clear()
        read += poll_until(
            [other],
            lambda: len(other.assignment()) == PARTITIONS,
            "its partitions are given to the other",
        )
        with pytest.raises(
            CommitFailedError, match=r"poll\(\) was not called for max_poll_interval_ms \(4000 ms\)"
        ):
            stuck.commit({had[0]: 1})
        caplog.set_level(logging.WARNING, "tailrace")
        poll_until_shared([stuck, other], PARTITIONS)
        assert told.calls[0] == ("lost", had)
        assert [kind for kind, _ in told.calls] == ["lost", "assigned"]
        assert "max_poll_interval_ms (4000 ms)" in caplog.text


def test_kept_partitions_never_stop_and_are_never_read_twice(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    """One member reads while others come and go; what it has throughout comes gap-free, without
    being asked for again.
    """
    over = threading.Event()
    counter = itertools.count(RECORDS)

    def produce() -> None:
        with Producer(appliance.address, linger_ms=0) as producer:
            while not over.is_set():
                number = next(counter)
                producer.send(filled, b"%d" % number, partition=number % PARTITIONS)
                over.wait(0.001)

    thread = threading.Thread(target=produce)
    thread.start()
    told = Remembers()
    read: list[Record] = []
    try:
        with member(appliance, filled) as stays:
            stays.subscribe([filled], listener=told)
            read += poll_until([stays], lambda: len(stays.assignment()) == PARTITIONS, "it has all")
            for _ in range(3):
                with (
                    member(appliance, filled, filled) as comes,
                    member(appliance, filled, filled) as too,
                ):
                    everyone = [stays, comes, too]
                    before = {
                        key: len(offsets_by_partition(read).get(key, []))
                        for key in stays.assignment()
                    }
                    shared = poll_until_shared(everyone, PARTITIONS)
                    kept = set(stays.assignment())
                    read += [
                        record for record in shared if (record.topic, record.partition) in kept
                    ]
                    assert kept < set(before)
                read += [
                    one
                    for one in poll_until_shared([stays], PARTITIONS)
                    if (one.topic, one.partition) in kept
                ]
            never_revoked = {TopicPartition(filled, number) for number in range(PARTITIONS)} - {
                key for kind, keys in told.calls if kind != "assigned" for key in keys
            }
            assert never_revoked, "sticky: something is kept through it all"
            for key in never_revoked:
                offsets = offsets_by_partition(read)[key]
                assert offsets == list(range(len(offsets))), "gap-free, each once, in order"
    finally:
        over.set()
        thread.join()


def test_a_listener_is_told_in_order_may_commit_and_seek_and_its_exceptions_reach_the_caller_once(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    key = TopicPartition(filled, 0)

    def act(kind: str, partitions: list[TopicPartition]) -> None:
        if kind == "assigned":
            for one in partitions:
                first.seek(one, 10)
        else:
            for one in partitions:
                first.commit({one: first.position(one) - 1})
        raise RuntimeError(kind)

    told = Remembers(act)
    with member(appliance, filled, enable_auto_commit=False) as first:
        first.subscribe([filled], listener=told)
        with pytest.raises(RuntimeError, match="assigned"):
            poll_until([first], lambda: False, "the listener raises")
        assert first.assignment() == [
            TopicPartition(filled, number) for number in range(PARTITIONS)
        ], "it is consistent all the same"
        records = read_until([first], RECORDS - 10 * PARTITIONS)
        assert {offsets[0] for offsets in offsets_by_partition(records).values()} == {10}
        second = member(appliance, filled, filled)
        with pytest.raises(RuntimeError, match="revoked"):
            poll_until([first, second], lambda: False, "the listener raises")
        assert len(first.assignment()) == 2
        again = read_until([second], 2)
        assert {record.offset for record in again} == {49}, "where the listener has committed"
        second.close()
        calls: list[tuple[object, list[TopicPartition]]] = []
        first.subscribe(
            [filled],
            on_assign=lambda *call: calls.append(call),
            on_revoke=lambda *call: calls.append(call),
        )
        poll_until([first], lambda: len(first.assignment()) == PARTITIONS, "it has all again")
        assert calls[0][0] is first
        first.subscribe([filled], listener=told)
        with pytest.raises(RuntimeError, match="revoked"):
            first.close()
        with pytest.raises(ClientClosedError):
            first.poll(0)
    with member(appliance, filled, filled) as after:
        assert len(read_until([after], PARTITIONS)) == PARTITIONS, (
            "at once: the one before has left"
        )
        assert after.committed(key) == 49


@pytest.mark.parametrize("kind", ["assigned", "revoked"])
@pytest.mark.parametrize("asked", ["unsubscribe", "close"])
def test_a_listener_may_unsubscribe_and_close_and_is_told_once(
    appliance: EmbeddedAppliance, filled: str, asked: str, kind: str
) -> None:
    def act(said: str, _partitions: list[TopicPartition]) -> None:
        if said == kind:
            getattr(consumer, asked)()

    told = Remembers(act)
    with member(appliance, f"{filled}-{asked}-{kind}") as consumer:
        consumer.subscribe([filled], listener=told)
        with contextlib.suppress(ClientClosedError, InvalidRequestError):
            poll_until([consumer], lambda: bool(told.calls), "it has partitions")
            consumer.unsubscribe()
    assert [(said, len(partitions)) for said, partitions in told.calls] == [
        ("assigned", PARTITIONS),
        ("revoked", PARTITIONS),
    ]


def test_at_most_once_and_at_least_once(appliance: EmbeddedAppliance, filled: str) -> None:
    with member(
        appliance, filled + "most", filled, enable_auto_commit=False, max_poll_records=10
    ) as consumer:
        lost = consumer.poll(60_000)
        consumer.commit()  # before the work, which is never done
    with member(appliance, filled + "most", filled) as consumer:
        rest = read_until([consumer], RECORDS - len(lost))
    assert sorted(record.value for record in lost + rest) == sorted(
        b"%d" % number for number in range(RECORDS)
    )
    with member(
        appliance, filled + "least", filled, enable_auto_commit=False, max_poll_records=10
    ) as consumer:
        done = consumer.poll(60_000)
        consumer.commit()
        again = consumer.poll(60_000)  # worked on, and not committed
    with member(appliance, filled + "least", filled) as consumer:
        rest = read_until([consumer], RECORDS - len(done))
    assert {record.value for record in again} <= {record.value for record in rest}
    assert len(done + rest) == RECORDS


def test_the_group_process_may_die_at_any_moment_of_a_rebalance(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    chance = random.Random(16)

    def kill() -> None:
        pid = children(appliance).get("tr-groups-0")
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_soon() -> threading.Timer:
        timer = threading.Timer(chance.uniform(0, 0.03), kill)
        timer.start()
        return timer

    with member(appliance, filled, filled, auto_commit_interval_ms=50) as stays:
        read = poll_until_shared([stays], PARTITIONS)
        for round_number in range(3):
            wait_until(lambda: "tr-groups-0" in children(appliance), "it is there")
            timer = kill_soon()
            with member(appliance, filled, filled, auto_commit_interval_ms=50) as comes:
                read += poll_until_shared([stays, comes], PARTITIONS)
                timer.join()
                fill(appliance, filled, 20, RECORDS + 20 * round_number)
                wait_until(lambda: "tr-groups-0" in children(appliance), "it is there again")
                timer = kill_soon()
            read += poll_until_shared([stays], PARTITIONS)
            timer.join()
        read += poll_until(
            [stays],
            lambda: sum(map(stays.position, stays.assignment())) == RECORDS + 60,
            "all is read",
        )
    assert {record.value for record in read} == {
        b"%d" % number for number in range(RECORDS + 60)
    }, "nothing is missed"


def test_a_restart_of_the_fronts_or_of_the_group_process_moves_no_partition(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    told, other_told = Remembers(), Remembers()
    with (
        member(appliance, filled, heartbeat_interval_ms=1_500) as one,
        member(appliance, filled, heartbeat_interval_ms=1_500) as two,
    ):
        one.subscribe([filled], listener=told)
        two.subscribe([filled], listener=other_told)
        poll_until_shared([one, two], PARTITIONS)
        told.calls.clear()
        other_told.calls.clear()

        def are_known(since: list[int]) -> bool:
            return all(
                heartbeats(consumer) > count + 1
                for consumer, count in zip((one, two), since, strict=True)
            )

        for name in ("tr-groups-0", "tr-front-0"):
            kill_and_wait_for_successor(appliance, name)
            poll_until(
                [one, two],
                partial(are_known, [heartbeats(one), heartbeats(two)]),
                "both are known to the successor",
            )
            one.commit()
            two.commit()
        assert told.calls == other_told.calls == []


def test_a_front_that_takes_long_to_come_again_costs_none_of_its_members_its_place(
    tmp_path: pathlib.Path,
) -> None:
    running = start_embedded(
        data_dir=str(tmp_path / "data"), listen=f"ipc://{tmp_path}/s", settings={"fronts": 2}
    )
    try:
        create(running, "orders", PARTITIONS)
        told, other_told = Remembers(), Remembers()
        settings: dict[str, Any] = {"group_id": "g", "heartbeat_interval_ms": 250}
        with (
            Consumer(bootstrap=f"ipc://{tmp_path}/s", **settings) as one,
            Consumer(bootstrap=f"ipc://{tmp_path}/s.1", **settings) as other,
        ):
            one.subscribe(["orders"], listener=told)
            other.subscribe(["orders"], listener=other_told)
            poll_until_shared([one, other], PARTITIONS)
            told.calls.clear()
            other_told.calls.clear()
            kill_and_wait_for_successor(running, "tr-front-0")
            successor = children(running)["tr-front-0"]
            with stopped(successor):
                begun = heartbeats(other)
                poll_until(
                    [other],
                    lambda: heartbeats(other) > begun + 12,
                    "the process of groups had three seconds to look",
                )
            one.commit()
            begun = heartbeats(one)
            poll_until(
                [one, other], lambda: heartbeats(one) > begun + 1, "it is known to the successor"
            )
            assert told.calls == other_told.calls == []
    finally:
        running.stop()


def test_a_child_is_told_at_once_that_it_has_no_consumer_and_the_parents_goes_on(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    with member(appliance, filled, filled) as consumer:
        read_until([consumer], RECORDS)
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    consumer.poll(0)
                except ClientClosedError as error:
                    code = 7 if "fork()" in str(error) else 2
                    consumer.close()
                    del consumer
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        fill(appliance, filled, 4, RECORDS)
        assert len(read_until([consumer], 4)) == 4
        assert len(consumer.assignment()) == PARTITIONS


GEVENT_PROGRAM = """
from gevent import monkey
monkey.patch_all()
import gevent, sys, threading, time
import tailrace
from gevent import monkey
address, topic = sys.argv[1:]
count = 0
def tick():
    global count
    while True:
        count += 1
        gevent.sleep(0.005)
gevent.spawn(tick)
settings = dict(session_timeout_ms=1500, heartbeat_interval_ms=200, auto_offset_reset="earliest", bootstrap=address, group_id=topic + "g")
class Lost(tailrace.RebalanceListener):
    def on_partitions_lost(self, lost): sys.exit(9)
consumer = tailrace.Consumer(**settings)
consumer.subscribe([topic], listener=Lost())
found = []
def read():
    while len(found) < 200:
        found.extend(consumer.poll(1000))
gevent.spawn(read).join()
before = count
until = time.monotonic() + 100
while count <= before + 10:
    consumer.poll(300)
    assert time.monotonic() < until, "no other greenlet runs while one polls"
beats = consumer._group.membership.heartbeat_count
until = time.monotonic() + 100
while consumer._group.membership.heartbeat_count <= beats + 3:
    sum(range(1000))  # the hub never runs
    assert time.monotonic() < until, "no heartbeats while the hub stands still"
consumer.poll(0)
consumer.commit()
consumer.close()
print(len(found))
"""  # noqa: E501


def test_under_gevent_heartbeats_are_a_real_threads(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    pytest.importorskip("gevent")
    done = subprocess.run(
        [sys.executable, "-P", "-c", GEVENT_PROGRAM, appliance.address, filled],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "200\n"), done.stderr


def test_a_consumer_waits_for_an_appliance_that_is_not_there_and_ends_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from tailrace import Consumer

    with Consumer("t", bootstrap="tcp://127.0.0.1:1", group_id="g") as consumer:
        assert consumer.poll(1_500) == []
    assert (
        caplog.messages.count("the consumer gets no answer at tcp://127.0.0.1:1; it goes on trying")
        == 1
    )


def test_a_deleted_group_or_topic_is_survived(appliance: EmbeddedAppliance, filled: str) -> None:
    with member(appliance, filled, filled) as consumer, Admin(appliance.address) as admin:
        read_until([consumer], RECORDS)
        admin.delete_topics([filled])
        poll_until(
            [consumer], lambda: consumer.assignment() == [], "the topic's partitions are given up"
        )
        create(appliance, filled, PARTITIONS)
        fill(appliance, filled)
        assert len(read_until([consumer], RECORDS)) == RECORDS


def test_a_topic_that_goes_while_it_is_read_is_no_error_of_a_member(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    """Whoever learns of it first, the reader or the group."""
    with (
        member(
            appliance, filled, filled, fetch_max_wait_ms=10, heartbeat_interval_ms=1_000
        ) as consumer,
        Admin(appliance.address) as admin,
    ):
        read_until([consumer], RECORDS)
        pid = children(appliance)["tr-groups-0"]
        with stopped(pid):
            admin.delete_topics([filled])
            for _ in range(20):
                consumer.poll(10)
            assert len(consumer.assignment()) == PARTITIONS, "the group has not heard of it"
        poll_until(
            [consumer], lambda: consumer.assignment() == [], "the topic's partitions are given up"
        )


def test_where_there_may_be_no_thread_polls_make_the_heartbeats(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    """As in the simulation."""
    alone = replace(SYSTEM, has_threads=False)
    threads = threading.active_count()
    told = Remembers()
    with (
        member(appliance, filled, runtime=alone) as one,
        member(appliance, filled, filled, runtime=alone) as two,
    ):
        one.subscribe([filled], listener=told)
        read = poll_until_shared([one, two], PARTITIONS)
        read += read_until([one, two], RECORDS - len(read))
        assert len({record.value for record in read}) == RECORDS
        two.close()
        poll_until_shared([one], PARTITIONS)
        assert [kind for kind, _ in told.calls][-1] == "assigned"
        one.commit()
        assert threading.active_count() == threads
        fill(appliance, filled, 4, RECORDS)
        count = heartbeats(one)
        assert one.poll(60_000)
        late = threading.Timer(0.3, fill, (appliance, filled, 4, RECORDS + 4))
        late.start()
        poll_until([one], lambda: heartbeats(one) > count, "it shows itself while it waits")
        late.join()
