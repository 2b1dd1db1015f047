"""The former files of a partition that has moved stay as long as something may need them. A
partition that cannot be opened in its new place goes back, if nothing can have been appended there.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.catalog.moved_partitions import MovedPartition, Stage
from appliance.catalog.rows import PartitionRow, Topic
from appliance.control.moves.failed_moves import FAILED_SHOWN_NS
from appliance.control.moves.former_files import (
    KEPT_NS,
    LEASES_MAX_NS,
    WAITS_FOR_FILES,
    WAITS_FOR_TRANSACTIONS,
)
from appliance.control.moves.partition_moves import (
    ARRIVAL_MAX_NS,
    ARRIVING,
    PartitionMoves,
    closed_arrivals,
)
from shm.memory.layout import RegionKind, SlotState, TableLayout
from shm.tables.partition_table import PartitionState, PartitionTable
from tests.kit.memory import simulated

TOPIC_ID = b"t".ljust(16)
FORMER = PartitionRow(0, 0, 0, 0)
PRESENT = PartitionRow(0, 1, 1, 0)


class Arrived:
    """A partition that arrives, with a transaction that began at 4 in a log that ends at 10."""

    def __init__(self, stage: Stage = Stage.OPEN, shown: SlotState = SlotState.ONLINE) -> None:
        self.decided: list[str] = []
        self.table = PartitionTable(simulated(RegionKind.TABLE, TableLayout(16).size, 16))
        self.left: list[PartitionRow] = []
        self.left_versions: list[int] = []
        self.leases = {"reader"}
        self.topics = {"t": Topic(TOPIC_ID, "t", "active", 1, False, 0, b"", {}, (PRESENT,), 0)}
        self.show(FORMER.slot, end=10, stable=4)
        self.show(PRESENT.slot, end=10, stable=4, shown=shown)
        publisher: Any = SimpleNamespace(
            placement=SimpleNamespace(
                known_dir_index=lambda row: row.data_dir,
                dir_index=lambda row: row.data_dir,
                assign=lambda _: None,
                release_place=lambda _: None,
                former_worker_of=lambda *_: 0,
            ),
            table=lambda _: self.table,
            have_readers_caught_up=lambda: True,
            publish_left=self.publish_left,
            departing={},
            to=lambda *_: None,
        )
        self.publisher = publisher
        moved = MovedPartition(TOPIC_ID, 0, "t", FORMER.data_dir, FORMER.slot, stage)
        rows: Any = SimpleNamespace(
            all=lambda: [moved],
            open=lambda topic, _: self.decide("open", topic),
            go_back=lambda topic, _, place: self.decide("go back", topic, place),
        )
        leases: Any = SimpleNamespace(names_of=lambda *_: set(self.leases), feed=lambda *_: None)
        host_view: Any = SimpleNamespace(dir_paths=lambda: ["first", "second"])
        catalog: Any = SimpleNamespace(afterwards=lambda done, _: done(), together=nullcontext)
        changes: Any = SimpleNamespace(carry_out=lambda _, topic: self.topics.update(t=topic))
        publisher.departing.update(closed_arrivals(rows))
        self.moves = PartitionMoves(
            catalog, rows, self.topics, publisher, changes, leases, host_view, 0
        )
        self.moves.step(1)

    def publish_left(self, topic: Topic, row: PartitionRow, _worker: int) -> None:
        self.left.append(row)
        self.left_versions.append(topic.version)

    def decide(self, decision: str, topic: Topic, place: PartitionRow = PRESENT) -> Topic:
        """Decide a change in the catalog, which the flushers have carried out at once."""
        self.decided.append(decision)
        return topic._replace(version=topic.version + 1, partitions=(place,))

    def show(
        self, slot: int, *, end: int, stable: int, shown: SlotState = SlotState.ONLINE
    ) -> None:
        """Set the state that the partition's flusher shows."""
        state = PartitionState.empty(TOPIC_ID, 0, shown, 1)
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
    assert arrived.left_versions == [2], "its flusher has version 1, and ignores what is before it"


def test_the_former_place_is_fed_to_its_worker_until_its_end_is_sent() -> None:
    arrived = Arrived()
    arrived.leases.clear()
    places = arrived.publisher.former_places
    assert [(topic.name, row) for topic, row, _worker in places()] == [("t", FORMER)]
    arrived.show(PRESENT.slot, end=10, stable=10)
    arrived.moves.step(2 * KEPT_NS)
    assert arrived.left == [FORMER]
    assert not places()


def test_a_partition_takes_batches_in_its_new_place_when_the_catalog_says_so() -> None:
    arrived = Arrived(Stage.LEFT)
    assert arrived.decided == ["open"]
    assert not arrived.publisher.departing, "it is closed no more"
    arrived.show(PRESENT.slot, end=10, stable=10)
    arrived.leases.clear()
    arrived.moves.step(2)
    arrived.show(PRESENT.slot, end=10, stable=10, shown=SlotState.UNREADABLE)
    arrived.moves.step(2 + ARRIVAL_MAX_NS)
    assert arrived.decided == ["open"], "it may have records there: it does not go back"


@pytest.mark.parametrize("shown", [SlotState.UNREADABLE, SlotState.FREE])
def test_a_partition_that_is_not_open_in_its_new_place_goes_back(shown: SlotState) -> None:
    """Its disk fails (the flusher shows it unreadable), or stands still (nothing is shown)."""
    arrived = Arrived(Stage.LEFT, shown)
    if shown is SlotState.FREE:
        arrived.moves.step(ARRIVAL_MAX_NS)
        assert not arrived.decided
        assert list(arrived.publisher.departing.values()) == [ARRIVING]
        arrived.moves.step(ARRIVAL_MAX_NS + 1)
    assert arrived.decided == ["go back"]
    assert not arrived.publisher.departing
    failed, moving = arrived.moves.described()
    assert (failed["state"], failed["from"], failed["to"]) == ("failed", "first", "second")
    assert moving["from"] == "second"
    arrived.leases.clear()
    arrived.moves.step(ARRIVAL_MAX_NS + 2)
    arrived.moves.step(ARRIVAL_MAX_NS + 2 + 2 * KEPT_NS)
    assert arrived.left == [PRESENT], "what is in the other directory is removed"
    arrived.moves.step(ARRIVAL_MAX_NS + 2 + 3 * KEPT_NS)
    arrived.moves.step(ARRIVAL_MAX_NS + 2 + 4 * KEPT_NS)
    assert len(arrived.left) > 1
    assert arrived.moves.described()[1]["reason"] == WAITS_FOR_FILES


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_move_that_failed_is_described_for_a_day_or_until_its_topic_is_deleted(
    is_deleted: bool,
) -> None:
    arrived = Arrived(Stage.LEFT, SlotState.UNREADABLE)
    arrived.moves.step(FAILED_SHOWN_NS)
    assert next(row["state"] for row in arrived.moves.described()) == "failed"
    if is_deleted:
        arrived.topics.clear()
    else:
        arrived.moves.step(FAILED_SHOWN_NS + 1)
    assert "failed" not in [row["state"] for row in arrived.moves.described()]


def test_a_partition_whose_former_directory_is_not_configured_does_not_go_back() -> None:
    arrived = Arrived(Stage.LEFT, SlotState.FREE)
    arrived.publisher.placement.known_dir_index = lambda row: row.data_dir or None
    arrived.moves.step(2 * ARRIVAL_MAX_NS)
    assert not arrived.decided
