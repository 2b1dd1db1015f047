"""Acceptance by a share consumer: nothing that was not handed out, nothing that was said to be
left, and nothing in silence when its locks are gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tailrace import Admin, InvalidRecordError, InvalidRequestError, LockLostError, StorageError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.share.acquired.fetch_loop import Found, ShareFetchLoop
from tests.kit.members.queues import LONG_MS, make, poll_until, share, start_offset, take
from tests.kit.processes import kill_and_wait_for_successor


def test_a_loop_that_is_left_early_loses_nothing_of_what_it_did_not_take(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 20)
    seen: Counter[int] = Counter()
    with share(appliance, topic) as consumer:
        for _ in range(20):
            if len(seen) == 20:
                break
            for record in consumer:
                seen[record.offset] += 1
                assert record.delivery_count == 1
                if len(seen) % 3 == 0 or len(seen) == 20:
                    break
            if len(seen) in (3, 10):
                seen.update(record.offset for record in consumer.poll(LONG_MS, 1))
        consumer.commit()
    assert seen == dict.fromkeys(range(20), 1)
    assert start_offset(appliance, f"g-{topic}") == 20


def test_a_poll_that_raises_hands_out_later_what_it_has_read(
    appliance: EmbeddedAppliance, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(appliance, topic, 5)
    pieces = ShareFetchLoop.pieces
    failures: list[bool] = []

    def failing(fetch_loop: ShareFetchLoop, limit: int) -> Iterator[Found]:
        """Records that have come of one partition, then the error of another one."""
        for piece in pieces(fetch_loop, limit):
            yield piece
            if not failures:
                failures.append(True)
                raise StorageError("the disk of another partition")

    monkeypatch.setattr(ShareFetchLoop, "pieces", failing)
    with share(appliance, topic) as consumer:
        found: list[int] = []
        raised = 0
        for _ in range(600):
            if len(found) == 5 and raised:
                break
            try:
                found += [record.offset for record in consumer.poll(100)]
            except StorageError:
                raised += 1
        assert found == [0, 1, 2, 3, 4]
        assert raised == 1
        consumer.commit()
    assert start_offset(appliance, f"g-{topic}") == 5


def test_what_is_left_or_renewed_is_not_accepted_by_a_later_poll_of_which_nothing_is_said(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 6)
    with share(appliance, topic) as consumer:
        accepted, left, renewed = take(consumer, 3)
        consumer.acknowledge(accepted)
        consumer.acknowledge(renewed, "renew")
        assert [record.offset for record in consumer.poll(LONG_MS, 3)] == [3, 4, 5]
        assert consumer.poll(0) == []  # accepts those three, of which nothing was said
        consumer.commit()
        assert start_offset(appliance, f"g-{topic}") == 1
        consumer.acknowledge(left)
        consumer.acknowledge(renewed)
        consumer.commit()
    assert start_offset(appliance, f"g-{topic}") == 6


def test_a_commit_says_so_when_the_membership_was_lost_before_it(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 4)
    with (
        share(appliance, topic, session_timeout_ms=1_000, heartbeat_interval_ms=300) as consumer,
        share(appliance, topic) as other,
    ):
        mine = take(consumer, 4)
        for record in mine[:3]:
            consumer.acknowledge(record)
        # Its heartbeats end, as those of a program that stood still.
        consumer._poll_loop.member.thread.stop()
        again = poll_until(other, lambda found: len(found) == 4)
        assert {record.delivery_count for record in again} == {2}
        with pytest.raises(LockLostError, match="offsets 0 to 2") as caught:
            consumer.commit()
        assert caught.value.refused == [(topic, 0, 0, 2)]
        other.commit()
    assert start_offset(appliance, f"g-{topic}") == 4


PROGRAM = """
import sys, tailrace
consumer = tailrace.ShareConsumer(sys.argv[2], bootstrap=sys.argv[1], group_id="g-" + sys.argv[2], session_timeout_ms=1000, heartbeat_interval_ms=300)
records = []
while len(records) < 4:
    records += consumer.poll(60_000, 4 - len(records))
for record in records[:3]:
    consumer.acknowledge(record)
print("has them", flush=True)
sys.stdin.readline()
import time
while not consumer._poll_loop.member.membership.has_events:
    time.sleep(0.01)
try:
    consumer.commit()
    print("committed", flush=True)
except tailrace.LockLostError as error:
    print(error.refused, flush=True)
"""  # noqa: E501


def test_a_program_that_stood_still_is_told_what_it_lost(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 4)
    with share(appliance, topic):
        pass  # the group begins at the beginning
    command = [sys.executable, "-P", "-c", PROGRAM, appliance.address, topic]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as program:
        assert program.stdout is not None
        assert program.stdin is not None
        assert program.stdout.readline() == b"has them\n"
        program.send_signal(signal.SIGSTOP)
        with share(appliance, topic) as other:
            poll_until(other, lambda found: len(found) == 4)
        program.send_signal(signal.SIGCONT)
        program.stdin.write(b"\n")
        program.stdin.flush()
        assert program.stdout.readline().decode() == f"[('{topic}', 0, 0, 2)]\n"


def test_a_killed_front_costs_no_lock(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 4)
    with share(appliance, topic) as consumer:
        records = take(consumer, 4)
        kill_and_wait_for_successor(appliance, "tr-front-0")
        for record in records:
            consumer.acknowledge(record)
        consumer.commit()
        assert consumer.metrics()["acknowledgements_refused"] == 0
    assert start_offset(appliance, f"g-{topic}") == 4


def test_a_failing_deserializer_does_not_accept_what_stands_behind_it(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 4)
    failures = iter([ValueError("as the second"), ValueError("as the first")])

    def sometimes(value: bytes) -> int:
        if value == b"1" and (error := next(failures, None)) is not None:
            raise error
        return int(value)

    with share(appliance, topic, value_deserializer=sometimes) as consumer:
        assert [record.value for record in consumer.poll(LONG_MS)] == [0]
        with pytest.raises(InvalidRecordError):
            consumer.poll(LONG_MS)
        found = poll_until(consumer, lambda found: len(found) == 3)
        assert sorted((record.value, record.delivery_count) for record in found) == [
            (1, 2),
            (2, 1),
            (3, 1),
        ]


def test_a_topic_made_anew_is_a_queue_of_its_own(appliance: EmbeddedAppliance, topic: str) -> None:
    """Old records, acknowledged late, accept nothing of the new topic."""

    make(appliance, topic, 3)
    with (
        share(appliance, topic, share_acknowledgement_mode="explicit") as consumer,
        Admin(appliance.address) as admin,
    ):
        old = take(consumer, 3)
        consumer.acknowledge(old[0])
        admin.delete_topics(topic)
        make(appliance, topic, 2)
        new = poll_until(consumer, lambda found: len(found) == 2)
        assert [(record.offset, record.delivery_count) for record in new] == [(0, 1), (1, 1)]
        with pytest.raises(LockLostError):
            consumer.commit()
        with pytest.raises(InvalidRequestError, match="of a topic that was deleted"):
            consumer.acknowledge(old[2])
        consumer.acknowledge(new[0])
        consumer.acknowledge(new[1])
        consumer.commit()
    assert start_offset(appliance, f"g-{topic}") == 2
