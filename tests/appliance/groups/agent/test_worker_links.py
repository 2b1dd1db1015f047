"""The lanes between the transaction coordinator and the workers: feeds, full lanes, workers that
appear later, and damaged reports.
"""

from __future__ import annotations

import struct

import pytest

from appliance.groups.agent import worker_link as module
from appliance.groups.agent.worker_link import GONE_NS
from shm.memory.layout import ProcessWord
from shm.messages.lane_messages import LaneKind
from shm.messages.transaction_messages import (
    Decision,
    RegisteredProducer,
    Settled,
    decode_decisions,
    encode_decisions,
    encode_settled,
)
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS
from tests.appliance.groups.agent.worker_lanes import Lanes


@pytest.fixture
def lanes() -> Lanes:
    return Lanes()


def fed(generation: int, *payloads: bytes) -> list[tuple[LaneKind, int, bytes]]:
    return [
        (LaneKind.TRANSACTIONS_FEED, 0, b""),
        *((LaneKind.DECISIONS, 0, one) for one in payloads),
        (LaneKind.TRANSACTIONS_FED, generation, b""),
    ]


def test_nothing_is_sent_before_the_feed_and_everything_behind_it(lanes: Lanes) -> None:
    lanes.links.send([b"early"])
    lanes.links.attach(0)
    lanes.links.send([b"early"])
    lanes.links.flush()
    assert lanes.read() == []
    assert lanes.links.is_feed_due()
    lanes.links.feed([b"a", b"b"])
    lanes.links.send([b"c"])
    lanes.links.flush()
    assert lanes.read() == [*fed(1, b"a", b"b"), (LaneKind.DECISIONS, 0, b"c")]
    assert not lanes.links.is_feed_due()


def test_a_new_process_of_a_worker_is_fed_once(lanes: Lanes) -> None:
    lanes.links.attach(0)
    lanes.links.feed([])
    lanes.say(LaneKind.TRANSACTIONS_CONNECTED, generation=1)
    (link, _) = lanes.links
    assert list(link.reports()) == []
    assert not lanes.links.is_feed_due(), "the feed was for this process"
    lanes.start(0, 2)
    lanes.say(LaneKind.TRANSACTIONS_CONNECTED, generation=2)
    assert list(link.reports()) == []
    assert lanes.links.is_feed_due()
    lanes.links.feed([b"x"])
    lanes.links.flush()
    assert lanes.read()[-3:] == fed(2, b"x")


def test_a_dedicated_worker_that_appears_later_is_fed_and_then_waited_for(lanes: Lanes) -> None:
    lanes.links.attach(0)
    lanes.links.feed([])
    zero, one = lanes.links
    zero.settle(encode_settled(Settled(9)))
    assert lanes.links.settled_through() == 9
    lanes.slots[1].store(ProcessWord.DEDICATED_TO, 3)
    assert lanes.links.attach(0), "another worker exists"
    assert lanes.links.settled_through() == 0
    assert lanes.links.pending_on(9) == ["worker-1"]
    lanes.start(1, 1)
    lanes.links.attach(0)
    lanes.links.feed([b"x"])
    lanes.links.flush()
    assert lanes.read(1) == fed(1, b"x")
    one.settle(encode_settled(Settled(9, (4,))))
    assert lanes.links.settled_through() == 9
    assert list(lanes.links.unfinished()) == [4]
    assert lanes.links.pending_on(4) == ["worker-1"]


def test_a_dedicated_worker_that_ended_is_waited_for_while_its_partitions_move(
    lanes: Lanes,
) -> None:
    lanes.slots[1].store(ProcessWord.DEDICATED_TO, 3)
    lanes.start(1, 1)
    lanes.links.attach(0)
    lanes.slots[1].store(ProcessWord.DEDICATED_TO, 0)
    lanes.slots[1].store(ProcessWord.LIVE, 0)
    lanes.links.attach(1)
    assert lanes.links.pending_on(1) == ["worker-0", "worker-1"]
    lanes.links.attach(1 + GONE_NS)
    assert lanes.links.pending_on(1) == ["worker-0"]


def test_a_worker_that_reads_nothing_is_fed_when_its_lane_is_empty(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEED_AT", 10)
    lanes.links.attach(0)
    lanes.links.feed([])
    for number in range(200):
        lanes.links.send([struct.pack("<Q", number)])
        lanes.links.flush()
    assert not lanes.links.is_feed_due(), "its lane is full"
    assert lanes.links.has_unsent
    read = [payload for kind, _, payload in lanes.read() if kind is LaneKind.DECISIONS]
    assert read == [struct.pack("<Q", number) for number in range(len(read))]
    assert lanes.links.is_feed_due()
    lanes.links.feed([b"all"])
    lanes.links.flush()
    assert lanes.read() == fed(1, b"all")


def test_a_registration_behind_a_full_lane_is_not_settled(lanes: Lanes) -> None:
    """The answer of an init waits for this: its decision may lie in the outbox for long."""
    lanes.links.attach(0)
    lanes.links.feed([])
    lanes.links.flush()
    (link, _) = lanes.links
    last = 400
    for ordinal in range(1, last + 1):
        registered = (RegisteredProducer(TRANSACTIONAL_PRODUCER_IDS + ordinal, 0),)
        lanes.links.send([encode_decisions([Decision(ordinal, ordinal, (), registered)])])
    lanes.links.flush()
    assert lanes.links.has_unsent, "the lane is full"
    read = 0
    while read < last:
        for kind, _, payload in lanes.read():
            if kind is LaneKind.DECISIONS:
                read = decode_decisions(payload)[-1].ordinal
        lanes.say(LaneKind.SETTLED, payload=encode_settled(Settled(read)))
        for report in link.reports():
            link.settle(report.payload)
        assert lanes.links.settled_through() == read
        assert lanes.links.pending_on(last) == (["worker-0"] if read < last else [])
        lanes.links.flush()


def test_lanes_are_requested_once(lanes: Lanes) -> None:
    lanes.links.request()
    lanes.links.request()
    assert lanes.requests == 1
