"""Messages of workers and controller to the transaction coordinator."""

from __future__ import annotations

from appliance.groups.agent.transaction_lanes import TransactionLanes
from shm.memory.layout import ControlLayout, ProcessWord, RegionKind, Role
from shm.messages.lane_messages import LaneKind
from shm.messages.transaction_messages import (
    ProducerEpoch,
    Settled,
    encode_epochs,
    encode_settled,
)
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.control import Control
from tailrace.format.record_batch.batch_header import TRANSACTIONAL_PRODUCER_IDS
from tests.appliance.groups.agent.worker_lanes import Lanes
from tests.kit.memory import simulated


class Reports:
    """A coordinator that records what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def opened(self, epochs: list[ProducerEpoch], now_ns: int) -> None:
        self.calls.append(("opened", *epochs))

    def asked(self, worker: int, epochs: list[ProducerEpoch], now_ns: int) -> None:
        self.calls.append(("asked", worker, *epochs))

    def workers_changed(self) -> None:
        self.calls.append(("changed",))


def test_reports_reach_the_coordinator_and_damaged_ones_affect_nothing_else() -> None:
    lanes, reports = Lanes(), Reports()
    slot = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0)).process(Role.GROUPS, 0)
    served = TransactionLanes(lanes.links, 3, CountedErrorHandler(slot))
    assert served.read(0) == 0
    served.serve(reports)  # type: ignore[arg-type]
    key = ProducerEpoch(TRANSACTIONAL_PRODUCER_IDS + 1, 4)
    served.read(0)
    lanes.say(LaneKind.OPENED, payload=encode_epochs([key]))
    lanes.say(LaneKind.SETTLED, payload=b"12345")
    lanes.say(LaneKind.ASK_OUTCOME, payload=b"123")
    lanes.say(LaneKind.ASK_OUTCOME, payload=encode_epochs([key]))
    lanes.say(LaneKind.SETTLED, payload=encode_settled(Settled(7)))
    reports.calls.clear()
    assert served.read(0) == 5
    assert reports.calls == [("opened", key), ("asked", 0, key), ("changed",)]
    assert slot.load(ProcessWord.INTERNAL_ERRORS) == 2
    assert lanes.links.settled_through() == 7


def test_producer_ids_of_another_generation_are_not_used() -> None:
    lanes = Lanes()
    slot = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0)).process(Role.GROUPS, 0)
    served = TransactionLanes(lanes.links, 3, CountedErrorHandler(slot))
    served.take_producer_ids(TRANSACTIONAL_PRODUCER_IDS + (5 << 32), 2)
    assert not served.numbers.has_block
    served.take_producer_ids(TRANSACTIONAL_PRODUCER_IDS + (5 << 32), 3)
    assert served.numbers.new_producer_id() == TRANSACTIONAL_PRODUCER_IDS + (5 << 32)
    assert served.numbers.new_ordinal() == (5 << 32) + 1
