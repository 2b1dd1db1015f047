"""A signal's handler that raises at points of a queue's calls, over a real appliance: the program
goes on with the same consumer and has each record once, with its first delivery.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tailrace import Admin, ShareConsumer
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.share.record import ShareRecord
from tests.conformance.interrupts import at, points
from tests.kit.members.queues import make, share

COUNT = 30
STEP = int(os.environ.get("INTERRUPT_STEP", "131"))
"""Each 131st point: each takes a group of its own. INTERRUPT_STEP=1 takes them all."""
Seen = list[ShareRecord]
Call = Callable[[ShareConsumer, Seen], None]


def _poll(consumer: ShareConsumer, seen: Seen) -> None:
    seen += consumer.poll(10_000, 4)


def _loop(consumer: ShareConsumer, seen: Seen) -> None:
    for record in consumer:
        seen.append(record)
        if len(seen) >= 12:
            break


def _commit(consumer: ShareConsumer, seen: Seen) -> None:
    consumer.commit()


def _poll_twice_and_commit(consumer: ShareConsumer, seen: Seen) -> None:
    seen += consumer.poll(10_000, 3)
    seen += consumer.poll(10_000, 3)
    consumer.commit()


# What a generator is interrupted by while it is closed is not raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "call", [_poll, _loop, _commit, _poll_twice_and_commit], ids=lambda call: call.__name__[1:]
)
def test_a_signal_at_any_point_of_a_queues_call_costs_no_record_and_no_delivery(
    appliance: EmbeddedAppliance, topic: str, call: Call
) -> None:
    make(appliance, topic, COUNT)
    for number, point in enumerate(points(step=STEP)):
        seen: Seen = []
        with share(appliance, topic, f"g{number}") as consumer:
            seen += consumer.poll(10_000, 5)
            with at(point) as interruption:
                call(consumer, seen)
            for _ in range(200):
                if len(seen) >= COUNT:
                    break
                seen += consumer.poll(500, 7)
            consumer.commit()
        where = f"point {point}: {interruption.where}"
        assert [record.offset for record in seen] == list(range(COUNT)), where
        assert {record.delivery_count for record in seen} == {1}, where
        assert _lag(appliance, f"g{number}-{topic}") == 0, where
        if not interruption.was_made:
            return


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_at_any_point_of_a_close_loses_no_record_and_counts_no_delivery_that_was_none(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, COUNT)
    for number, point in enumerate(points(step=STEP)):
        consumer = share(appliance, topic, f"g{number}", share_acknowledgement_mode="explicit")
        seen = consumer.poll(10_000, 5)
        for record in seen[:3]:
            consumer.acknowledge(record)
        with at(point) as interruption:
            consumer.close()
        consumer.close()
        given = {record.offset for record in seen}
        rest: Seen = []
        with share(appliance, topic, f"g{number}") as other:
            for _ in range(200):
                if {record.offset for record in rest} | given == set(range(COUNT)):
                    break
                rest += other.poll(500, 50)
        where = f"point {point}: {interruption.where}"
        assert {record.offset for record in rest} | given == set(range(COUNT)), where
        for record in rest:
            assert record.delivery_count == (2 if record.offset in given else 1), where
        if not interruption.was_made:
            return


@pytest.mark.parametrize("ends", [ShareConsumer.close, ShareConsumer.unsubscribe])
def test_the_end_behind_an_interrupted_call_waits_for_the_connection_and_releases_what_was_not_read(
    appliance: EmbeddedAppliance, topic: str, ends: Callable[[ShareConsumer], None]
) -> None:
    """An interrupted use of the socket gives it up. `close` released nothing then, so that the
    records came a second later as delivered; `unsubscribe` did not leave the group.
    """
    make(appliance, topic, COUNT)
    consumer = share(appliance, topic, "g")
    seen = consumer.poll(10_000, 5)
    while not consumer._poll_loop.requests.is_busy:
        consumer._poll_loop.run_once(COUNT)
        if consumer._poll_loop.fetch_loop.has_ranges:  # it has enough for now
            consumer._poll_loop._begin(COUNT)
    consumer._connection._is_torn = True  # as a signal leaves it
    consumer._connection.process()
    assert not consumer._connection.is_ready
    ends(consumer)
    with Admin(appliance.address) as admin:
        assert not admin.describe_groups(f"g-{topic}")[f"g-{topic}"]["members"]
    rest: dict[int, int] = {}
    with share(appliance, topic, "g") as successor:
        while len(rest) < COUNT:
            rest |= {record.offset: record.delivery_count for record in successor.poll(500, 50)}
    consumer.close()
    given = {record.offset for record in seen}
    assert rest == {offset: 2 if offset in given else 1 for offset in range(COUNT)}


def _lag(appliance: EmbeddedAppliance, group: str) -> int:
    with Admin(appliance.address) as admin:
        return sum(p["lag"] for p in admin.describe_groups(group)[group]["partitions"])
