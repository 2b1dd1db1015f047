"""Packed registrations of transactional ids: found by number and by producer id until they are
taken, and sent in the bytes of plain decisions.
"""

from __future__ import annotations

import pytest

from shm.messages.packed_registrations import PackedRegistration, PackedRegistrations
from shm.messages.transaction_messages import (
    DecidedTransaction,
    Decision,
    Outcome,
    RegisteredProducer,
    Registration,
    decode_decisions,
    encode_decisions,
)

P = 1 << 62


def filled(count: int, *, is_reversed: bool = False) -> PackedRegistrations:
    packed = PackedRegistrations()
    producers = range(P, P + count)
    assert packed.try_extend(
        range(100, 100 + count), range(1, count + 1),
        producers[::-1] if is_reversed else producers, [7] * count,
    )  # fmt: skip
    return packed


@pytest.mark.parametrize("is_reversed", [False, True])
def test_ids_are_found_until_they_are_taken(is_reversed: bool) -> None:
    packed = filled(5, is_reversed=is_reversed)
    index = packed.find_producer(P + 3)
    assert index is not None
    number = 2 if is_reversed else 4
    assert packed.at(index) == PackedRegistration(99 + number, number, P + 3, 7)
    assert packed.find(number) == index
    assert packed.take(index) == packed.take(index) == packed.at(index)
    assert packed.find(number) is packed.find_producer(P + 3) is None
    assert len(packed) == 4
    assert packed.first_numbers(3) == [n for n in range(1, 6) if n != number][:3]
    for missing in (P - 1, P + 5):
        assert packed.find_producer(missing) is None
    for missing in (0, 6):
        assert packed.find(missing) is None


def test_messages_are_those_of_plain_decisions_and_leave_taken_ids_out() -> None:
    packed = filled(1_000)
    index = packed.find(17)
    assert index is not None
    packed.take(index)
    messages = list(packed.messages())
    decisions = [one for payload in messages for one in decode_decisions(payload)]
    assert decisions == [
        Decision(99 + n, n, [], [RegisteredProducer(P + n - 1, 7)])
        for n in range(1, 1_001)
        if n != 17
    ]
    assert b"".join(messages) == encode_decisions(decisions)
    assert max(map(len, messages)) < 1 << 14
    copy = PackedRegistrations()
    assert [copy.try_extend_by(payload, {}) for payload in messages] == [299, 499, 699, 899, 1_099]
    assert list(copy.messages()) != []
    assert len(copy) == 999


PLAIN = Decision(8, 3, [], [RegisteredProducer(P, 0)])


@pytest.mark.parametrize(
    "other",
    [
        Decision(9, 4, [DecidedTransaction(P + 1, 0, Outcome.COMMIT)], []),
        Decision(9, 4, [DecidedTransaction(P + 1, 0, Outcome.COMMIT)], [RegisteredProducer(9, 1)]),
        Decision(9, 4, [], [RegisteredProducer(P + 1, 0, Registration.SEALED)]),
        Decision(9, 4, [], [RegisteredProducer(P + 1, 0), RegisteredProducer(P + 2, 0)]),
        Decision(9, 4, [], []),
        Decision(9, 2, [], [RegisteredProducer(P + 1, 0)]),
        Decision(9, 3, [], [RegisteredProducer(P + 1, 0)]),
        Decision(9, 44, [], [RegisteredProducer(P + 1, 0)]),
    ],
    ids=["ends", "ends and registers", "sealed", "branches", "gone", "descends", "twice", "known"],
)  # fmt: skip
def test_a_message_with_anything_else_is_not_packed(other: Decision) -> None:
    packed = PackedRegistrations()
    assert packed.try_extend_by(encode_decisions([PLAIN, other]), {44: 0}) is None
    assert not packed
    assert packed.try_extend_by(b"", {}) is None
    assert packed.try_extend_by(encode_decisions([PLAIN]), {44: 0}) == 8
