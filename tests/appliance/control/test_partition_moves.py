"""The former files of a partition that has moved stay as long as something may need them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from appliance.catalog.moved_partitions import MovedPartition
from appliance.catalog.rows import PartitionRow, Topic
from appliance.control.partition_moves import (
    KEPT_NS,
    LEASES_MAX_NS,
    WAITS_FOR_TRANSACTIONS,
    PartitionMoves,
)
from shm.memory.layout import RegionKind, SlotState, TableLayout
from shm.tables.partition_table import PartitionState, PartitionTable
from tests.kit.memory import simulated

TOPIC_ID = b"t".ljust(16)
FORMER = PartitionRow(0, 0, 0, 0)
PRESENT = PartitionRow(0, 1, 1, 0)


class Arrived:
    """A partition that arrives, with a transaction that began at 4 in a log that ends at 10."""

    def __init__(self) -> None:
        self.table = PartitionTable(simulated(RegionKind.TABLE, TableLayout(16).size, 16))
        self.left: list[PartitionRow] = []
        self.leases = {"reader"}
        self.topics = {"t": Topic(TOPIC_ID, "t", "active", 1, False, 0, b"", {}, (PRESENT,), 0)}
        self.show(FORMER.slot, end=10, stable=4)
        self.show(PRESENT.slot, end=10, stable=4)
        publisher: Any = SimpleNamespace(
            placement=SimpleNamespace(known_dir_index=lambda row: row.data_dir),
            table=lambda _: self.table,
            have_readers_caught_up=lambda: True,
            publish_left=lambda _, row: self.left.append(row),
        )
        self.publisher = publisher
        moved = MovedPartition(TOPIC_ID, 0, "t", FORMER.data_dir, FORMER.slot, True)
        rows: Any = SimpleNamespace(all=lambda: [moved])
        leases: Any = SimpleNamespace(names_of=lambda *_: set(self.leases))
        unused: Any = None
        host_view: Any = SimpleNamespace(dir_paths=lambda: ["first", "second"])
        self.moves = PartitionMoves(
            unused, rows, self.topics, publisher, unused, leases, host_view, 0
        )
        self.moves.step(1)

    def show(self, slot: int, *, end: int, stable: int) -> None:
        """What the partition's flusher shows."""
        state = PartitionState.empty(TOPIC_ID, 0, SlotState.ONLINE, 1)
        self.table.write(
            slot, state._replace(high_watermark=end, log_end_offset=end, last_stable_offset=stable)
        )


def test_the_former_files_stay_for_the_leases_of_the_arrival_and_not_for_later_ones() -> None:
    arrived = Arrived()
    arrived.show(PRESENT.slot, end=10, stable=10)
    arrived.leases = {"reader", "later"}
    arrived.moves.step(3 * KEPT_NS)
    assert not arrived.left
    arrived.leases = {"later"}
    arrived.moves.step(4 * KEPT_NS)
    assert arrived.left == [FORMER]


def test_the_former_slot_stays_until_transactions_of_the_move_have_ended() -> None:
    """Its end has the coordinator forget decisions that the new worker may not have: it may be
    down.
    """
    arrived = Arrived()
    arrived.leases.clear()
    arrived.moves.step(3 * KEPT_NS)
    arrived.show(PRESENT.slot, end=20, stable=9)
    arrived.moves.step(4 * KEPT_NS)
    assert not arrived.left
    arrived.show(PRESENT.slot, end=20, stable=11)  # a later transaction is open
    arrived.moves.step(5 * KEPT_NS)
    assert arrived.left == [FORMER]


def test_the_former_slot_waits_for_transactions_without_end_and_not_for_a_deleted_topic() -> None:
    arrived = Arrived()
    arrived.moves.step(2 * LEASES_MAX_NS)
    assert not arrived.left
    assert arrived.moves.described()[0]["reason"] == WAITS_FOR_TRANSACTIONS
    arrived.show(PRESENT.slot, end=20, stable=20)
    arrived.moves.step(2 * LEASES_MAX_NS + KEPT_NS)
    assert arrived.left == [FORMER], "a lease does not keep it for ever"
    arrived = Arrived()
    arrived.leases.clear()
    del arrived.topics["t"]
    arrived.moves.step(2 * KEPT_NS)
    assert arrived.left == [FORMER]


def test_the_former_place_is_fed_to_its_worker_until_its_end_is_sent() -> None:
    arrived = Arrived()
    arrived.leases.clear()
    places = arrived.publisher.former_places
    assert [(topic.name, row) for topic, row in places()] == [("t", FORMER)]
    arrived.show(PRESENT.slot, end=10, stable=10)
    arrived.moves.step(2 * KEPT_NS)
    assert arrived.left == [FORMER]
    assert not places()
