"""Consumers of a group: they share partitions, begin where the group has committed, and miss
nothing when one of them dies.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tailrace import (
    Admin,
    Consumer,
    ConsumerGroupMetadata,
    NewTopic,
    OffsetAndMetadata,
    Producer,
    Record,
    TopicPartition,
)
from tailrace.client.topics.offsets import topic_id_of
from tailrace.core.errors import (
    CommitFailedError,
    InstanceIdInUseError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    UnknownTopicError,
    UnsupportedAssignorError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.topics import create
from tests.kit.members.groups import (
    MemberProcess,
    Remembers,
    member,
    offsets_by_partition,
    poll_until,
    poll_until_shared,
    read_until,
)
from tests.kit.processes import HANG_LIMIT_S

PARTITIONS = 4
RECORDS = 400


def fill(
    appliance: EmbeddedAppliance,
    topic: str,
    count: int = RECORDS,
    first: int = 0,
    partitions: int = PARTITIONS,
) -> None:
    with Producer(appliance.address) as producer:
        for number in range(first, first + count):
            producer.send(topic, b"%d" % number, partition=number % partitions)
        producer.flush(60)


@pytest.fixture
def filled(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of 4 partitions with 100 records each."""
    create(appliance, topic, PARTITIONS)
    fill(appliance, topic)
    return topic


@pytest.fixture
def keys(filled: str) -> list[TopicPartition]:
    return [TopicPartition(filled, number) for number in range(PARTITIONS)]


def values(records: list[Record]) -> list[int]:
    return sorted(int(record.value) for record in records)


def test_two_consumers_share_and_what_one_keeps_goes_on_where_it_is(
    appliance: EmbeddedAppliance, filled: str, keys: list[TopicPartition]
) -> None:
    told = Remembers()
    first, second = member(appliance, filled), member(appliance, filled, filled)
    with first, second:
        first.subscribe([filled], listener=told)
        assert first.subscription() == {filled}
        read = read_until([first], RECORDS)
        assert told.calls == [("assigned", keys)]
        before = {key: first._fetch_loop.cursors[key] for key in keys}
        fill(appliance, filled, first=RECORDS)
        again = poll_until_shared([first, second], PARTITIONS)
        kept = first.assignment()
        given = sorted(set(keys) - set(kept))
        assert told.calls[1:] == [("revoked", given)], (
            "only what is given away, and nothing of it assigned anew"
        )
        assert all(first._fetch_loop.cursors[key] is before[key] for key in kept), (
            "nothing was done with what is kept"
        )
        assert second.assignment() == given
        again += read_until([first, second], 2 * RECORDS - len(read) - len(again))
        assert values(read + again) == list(range(2 * RECORDS)), (
            "each once: what was handed out was committed before it was given away"
        )
        second.close()
        poll_until_shared([first], PARTITIONS)
        assert told.calls[2:] == [("assigned", given)]
        assert first.poll(0) == []


def test_a_group_goes_on_where_it_has_committed(
    appliance: EmbeddedAppliance, filled: str, keys: list[TopicPartition]
) -> None:
    with member(appliance, filled, filled, enable_auto_commit=False) as consumer:
        records = read_until([consumer], RECORDS)
        assert consumer.committed(keys) == dict.fromkeys(keys)
        consumer.commit({keys[0]: 7, keys[1]: OffsetAndMetadata(9, "nine")})
        found = consumer.committed(keys)
        assert (found[keys[0]], found[keys[1]], found[keys[2]]) == (
            7,
            OffsetAndMetadata(9, "nine"),
            None,
        )
        assert found[keys[1]].offset == 9  # type: ignore[union-attr]
        of_partition_two = [record for record in records if record.partition == 2]
        consumer.commit(of_partition_two[4])
        consumer.commit(message=of_partition_two[5])
        assert consumer.committed(keys[2]) == 6
        consumer.commit({})
    with member(appliance, filled, filled, enable_auto_commit=False) as consumer:
        poll_until([consumer], lambda: len(consumer.assignment()) == PARTITIONS, "it has joined")
        consumer.seek_to_end()
        consumer.seek(keys[0], consumer.committed(keys[0]) or 0)
        assert read_until([consumer], 1)[0].offset == 7
    with member(appliance, filled, filled, enable_auto_commit=False) as consumer:
        found_offsets = offsets_by_partition(read_until([consumer], 93 + 91 + 94 + 100))
        assert [found_offsets[key][0] for key in keys] == [7, 9, 6, 0]
        assert consumer.position(keys[0]) == 100
        consumer.commit()
        assert consumer.committed(keys) == dict.fromkeys(keys, 100)
        epochs = {one.leader_epoch for one in consumer.committed(keys).values() if one is not None}
        assert epochs == {0}, "a log that is cut below it will be noticed"
    with Consumer(
        bootstrap=appliance.address, group_id=filled, enable_auto_commit=False
    ) as outside:
        outside.assign(keys[:2])
        assert [outside.position(key) for key in keys[:2]] == [100, 100], "of assign(), too"
        outside.commit({keys[0]: 50})
        assert outside.committed(keys[0]) == 50
        assert outside.group_metadata() == ConsumerGroupMetadata(
            filled, -1, outside.memberid(), None
        )
        assert outside.consumer_group_metadata() == outside.group_metadata()
        assert all(topic_id_of(key) for key in outside.positions()), "offsets go by topic id"


def test_auto_commit_is_of_what_earlier_polls_have_handed_out(
    appliance: EmbeddedAppliance, filled: str, keys: list[TopicPartition]
) -> None:
    with (
        member(appliance, filled, auto_commit_interval_ms=0, max_poll_records=10) as consumer,
        member(appliance, filled) as other,
    ):
        consumer.assign(keys[:1])
        other.assign([])

        def next_offsets() -> list[int]:
            return [record.offset for record in consumer.poll(60_000)]

        assert next_offsets() == list(range(10))
        assert other.committed(keys[0]) in (None, 0)
        assert next_offsets() == list(range(10, 20))
        consumer.poll(0)
        assert consumer.committed(keys[0]) in (10, 20), "commits of polls do not wait"
        consumer.commit({keys[0]: 3})
        assert other.committed(keys[0]) == 3
    assert committed(appliance, filled, keys[0]) == 30, "close() commits all that was handed out"


def committed(appliance: EmbeddedAppliance, group: str, key: TopicPartition) -> int | None:
    with Consumer(bootstrap=appliance.address, group_id=group) as consumer:
        return consumer.committed(key)


def test_an_iteration_commits_what_it_has_handed_out_and_an_exception_leaves_the_last_for_others(
    appliance: EmbeddedAppliance, filled: str, keys: list[TopicPartition]
) -> None:
    def consumer(group: str) -> Consumer:
        found = member(appliance, filled + group)
        found.assign(keys[:1])
        return found

    with consumer("break") as one:
        for record in one:
            if record.offset == 41:
                break
    assert committed(appliance, filled + "break", keys[0]) == 42
    with consumer("commit") as one:
        for record in one:
            if record.offset == 41:
                one.commit()
                assert one.committed(keys[0]) == 42
                break
        assert one.poll(60_000, 1)[0].offset == 42, "what the loop did not take"
    with pytest.raises(ZeroDivisionError), consumer("raise") as one:
        [1 / (record.offset - 41) for record in one]
    assert committed(appliance, filled + "raise", keys[0]) == 41, (
        "the record that failed is read again"
    )
    with pytest.raises(ZeroDivisionError), consumer("poll") as one:
        [one.poll(60_000, 10), one.poll(60_000, 10)][1][1 // 0]
    assert committed(appliance, filled + "poll", keys[0]) == 10
    with consumer("without") as one:
        one.poll(60_000)
        one.close(autocommit=False)
    assert committed(appliance, filled + "without", keys[0]) is None


def test_commits_are_made_in_order_and_called_back_in_order(
    appliance: EmbeddedAppliance, filled: str, keys: list[TopicPartition]
) -> None:
    called: list[tuple[int, type[Exception] | None]] = []

    def note(offsets: dict[TopicPartition, OffsetAndMetadata], error: Exception | None) -> None:
        called.append((offsets[keys[0]].offset, None if error is None else type(error)))
        assert called[-1][0] != 5, "raised on purpose"

    with member(appliance, filled, filled, enable_auto_commit=False) as consumer:
        with pytest.raises(CommitFailedError, match="not a member"):
            consumer.commit({keys[0]: 1})
        read_until([consumer], RECORDS)
        for offset in range(1, 21):
            consumer.commit_async({keys[0]: offset}, note)
        assert called == [], "by later calls only"
        consumer.commit({keys[0]: 30})
        assert called == [(offset, None) for offset in range(1, 21)]
        consumer.commit_async({keys[0]: 40}, note)
        consumer.commit({keys[1]: 5}, asynchronous=True)
        consumer.commit_async({keys[0]: 101}, note)
        consumer.close()
    assert called[20:] == [(40, None), (101, OffsetOutOfRangeError)]
    with member(appliance, filled) as consumer:
        assert (consumer.committed(keys[0]), consumer.committed(keys[1])) == (40, 5)


def test_a_commit_that_nobody_waits_for_and_that_has_no_callback_says_in_the_log_that_it_failed(
    appliance: EmbeddedAppliance,
    filled: str,
    keys: list[TopicPartition],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with member(appliance, filled, filled, enable_auto_commit=False) as consumer:
        read_until([consumer], RECORDS)
        for offset, said in ((101, 1), (102, 1), (40, 1), (101, 2)):  # once until one succeeds
            consumer.commit({keys[0]: offset}, asynchronous=True)
            consumer.commit({keys[1]: 5})
            assert caplog.text.count("commit_async of group") == said, offset
        assert "beyond the end" in caplog.text
        assert "Give the offset of the next record to read" in caplog.text
        assert "Seek to" not in caplog.text, "a commit does not read"
        assert consumer.committed(keys[0]) == 40


def test_commits_that_make_no_sense_are_refused_and_change_nothing(
    appliance: EmbeddedAppliance, filled: str, keys: list[TopicPartition]
) -> None:
    with member(appliance, filled) as consumer:
        consumer.commit({keys[0]: 100})
        with pytest.raises(OffsetOutOfRangeError):
            consumer.commit({keys[0]: 101})
        with pytest.raises(UnknownTopicError):
            consumer.commit({TopicPartition("no-such-topic", 0): 1})
        for given in ({keys[0]: -1}, {keys[0]: "5"}, {keys[0]: 1.5}, {"t": 1}, [keys[0]], 5):
            with pytest.raises(InvalidRequestError):
                consumer.commit(given)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError):
            consumer.commit({keys[0]: 1}, message=3)  # type: ignore[arg-type]
        assert consumer.committed(keys[0]) == 100
    with (
        member(appliance, filled, filled) as mine,
        member(appliance, filled, filled, enable_auto_commit=False) as other,
    ):
        poll_until_shared([mine, other], PARTITIONS)
        theirs = other.assignment()[0]
        with pytest.raises(CommitFailedError, match=theirs.topic):
            mine.commit({theirs: 5})
        other.commit({theirs: 6})
        with (
            Consumer(bootstrap=appliance.address, group_id=filled) as outside,
            pytest.raises(CommitFailedError),
        ):
            outside.commit({theirs: 7})
        assert mine.committed(theirs) == 6


def test_a_killed_consumers_partitions_go_to_another_which_misses_nothing(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    with member(appliance, filled, filled, auto_commit_interval_ms=0) as survivor:
        read_until([survivor], 1)
        with MemberProcess(appliance, filled, filled, auto_commit_interval_ms=0) as victim:
            mine: list[Record] = []
            halves = threading.Event()
            theirs: set[tuple[str, int, int]] = set()

            def follow() -> None:
                while len((poll := victim.next_poll())["assigned"]) != PARTITIONS // 2:
                    theirs.update(tuple(one) for one in poll["offsets"])
                halves.set()

            thread = threading.Thread(target=follow)
            thread.start()
            mine += poll_until(
                [survivor], halves.is_set, "the second consumer has half of the partitions"
            )
            thread.join()
            fill(appliance, filled, first=RECORDS)
            theirs.update(victim.read(50))
            victim.kill()
        mine += poll_until_shared([survivor], PARTITIONS)
        fill(appliance, filled, count=4, first=2 * RECORDS)
        poll_until(
            [survivor],
            lambda: sum(survivor.position(key) for key in survivor.assignment()) == 2 * RECORDS + 4,
            "all is read",
        )


def test_a_consumer_that_dies_between_poll_and_commit_is_repeated_by_another(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    with MemberProcess(appliance, filled, filled, limit=100, enable_auto_commit=False) as victim:
        seen = set(victim.read(100))
        victim.kill()
    with member(appliance, filled, filled) as survivor:
        again = {
            (record.topic, record.partition, record.offset)
            for record in read_until([survivor], RECORDS)
        }
    assert len(again) == RECORDS
    assert seen < again


def test_a_program_that_ends_without_close_leaves_no_thread_that_holds_it_up_and_its_group_goes_on(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    program = """
import gc, sys, threading, tailrace
address, topic = sys.argv[1:]
consumer = tailrace.Consumer(topic, bootstrap=address, group_id=topic, auto_offset_reset="earliest")
while not consumer.poll(1000): pass
other = tailrace.Consumer(topic, bootstrap=address, group_id=topic + "2", auto_offset_reset="earliest")
while not other.poll(1000): pass
threads = [thread for thread in threading.enumerate() if thread.name == "tailrace-heartbeats"]
assert len(threads) == 2, threads
del other
gc.collect()
threads[1].join(60)
assert not threads[1].is_alive(), "a consumer that is collected takes its thread along"
sys.exit(7)
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-P", "-X", "dev", "-c", program, appliance.address, filled],
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert done.returncode == 7
    with member(appliance, filled, filled) as one, member(appliance, filled + "2", filled) as two:
        assert len(read_until([one], RECORDS)) == RECORDS
        assert len(read_until([two], RECORDS)) == RECORDS


def test_a_consumer_without_a_group_has_no_thread_and_loads_nothing_of_groups(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    program = """
import sys, threading, tailrace
with tailrace.Consumer(sys.argv[2], bootstrap=sys.argv[1], auto_offset_reset="earliest") as consumer:
    while not consumer.poll(1000): pass
    assert threading.active_count() == 1
assert "tailrace.group.group_coordinator" not in sys.modules
"""  # noqa: E501
    subprocess.run(
        [sys.executable, "-P", "-c", program, appliance.address, filled],
        timeout=HANG_LIMIT_S,
        check=True,
    )


@pytest.fixture
def other_topics(appliance: EmbeddedAppliance, topic: str) -> Iterator[list[str]]:
    names = [f"{topic}-{letter}" for letter in "abc"]
    yield names
    with Admin(appliance.address) as admin:
        admin.delete_topics(sorted(set(names) & set(admin.list_topics())))


def test_new_topics_added_partitions_and_deleted_topics_are_picked_up(
    appliance: EmbeddedAppliance,
    topic: str,
    other_topics: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two, three = other_topics
    told = Remembers()
    with (
        Admin(appliance.address) as admin,
        member(appliance, topic) as by_pattern,
        member(appliance, topic + "n", one, three) as by_name,
    ):
        admin.create_topics([NewTopic(one, 1), NewTopic("x" + one, 1)])
        by_pattern.subscribe(pattern=f"{topic}-[abd]", listener=told)
        everyone = [by_pattern, by_name]
        poll_until(
            everyone,
            lambda: by_pattern.assignment() == by_name.assignment() == [(one, 0)],
            "what is there is read",
        )
        assert by_pattern.subscription() == {one}
        assert caplog.messages == [
            (
                f"there is no topic {three}; the consumer of group '{topic}n' reads it when there is "  # noqa: E501
                "one"
            )
        ]
        admin.create_topics([NewTopic(two, 1), NewTopic(three, 1)])
        poll_until(
            everyone,
            lambda: len(by_pattern.assignment()) == len(by_name.assignment()) == 2,
            "new topics are read",
        )
        assert by_pattern.subscription() == {one, two}
        assert set(by_name.assignment()) == {(one, 0), (three, 0)}
        fill(appliance, one, 10, partitions=1)
        assert values(read_until([by_pattern], 10)) == list(range(10))
        admin.create_partitions({one: 3})
        poll_until(
            everyone,
            lambda: len(by_pattern.assignment()) == len(by_name.assignment()) == 4,
            "added partitions are read",
        )
        fill(appliance, one, 30, 10, partitions=3)
        assert values(read_until([by_pattern], 30)) == list(range(10, 40))
        admin.delete_topics([one])
        poll_until(
            everyone,
            lambda: by_pattern.assignment() == [(two, 0)],
            "a deleted topic is read no more",
        )
        assert told.calls[-1] == ("revoked", [(one, 0), (one, 1), (one, 2)])
        admin.create_topics([NewTopic(one, 1)])
        fill(appliance, one, 3, partitions=1)
        assert values(read_until([by_pattern], 3)) == [0, 1, 2], (
            "another topic of the name begins anew"
        )
        by_pattern.subscribe([two])
        poll_until(
            [by_pattern],
            lambda: by_pattern.assignment() == [(two, 0)],
            "another subscription takes the place of the one before",
        )
        by_pattern.unsubscribe()
        assert by_pattern.assignment() == [] == sorted(by_pattern.subscription())
        by_pattern.assign([TopicPartition(one, 0)])
        with pytest.raises(InvalidRequestError, match="unsubscribe"):
            by_pattern.subscribe([two])


def test_strategies_are_the_members_and_one_that_is_not_there_is_refused(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    with member(appliance, filled, filled, partition_assignment_strategy="no-such") as consumer:
        for _ in range(2):
            with pytest.raises(UnsupportedAssignorError):
                poll_until([consumer], lambda: False, "it is refused")
    with member(appliance, filled, filled, partition_assignment_strategy=["range"]) as consumer:
        assert len(read_until([consumer], RECORDS)) == RECORDS


def test_a_static_members_restart_moves_no_partition_and_its_name_is_its_own(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    told = Remembers()
    with member(appliance, filled) as other:
        other.subscribe([filled], listener=told)
        static = member(appliance, filled, filled, group_instance_id="one")
        poll_until_shared([other, static], PARTITIONS)
        told.calls.clear()
        owned = sorted(static.assignment())
        with (
            member(appliance, filled, filled, group_instance_id="one") as impostor,
            pytest.raises(InstanceIdInUseError),
        ):
            poll_until([impostor, static, other], lambda: False, "it is refused")
        static.close()
        with member(appliance, filled, filled, group_instance_id="one") as static:
            poll_until(
                [other, static], lambda: sorted(static.assignment()) == owned, "it has what it had"
            )
            assert told.calls == []
            assert len(other.assignment()) == 2


class Interrupt(BaseException):
    """Raised in a listener, as a signal's handler raises KeyboardInterrupt."""


def test_a_listener_that_a_signal_ends_is_called_once_more_before_anything_is_read(
    appliance: EmbeddedAppliance, filled: str, keys: list[TopicPartition]
) -> None:
    """Its seeks were lost: the records before them were delivered, or those behind were not."""
    ended: list[str] = []

    def seek_at_the_second_call(kind: str, partitions: list[TopicPartition]) -> None:
        if kind not in ended:
            ended.append(kind)
            raise Interrupt
        if kind == "assigned":
            for key in partitions:
                first.seek(key, 90)

    told = Remembers(seek_at_the_second_call)
    first, second = member(appliance, filled), member(appliance, filled, filled)
    read = list[Record]()

    def read_with_signals() -> list[Record]:
        try:
            return first.poll(10)
        except Interrupt:
            return []

    with first, second:
        first.subscribe([filled], listener=told)
        deadline = time.monotonic() + HANG_LIMIT_S
        while len(read) < 40:
            assert time.monotonic() < deadline
            read += read_with_signals()
        assert told.calls == [("assigned", keys)] * 2
        assert {record.offset for record in read} == set(range(90, 100))
        while len(second.assignment()) < 2 or len(first.assignment()) > 2:
            assert time.monotonic() < deadline
            read += read_with_signals()
            read += second.poll(10)
        assert told.calls[2:] == [("revoked", second.assignment())] * 2
    assert len(read) == 40, "what was delivered was committed, and is not read once more"
