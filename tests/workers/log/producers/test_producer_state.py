"""Deduplication: Kafka's rules, one row each; and a model of producers that come, go and retry
while the table forgets.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import REMEMBERED_BATCHES
from tests.kit.seeds import examples
from workers.log.producers import producer_state
from workers.log.producers.producer_state import Decision, ProducerTable

LAST = 2**31 - 1
END = (REMEMBERED_BATCHES + 2) * 10


def table(batches: int = REMEMBERED_BATCHES + 2, epoch: int = 1) -> ProducerTable:
    """A producer 9 that has sent `batches` batches of 10 records each."""
    result = ProducerTable()
    for number in range(batches):
        result.record(9, epoch, number * 10, 9, 100 + number * 10, 110 + number * 10, 5)
    return result


@pytest.mark.parametrize(
    ("producer", "epoch", "sequence", "decision", "code"),
    [
        (9, 1, END, Decision.APPEND, ErrorCode.OK),
        (9, 1, END - 10, Decision.DUPLICATE, ErrorCode.OK),
        (9, 1, 20, Decision.DUPLICATE, ErrorCode.OK),
        (9, 1, 10, Decision.REFUSE, ErrorCode.UNKNOWN_SEQUENCE),
        (9, 1, END + 10, Decision.REFUSE, ErrorCode.OUT_OF_ORDER_SEQUENCE),
        (9, 1, END - 5, Decision.REFUSE, ErrorCode.OUT_OF_ORDER_SEQUENCE),
        (9, 0, END, Decision.REFUSE, ErrorCode.STALE_PRODUCER_EPOCH),
        (9, 2, 0, Decision.APPEND, ErrorCode.OK),
        (9, 2, END, Decision.REFUSE, ErrorCode.OUT_OF_ORDER_SEQUENCE),
        (8, 0, 0, Decision.APPEND, ErrorCode.OK),
        (8, 0, 1, Decision.REFUSE, ErrorCode.UNKNOWN_SEQUENCE),
    ],
)
def test_decision(
    producer: int, epoch: int, sequence: int, decision: Decision, code: ErrorCode
) -> None:
    verdict = table().decide(producer, epoch, sequence, 9)
    assert (verdict.decision, verdict.code) == (decision, code)


@pytest.mark.parametrize(
    ("producer", "sequence", "is_stored"), [(9, 10, True), (9, END + 10, False), (8, 10, False)]
)
def test_a_batch_behind_those_remembered_is_known_as_stored(
    producer: int, sequence: int, is_stored: bool
) -> None:
    assert table().decide(producer, 1, sequence, 9).is_stored is is_stored


def test_a_batch_before_sequence_zero_is_not_known_as_stored() -> None:
    assert not table().decide(9, 1, LAST - 4, 9).is_stored
    assert not table().decide(9, 1, LAST - 20, 9).is_stored


def test_a_duplicate_is_answered_with_its_first_offset() -> None:
    verdict = table().decide(9, 1, 50, 9)
    assert verdict.original is not None
    assert (verdict.original.base_offset, verdict.original.next_offset) == (150, 160)


def test_the_last_batches_are_remembered_and_no_others() -> None:
    count = REMEMBERED_BATCHES + 7
    found = [table(count).decide(9, 1, n * 10, 9).decision for n in range(count)]
    assert found == [Decision.REFUSE] * 7 + [Decision.DUPLICATE] * REMEMBERED_BATCHES
    again = ProducerTable.from_snapshot(table(count).to_snapshot())
    assert [again.decide(9, 1, n * 10, 9).decision for n in range(count)] == found


def test_sequences_go_on_at_zero_after_the_last_number() -> None:
    wrapped = ProducerTable()
    wrapped.record(1, 0, LAST - 4, 9, 0, 10, 0)
    assert wrapped.decide(1, 0, 5, 0).decision is Decision.APPEND
    assert wrapped.decide(1, 0, LAST - 4, 9).decision is Decision.DUPLICATE


def test_a_snapshot_decides_alike() -> None:
    again = ProducerTable.from_snapshot(table().to_snapshot())
    for sequence in range(0, END + 30, 5):
        assert again.decide(9, 1, sequence, 9) == table().decide(9, 1, sequence, 9)


def test_recording_twice_or_backwards_changes_nothing() -> None:
    result = table()
    result.record(9, 1, END - 10, 9, 90 + END, 100 + END, 5)
    result.record(9, 0, END, 9, 100 + END, 110 + END, 5)
    assert result.to_snapshot() == table().to_snapshot()


# ---- many producers ------------------------------------------------------------------------------

MINUTE_US = 60_000_000
RETRIED_FOR_US = 5 * MINUTE_US
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 11)),
        st.tuples(st.just("send"), st.integers(0, 11)),
        st.tuples(st.just("retry"), st.integers(0, 11)),
        st.tuples(st.just("wait"), st.integers(1, 20)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=120,
)


@dataclass
class Client:
    """A producer as the SDK is one: it sends again what it knows no answer to until its time is
    over, and takes a new epoch when it is not known any more.
    """

    number: int
    epoch: int = 0
    next_sequence: int = 0
    unanswered: tuple[int, int, int] | None = None
    """(batch, sequence, when it was first sent)"""
    last_batch: int = -1


class Partition:
    """A worker's table and the flusher's copy; every batch's answer is lost, so each is sent
    again.
    """

    def __init__(self, limit: int) -> None:
        self.worker, self.flusher = ProducerTable(), ProducerTable()
        self.limit = limit
        self.now_us = 1_000 * MINUTE_US
        self.log: list[tuple[int, int]] = []
        self.refused = 0

    def produce(self, client: Client, batch: int, sequence: int) -> ErrorCode:
        verdict = self.worker.decide(client.number, client.epoch, sequence, 0)
        if verdict.decision is Decision.APPEND:
            if verdict.is_new and not self.worker.has_room(self.limit, self.now_us):
                self.refused += 1
                return ErrorCode.TOO_MANY_PRODUCERS
            offset = len(self.log)
            self.log.append((client.number, batch))
            for table in (self.worker, self.flusher):
                table.record(
                    client.number, client.epoch, sequence, 0, offset, offset + 1, self.now_us
                )
        elif verdict.original is not None:
            assert self.log[verdict.original.base_offset] == (client.number, batch)
        return verdict.code


def play(steps: list[tuple[str, int]], limit: int = 6) -> Partition:
    partition, clients = Partition(limit), [Client(number) for number in range(12)]
    for step, number in steps:
        client = clients[number % 12]
        if step == "wait":
            partition.now_us += number * MINUTE_US
        elif step == "restart":
            partition.worker = ProducerTable.from_snapshot(partition.flusher.to_snapshot())
        elif step == "send" or client.unanswered is not None:
            if (
                client.unanswered is None or step == "send"
            ):  # the batch before was answered, or is given up
                client.last_batch += 1
                client.unanswered = client.last_batch, client.next_sequence, partition.now_us
            batch, sequence, since_us = client.unanswered
            if partition.now_us - since_us > RETRIED_FOR_US:
                client.unanswered, client.epoch, client.next_sequence = (
                    None,
                    client.epoch + 1,
                    0,
                )  # what it knows no fate of leaves a gap
                continue
            code = partition.produce(client, batch, sequence)
            if code is ErrorCode.UNKNOWN_SEQUENCE:
                client.epoch, sequence = client.epoch + 1, 0
                client.unanswered = batch, sequence, since_us
                code = partition.produce(client, batch, sequence)
            assert code in (ErrorCode.OK, ErrorCode.TOO_MANY_PRODUCERS), code
            if code is ErrorCode.OK:
                client.next_sequence = sequence + 1
            else:
                client.unanswered, client.last_batch = None, client.last_batch - 1
        assert partition.worker.producer_count <= limit
        assert partition.flusher.producer_count <= limit
    assert len(partition.log) == len(set(partition.log)), "appended twice"
    return partition


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_state, "KEPT", 3)


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(STEPS)
def test_nothing_that_may_be_sent_again_is_forgotten_however_many_producers_come(
    steps: list[tuple[str, int]],
) -> None:
    play(steps)


def test_the_model_finds_a_table_that_forgets_who_may_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer_state, "IDLE_US", 2 * MINUTE_US)
    with pytest.raises(AssertionError, match="appended twice"):
        play([("send", 0), ("wait", 3), *[("send", n) for n in range(1, 6)], ("retry", 0)])


def test_new_producers_are_refused_while_as_many_as_may_be_are_busy_and_known_ones_go_on() -> None:
    table, now_us = ProducerTable(), 1_000 * MINUTE_US
    for number in range(50):
        verdict = table.decide(number, 0, 0, 0)
        assert verdict.is_new
        assert table.has_room(10, now_us) == (number < 10)
        if number < 10:
            table.record(number, 0, 0, 0, number, number + 1, now_us)
    assert table.decide(4, 0, 1, 0).decision is Decision.APPEND
    assert not table.decide(4, 0, 1, 0).is_new
    table.record(4, 0, 1, 0, 100, 101, now_us + producer_state.IDLE_US)
    assert table.has_room(10, now_us + producer_state.IDLE_US + 2_000_000)
    assert table.producer_count == 1, "the others have sent nothing for long enough"


def test_sixty_thousand_invented_producers_cost_no_more_than_the_limit() -> None:
    table = ProducerTable()
    tracemalloc.start()
    for number in range(60_000):
        if table.decide(number, 0, 0, 0).is_new and table.has_room(10_000, 1_000_000):
            table.record(number, 0, 0, 0, number, number + 1, 1_000_000)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert table.producer_count == 10_000
    assert held < 300 * 10_000


def test_few_producers_are_remembered_however_idle() -> None:
    table = ProducerTable()
    for number in range(3):
        assert table.has_room(10, number * 10 * producer_state.IDLE_US)
        table.record(number, 0, 0, 0, number, number + 1, number * 10 * producer_state.IDLE_US)
    assert table.producer_count == 3


def test_a_jump_of_the_clock_makes_no_producer_older() -> None:
    """A retry behind it would be taken for new, or be sent again under another epoch."""
    table, jump_us = ProducerTable(), 8 * 24 * 60 * MINUTE_US
    table.record(1, 0, 0, 4, 0, 5, 1_000 * MINUTE_US)
    forget_before_us = 1_001 * MINUTE_US + jump_us - 24 * 60 * MINUTE_US
    table.moved = lambda append_time_us: append_time_us + jump_us
    assert table.expire(forget_before_us) == 0
    verdict = table.decide(1, 0, 0, 4, forget_before_us)
    assert verdict.decision is Decision.DUPLICATE
    table.moved = lambda append_time_us: append_time_us
    assert table.expire(forget_before_us) == 1
