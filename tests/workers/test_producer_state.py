"""Deduplication: Kafka's rules, one row each."""

from __future__ import annotations

import pytest

from tailrace.protocol.errors import ErrorCode
from workers.producer_state import Decision, ProducerTable

LAST = 2**31 - 1


def table(batches: int = 7, epoch: int = 1) -> ProducerTable:
    """A producer 9 that has sent `batches` batches of 10 records each."""
    result = ProducerTable()
    for number in range(batches):
        result.record(9, epoch, number * 10, 9, 100 + number * 10, 110 + number * 10, 5)
    return result


@pytest.mark.parametrize(
    ("producer", "epoch", "sequence", "decision", "code"),
    [
        (9, 1, 70, Decision.APPEND, ErrorCode.OK),
        (9, 1, 60, Decision.DUPLICATE, ErrorCode.OK),
        (9, 1, 20, Decision.DUPLICATE, ErrorCode.OK),
        (9, 1, 10, Decision.REFUSE, ErrorCode.UNKNOWN_SEQUENCE),
        (9, 1, 80, Decision.REFUSE, ErrorCode.OUT_OF_ORDER_SEQUENCE),
        (9, 1, 65, Decision.REFUSE, ErrorCode.OUT_OF_ORDER_SEQUENCE),
        (9, 0, 70, Decision.REFUSE, ErrorCode.STALE_PRODUCER_EPOCH),
        (9, 2, 0, Decision.APPEND, ErrorCode.OK),
        (9, 2, 70, Decision.REFUSE, ErrorCode.OUT_OF_ORDER_SEQUENCE),
        (8, 0, 0, Decision.APPEND, ErrorCode.OK),
        (8, 0, 1, Decision.REFUSE, ErrorCode.UNKNOWN_SEQUENCE),
    ],
)
def test_decision(producer: int, epoch: int, sequence: int, decision: Decision, code: ErrorCode) -> None:
    verdict = table().decide(producer, epoch, sequence, 9)
    assert (verdict.decision, verdict.code) == (decision, code)


def test_a_duplicate_is_answered_with_its_first_offset() -> None:
    verdict = table().decide(9, 1, 50, 9)
    assert verdict.original is not None
    assert (verdict.original.base_offset, verdict.original.next_offset) == (150, 160)


def test_five_batches_are_remembered() -> None:
    found = [table(12).decide(9, 1, n * 10, 9).decision for n in range(12)]
    assert found == [Decision.REFUSE] * 7 + [Decision.DUPLICATE] * 5


def test_sequences_go_on_at_zero_after_the_last_number() -> None:
    wrapped = ProducerTable()
    wrapped.record(1, 0, LAST - 4, 9, 0, 10, 0)
    assert wrapped.decide(1, 0, 5, 0).decision is Decision.APPEND
    assert wrapped.decide(1, 0, LAST - 4, 9).decision is Decision.DUPLICATE


def test_a_snapshot_decides_alike() -> None:
    again = ProducerTable.from_snapshot(table().to_snapshot())
    for sequence in range(0, 100, 5):
        assert again.decide(9, 1, sequence, 9) == table().decide(9, 1, sequence, 9)


def test_recording_twice_or_backwards_changes_nothing() -> None:
    result = table()
    result.record(9, 1, 60, 9, 160, 170, 5)
    result.record(9, 0, 70, 9, 170, 180, 5)
    assert result.to_snapshot() == table().to_snapshot()
