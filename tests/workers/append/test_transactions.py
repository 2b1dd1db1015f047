"""Transactions at the worker, under a coordinator that the test plays: which batches are taken,
which markers are written, and what is reported.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest

from shm.memory.layout import (
    FLAG_BYTES,
    FLAG_TRANSACTIONAL,
    SOURCE_GROUPS,
    ProcessWord,
    Role,
    Verdict,
)
from shm.messages.lane_messages import LaneKind
from shm.messages.transaction_messages import Decision, RegisteredProducer
from shm.tables.control import Control
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_TRANSACTIONAL,
    OFFSET_ATTRIBUTES,
    OFFSET_VERSION,
    header_position,
)
from tailrace.format.record_batch.control_batch import MarkerTemplate
from tests.kit.batches import SEED, make_batch, reseal
from tests.kit.log_files.logs import Bench, assignment, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from tests.kit.stepped.coordinator import (
    ABORT,
    COMMIT,
    FENCED,
    NOT_YET,
    PID,
    SEALED,
    Coordinator,
    ends_of,
    log_of,
    make_bench,
    results,
    transactional,
)
from workers.append import coordinator_reports
from workers.append.coordinator_reports import OPENED_AFTER_NS
from workers.append.decision_progress import SETTLED_AFTER_NS
from workers.append.transactions import RETRY_NS
from workers.flush.flusher_settings import FlusherSettings
from workers.log.producers import producer_state


@pytest.fixture
def it() -> Bench:
    return make_bench(3)


@pytest.fixture
def coordinator(it: Bench) -> Coordinator:
    """Connected, and the transactional id 1 is registered with epoch 0."""
    made = Coordinator(it)
    made.decide(1, [], [(PID, 0)])
    made.feed()
    made.settle()
    return made


# ---- which batches are taken ---------------------------------------------------------------------


def test_no_batch_of_a_transaction_is_taken_before_there_is_a_coordinator(it: Bench) -> None:
    assert results(it, transactional()) == [NOT_YET]
    assert ends_of(it) == []


def test_no_batch_of_a_transaction_is_taken_before_the_feed_of_this_generation_and_others_go_on(
    it: Bench,
) -> None:
    coordinator = Coordinator(it)
    coordinator.decide(1, [], [(PID, 0)], is_sent=False)
    assert results(it, transactional(), make_batch(2)) == [NOT_YET, 0]
    coordinator.feed(generation=coordinator.generation + 7)
    assert results(it, transactional(), make_batch(2)) == [NOT_YET, 0]
    coordinator.feed()
    assert results(it, transactional(), make_batch(2)) == [0, 0]
    coordinator.read()
    assert coordinator.connected == [coordinator.generation]


@pytest.mark.parametrize(
    ("registered", "epoch", "expected"),
    [
        ([], 3, FENCED),
        ([(PID + 1, 3)], 3, FENCED),
        ([(PID, 4)], 3, FENCED),
        ([(PID, 32_767)], -1, FENCED),
        ([(PID, 3, SEALED)], 3, FENCED),
        ([(PID, 2)], 3, NOT_YET),
        ([(PID, 2, SEALED)], 3, NOT_YET),
        ([(PID, 3)], 3, 0),
        ([(PID + 1, 0), (PID, 3)], 3, 0),
        ([(PID, 32_767)], 32_767, 0),
    ],
)
def test_what_is_registered_decides(
    it: Bench, registered: list[Any], epoch: int, expected: int
) -> None:
    coordinator = Coordinator(it)
    coordinator.decide(1, [], registered)
    coordinator.feed()
    assert results(it, transactional(PID, epoch)) == [expected]


def test_a_batch_waits_while_another_epoch_of_its_producer_is_open_in_its_partition_only(
    it: Bench, coordinator: Coordinator
) -> None:
    """The second guard: the coordinator has registered an epoch without the end of the one
    before. The worker asks for it.
    """
    assert results(it, transactional()) == [0]
    coordinator.decide(1, [], [(PID, 1)])
    assert results(it, transactional(epoch=1)) == [NOT_YET]
    assert results(it, transactional(epoch=1, partition=1), slot=1) == [0]
    coordinator.read()
    assert coordinator.asked == [(PID, 0)]
    coordinator.answer((PID, 0, ABORT))
    assert results(it, transactional(epoch=1)) == [0]
    assert ends_of(it) == [(0, 0, 2)]


def test_sequences_begin_at_0_with_each_epoch_and_are_checked_within_it(
    it: Bench, coordinator: Coordinator
) -> None:
    first, second = transactional(), transactional(sequence=2)
    assert results(it, transactional(sequence=2)) == [ErrorCode.UNKNOWN_SEQUENCE]
    assert results(it, first, second, first, transactional(sequence=6)) == [
        0, 0, 0, ErrorCode.OUT_OF_ORDER_SEQUENCE,
    ]  # fmt: skip
    assert it.table.read(0).high_watermark == 4
    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    assert results(it, transactional(epoch=1, sequence=4)) == [ErrorCode.UNKNOWN_SEQUENCE]
    assert results(it, transactional(epoch=1)) == [0]
    assert results(it, second) == [FENCED], "a late one of the epoch that has ended"


def test_a_decision_that_arrives_within_the_step_is_read_before_a_batch_is_refused(
    it: Bench, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results(it, transactional()) == [0]
    it.send(transactional(epoch=1))
    take = it.worker._appender.append
    late = [True]

    def produce(source: int, message: Any) -> bool:
        if late.pop() if late else False:
            coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
        return take(source, message)

    monkeypatch.setattr(it.worker._appender, "append", produce)
    it.settle()
    assert [result for result, _ in it.answers()][-2:] == [0, 0]
    assert ends_of(it) == [(0, 0, 1)]


def test_a_marker_precedes_the_next_epoch_although_both_wait_in_lanes(
    it: Bench, coordinator: Coordinator
) -> None:
    results(it, transactional())
    it.send(transactional(epoch=1))
    coordinator.decide(1, [(PID, 0, ABORT)], [(PID, 1)])
    it.settle()
    ring = [it.ring.descriptor(n) for n in range(it.ring.producer_position.load())]
    order = [
        (d.producer_epoch, d.control_type) for d in ring if d.is_transactional and not d.result
    ]
    assert order == [(0, 0), (0, 2), (1, 0)]


def _as_control(batch: bytearray) -> bytearray:
    with memoryview(batch) as view:
        at = header_position(view)
        old = struct.unpack_from("<I", view, at + OFFSET_ATTRIBUTES)[0]
        struct.pack_into("<I", view, at + OFFSET_ATTRIBUTES, old | ATTRIBUTE_CONTROL)
        struct.pack_into("<II", view, at + 24, 0, 0)
        struct.pack_into("<H", view, at + 70, 2)
    return reseal(batch)


def _with_attributes(batch: bytearray, attributes: int, version: int) -> bytearray:
    with memoryview(batch) as view:
        at = header_position(view)
        struct.pack_into("<I", view, at + OFFSET_ATTRIBUTES, attributes)
        struct.pack_into("<H", view, at + OFFSET_VERSION, version)
    return reseal(batch)


@pytest.mark.parametrize(
    ("forged", "code"),
    [
        (_with_attributes(transactional(sequence=2), 0, 1), ErrorCode.UNSAFE_BATCH),
        (
            _with_attributes(make_batch(2, producer_id=7), ATTRIBUTE_TRANSACTIONAL, 2),
            ErrorCode.UNSAFE_BATCH,
        ),
        (
            _with_attributes(make_batch(2), ATTRIBUTE_TRANSACTIONAL, 2),
            ErrorCode.UNSAFE_BATCH,
        ),
        (_as_control(transactional(sequence=2)), ErrorCode.UNSAFE_BATCH),
        (_as_control(make_batch(1)), ErrorCode.UNSAFE_BATCH),
        (_with_attributes(transactional(sequence=2), ATTRIBUTE_TRANSACTIONAL, 1), None),
        (_with_attributes(transactional(sequence=2), 0, 2), None),
        (transactional(PID, 1), ErrorCode.CONCURRENT_TRANSACTIONS),
        (transactional(PID + 1), ErrorCode.PRODUCER_FENCED),
        (transactional(PID, -1), ErrorCode.PRODUCER_FENCED),
        (transactional((1 << 63) - 1, 32_767), ErrorCode.PRODUCER_FENCED),
    ],
)
def test_a_forged_batch_is_refused_and_nothing_of_it_is_appended(
    it: Bench, coordinator: Coordinator, forged: bytearray, code: ErrorCode | None
) -> None:
    assert results(it, transactional()) == [0], "with a transaction open, to look like the next"
    before = it.table.read(0).log_end_offset
    assert results(it, forged) == [code or ErrorCode.UNSUPPORTED_BATCH]
    assert it.table.read(0).log_end_offset == before
    assert results(it, transactional(sequence=2)) == [0]


def test_a_delay_log_takes_batches_of_a_transaction() -> None:
    it = make_bench()
    it.assignments = [
        assignment(0, slot=0),
        assignment(0, slot=1, topic="d", topic_id=bytes(16)),
    ]
    object.__setattr__(it.assignments[1], "delay_of", it.assignments[0].topic_id.hex())
    it.kill_worker()
    it.kill_flusher()
    it.settle()
    coordinator = Coordinator(it)
    coordinator.decide(1, [], [(PID, 0)])
    coordinator.feed()
    from tailrace.format.record_batch.batch_header import checksum_seed

    batch = make_batch(1, producer_id=PID, seed=checksum_seed(bytes(16), 0))
    assert results(it, batch, slot=1) == [ErrorCode.OK]


# ---- decisions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [COMMIT, ABORT])
def test_a_decision_ends_the_transaction_where_it_is_open_and_is_reported_when_it_is_durable(
    it: Bench, coordinator: Coordinator, outcome: Any
) -> None:
    results(it, transactional())
    results(it, transactional(partition=2), slot=2)
    coordinator.read()
    assert coordinator.opened == [], "most have ended before it is due"
    coordinator.settle()
    assert coordinator.opened == [(PID, 0)], "once"
    ordinal = coordinator.decide(1, [(PID, 0, outcome)], [(PID, 1)])
    it.step_worker()
    coordinator.read()
    assert coordinator.settled.ordinal < ordinal, "the markers are in the ring only"
    coordinator.settle()
    assert coordinator.settled == (ordinal, ())
    assert coordinator.rows == {}
    assert [ends_of(it, n) for n in range(3)] == [[(0, 0, outcome)], [], [(0, 0, outcome)]]
    marker = it.ring.descriptor(it.ring.producer_position.load() - 1)
    assert marker.flags == FLAG_BYTES | FLAG_TRANSACTIONAL
    assert (marker.source_lane, marker.control_type) == (SOURCE_GROUPS, outcome)
    assert (marker.base_sequence, marker.last_offset_delta) == (-1, 0)
    assert it.ring.outcome(marker.ordinal - 1).verdict is Verdict.DURABLE
    known = it.worker._partitions[0].producers
    assert (len(known.transactions), known.producer_count, known.to_snapshot()) == (0, 0, [])


def test_a_repeated_decision_ends_nothing_more(it: Bench, coordinator: Coordinator) -> None:
    results(it, transactional())
    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    decision = coordinator.rows[coordinator.ordinal]
    coordinator.resend(decision, decision)
    it.settle()
    assert results(it, transactional(epoch=1)) == [0]
    coordinator.resend(decision)
    assert results(it, transactional(epoch=1, sequence=2)) == [0]
    coordinator.settle()
    assert ends_of(it) == [(0, 0, 1)], "KAFKA-17754: a repeated end ends the next transaction"


def test_a_decision_that_comes_late_registers_nothing_older(
    it: Bench, coordinator: Coordinator
) -> None:
    """Two producer ids of one transactional id: the first one's epochs were used up."""
    results(it, transactional())
    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 32_767)])
    late = coordinator.rows[coordinator.ordinal]
    coordinator.decide(1, [(PID, 32_767, ABORT)], [(PID + 5, 0)])
    assert results(it, transactional(PID + 5)) == [0]
    coordinator.resend(late)
    assert results(it, transactional(PID, 32_767)) == [FENCED]
    assert results(it, transactional(PID + 5, sequence=2)) == [0]
    assert ends_of(it) == [(0, 0, 1)]


def test_an_id_that_is_forgotten_is_fenced(it: Bench, coordinator: Coordinator) -> None:
    coordinator.decide(1, [], [])
    assert results(it, transactional()) == [FENCED]
    assert len(it.worker._transactions._producers) == 0  # type: ignore[union-attr]


def test_one_decision_over_many_producers_ends_each_as_it_says(
    it: Bench, coordinator: Coordinator
) -> None:
    coordinator.decide(2, [], [(PID + n, 4) for n in range(10, 14)])
    for n in range(10, 14):
        assert results(it, transactional(PID + n, 4)) == [0]
    coordinator.decide(
        2,
        [(PID + 10, 4, COMMIT), (PID + 11, 4, ABORT), (PID + 12, 4, COMMIT), (PID + 13, 3, COMMIT)],
        [(PID + n, 5) for n in range(10, 14)],
    )
    coordinator.settle()
    assert ends_of(it) == [(10, 4, 1), (11, 4, 2), (12, 4, 1)]
    assert results(it, transactional(PID + 13, 5)) == [NOT_YET]


def test_a_full_disk_refuses_batches_and_no_marker(it: Bench, coordinator: Coordinator) -> None:
    results(it, transactional())
    it.flusher_slot.store(ProcessWord.DISK_FULL, 1)
    coordinator.decide(1, [(PID, 0, ABORT)], [(PID, 1)])
    it.send(transactional(epoch=1))
    it.step_worker()
    ring = [it.ring.descriptor(n) for n in range(it.ring.producer_position.load())]
    assert (ring[-1].result, ring[-2].control_type) == (ErrorCode.DISK_FULL, 2)


def test_a_ring_that_is_full_delays_markers_and_each_is_written_once() -> None:
    it = make_bench(16, descriptors=8)
    coordinator = Coordinator(it)
    coordinator.decide(1, [], [(PID, 0)])
    coordinator.feed()
    for partition in range(16):
        assert results(it, transactional(partition=partition), slot=partition) == [0]
    ordinal = coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    it.step_worker()
    it.step_worker()
    assert it.worker._appender.is_blocked
    assert len(it.worker._opened.open_transactions.slots_of((PID, 0))) > 4
    it.send(transactional(epoch=1))
    coordinator.settle()
    assert coordinator.settled == (ordinal, ())
    for partition in range(16):
        assert ends_of(it, partition) == [(0, 0, 1)]
    assert it.answers()[-1][0] == 0


def test_a_transaction_over_a_thousand_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.kit.log_files.logs as kit
    from shm.memory.layout import LaneLayout, RegionKind, TableLayout
    from tests.kit import memory

    regions = simulated_regions(1 << 20, 512)
    regions["table"] = memory.simulated(RegionKind.TABLE, TableLayout(1024).size, 1024)
    for name in ("controller>worker", "controller>flusher"):
        regions[name] = memory.simulated(RegionKind.LANE, LaneLayout(1 << 23).size, 1 << 23)
    monkeypatch.setattr(kit, "CHECKED_EVERY", 10_000)
    it = Bench(
        "/data", regions, SimFiles(SimDisk()), FlusherSettings(journal_bytes=1 << 20),
        assignments=[assignment(n, slot=n) for n in range(1000)],
    )  # fmt: skip
    it.settle()
    coordinator = Coordinator(it)
    coordinator.decide(1, [], [(PID, 0)])
    coordinator.feed()
    it.settle()
    for partition in range(1000):
        it.send(transactional(count=1, partition=partition), slot=partition)
        if partition % 20 == 19:
            it.settle()
    coordinator.settle()
    ordinal = coordinator.decide(1, [(PID, 0, ABORT)], [(PID, 1)])
    coordinator.settle()
    assert coordinator.settled == (ordinal, ())
    assert coordinator.opened == [(PID, 0)]
    assert {it.table.read(n).log_end_offset for n in range(1000)} == {2}
    assert ends_of(it, 999) == [(0, 0, 2)]


def test_thousands_of_transactions_open_in_one_partition_end_by_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tests.kit.log_files.logs as kit

    monkeypatch.setattr(kit, "CHECKED_EVERY", 10_000)
    monkeypatch.setattr(producer_state, "KEPT", 16)
    monkeypatch.setattr(coordinator_reports, "EPOCHS_MAX", 100)
    count = 1500
    it = make_bench()
    it.producer_ids_max = 20
    it.kill_worker()
    it.settle()
    coordinator = Coordinator(it)
    for n in range(count):
        coordinator.decide(n + 1, [], [(PID + n, 0)], is_sent=False)
    coordinator.feed()
    it.settle()
    for n in range(count):
        it.send(transactional(PID + n, count=1))
        if n % 50 == 49:
            it.settle()
    assert it.table.read(0).high_watermark == count
    assert len(it.worker._partitions[0].producers.transactions) == count
    assert (
        results(it, *(make_batch(1, producer_id=n) for n in range(30)))
        == [0] * 20 + [ErrorCode.TOO_MANY_PRODUCERS] * 10
    ), "others have the room that they had"
    decisions = []
    for n in range(count):
        coordinator.decide(n + 1, [(PID + n, 0, COMMIT)], [(PID + n, 1)], is_sent=False)
        decisions.append(coordinator.rows[coordinator.ordinal])
    coordinator.settle()
    assert len(coordinator.opened) == count
    coordinator.resend(*decisions[: count // 2])
    coordinator.resend(*decisions[count // 2 :])
    coordinator.settle()
    assert coordinator.settled == (coordinator.ordinal, ())
    assert coordinator.rows == {}
    assert sorted(ends_of(it)) == [(n, 0, 1) for n in range(count)]
    assert it.worker._partitions[0].producers.producer_count == 20


def test_an_open_transaction_is_never_forgotten_however_idle_and_an_ended_one_takes_no_room(
    it: Bench, coordinator: Coordinator
) -> None:
    assert results(it, transactional()) == [0]
    it.now_us += 2 * 86_400_000_000
    it.now_ns += 2 * 86_400_000_000_000
    assert results(it, transactional(sequence=2), transactional(sequence=2)) == [0, 0]
    assert it.table.read(0).high_watermark == 4
    for epoch in range(20):
        coordinator.decide(1, [(PID, epoch, COMMIT)], [(PID, epoch + 1)])
        assert results(it, transactional(epoch=epoch + 1)) == [0]
    assert it.worker._partitions[0].producers.to_snapshot()[0][1] == 20
    assert len(it.worker._partitions[0].producers._producers) == 1


def test_unreadable_bytes_and_an_unexpected_error_of_a_decision_lead_to_another_feed(
    it: Bench, coordinator: Coordinator
) -> None:
    results(it, transactional())
    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)], is_sent=False)
    coordinator.send(LaneKind.DECISIONS, b"\x01\x02\x03")
    assert results(it, transactional(epoch=1), make_batch(1)) == [NOT_YET, 0]
    it.now_ns += RETRY_NS
    coordinator.settle()
    assert coordinator.connected == [coordinator.generation, 0]
    coordinator.feed()
    assert results(it, transactional(epoch=1)) == [0]
    assert ends_of(it) == [(0, 0, 1)]
    errors = Control(it.regions["control"]).process(Role.WORKER, 0)
    assert errors.load(ProcessWord.INTERNAL_ERRORS) == 1


def test_a_marker_that_fails_unexpectedly_in_one_partition_is_owed_and_others_are_written(
    it: Bench, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition in range(3):
        results(it, transactional(partition=partition), slot=partition)

    written = MarkerTemplate.write

    def fail(template: MarkerTemplate, *args: Any, **fields: Any) -> Any:
        if template is it.worker._partitions[1].marker_template:
            raise KeyError("nobody expected this")
        return written(template, *args, **fields)

    monkeypatch.setattr(MarkerTemplate, "write", fail)
    ordinal = coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    coordinator.settle()
    assert list(coordinator.settled.unfinished) == [ordinal]
    assert results(it, transactional(epoch=1)) == [0]
    assert results(it, transactional(epoch=1, partition=1), slot=1) == [NOT_YET]
    coordinator.read()
    assert coordinator.asked == [], "it is known how it has ended"
    monkeypatch.undo()
    it.now_ns += RETRY_NS
    coordinator.settle()
    assert coordinator.settled == (ordinal, ())
    assert [ends_of(it, n) for n in range(3)] == [[(0, 0, 1)]] * 3


def test_an_answer_registers_nothing(it: Bench, coordinator: Coordinator) -> None:
    coordinator.resend(Decision(99, 0, [], [RegisteredProducer(PID + 9, 0)]))
    assert results(it, transactional(PID + 9)) == [FENCED]
    coordinator.read()
    assert coordinator.settled.ordinal == 99, "it may have a row, as other decisions"


def test_no_batch_gets_between_the_markers_of_a_decision_that_waits_for_room(
    it: Bench, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the first marker a late copy of a batch would open the transaction again, to be
    committed twice.
    """
    for slot in range(2):
        results(it, transactional(partition=slot), slot=slot)
    claim, refused = it.worker._ring.try_claim, iter([False, True])

    def claim_once(length: int) -> int | None:
        return None if next(refused, False) else claim(length)

    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    monkeypatch.setattr(it.worker._ring, "try_claim", claim_once)
    assert results(it, transactional()) == [FENCED]
    assert [entry[0] for entry in log_of(it)] == [0, 2]
    assert ends_of(it, 1) == [(0, 0, 1)]


# ---- reports that wait ---------------------------------------------------------------------------


def test_a_short_transaction_is_never_reported_as_open(it: Bench, coordinator: Coordinator) -> None:
    results(it, transactional())
    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    coordinator.settle()
    assert coordinator.opened == []
    results(it, transactional(epoch=1))
    it.now_ns += OPENED_AFTER_NS - 1
    it.step_worker()
    coordinator.read()
    assert coordinator.opened == []
    due_ns = it.worker.next_deadline_ns()
    assert due_ns is not None
    assert due_ns <= it.now_ns + 1
    it.now_ns += 1
    it.step_worker()
    coordinator.read()
    assert coordinator.opened == [(PID, 1)]


def test_carried_out_commits_are_reported_together_and_what_somebody_waits_for_at_once(
    it: Bench, coordinator: Coordinator
) -> None:
    coordinator.settle()
    for epoch in range(3):
        results(it, transactional(epoch=epoch))
        coordinator.decide(1, [(PID, epoch, COMMIT)], [(PID, epoch + 1)])
        it.settle()
    coordinator.read()
    before = coordinator.settled.ordinal
    assert before < coordinator.ordinal - 2, "nobody waits"
    due_ns = it.worker.next_deadline_ns()
    assert due_ns is not None
    assert due_ns <= it.now_ns + SETTLED_AFTER_NS
    it.now_ns += SETTLED_AFTER_NS
    it.step_worker()
    coordinator.read()
    assert coordinator.settled.ordinal == coordinator.ordinal, "one report for all"
    results(it, transactional(epoch=3))
    coordinator.decide(1, [(PID, 3, ABORT)], [(PID, 4)])
    it.settle()
    coordinator.read()
    assert coordinator.settled.ordinal == coordinator.ordinal, "an init waits for an abort"
    coordinator.decide(2, [], [(PID + 9, 0)])
    it.settle()
    coordinator.read()
    assert coordinator.settled.ordinal == coordinator.ordinal, "a registration ends nothing"


def test_a_feed_that_is_not_complete_leaves_no_report_due(
    it: Bench, coordinator: Coordinator
) -> None:
    """The worker would not sleep until the coordinator is there again."""
    results(it, transactional())
    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    it.settle()
    it.step_worker()
    due_ns = it.worker.next_deadline_ns()
    assert due_ns is not None
    assert due_ns <= it.now_ns + SETTLED_AFTER_NS
    coordinator.send(LaneKind.TRANSACTIONS_FEED)
    it.settle()
    it.now_ns += SETTLED_AFTER_NS
    it.step_worker()
    due_ns = it.worker.next_deadline_ns()
    assert due_ns is None or due_ns > it.now_ns + SETTLED_AFTER_NS


# ---- what it costs others ------------------------------------------------------------------------


def test_a_worker_without_transactions_has_nothing_of_them(it: Bench) -> None:
    assert results(it, make_batch(3, producer_id=4)) == [0]
    assert it.worker._transactions is None
    assert not it.has_requested_coordinator
    assert len(it.worker._every_lane) == 3


def test_the_seed_of_the_kit_is_that_of_partition_0() -> None:
    assert transactional() == transactional(partition=0)
    assert SEED
