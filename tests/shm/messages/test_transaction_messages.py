"""Messages of transactions: what one process encodes, the other decodes."""

from __future__ import annotations

import struct

import pytest

from shm.messages.transaction_messages import (
    DecidedTransaction,
    Decision,
    Outcome,
    ProducerEpoch,
    RegisteredProducer,
    Registration,
    Settled,
    decode_decisions,
    decode_epochs,
    decode_settled,
    encode_decisions,
    encode_epochs,
    encode_settled,
)

DECISIONS = [
    Decision(
        7,
        3,
        [
            DecidedTransaction(1 << 62, 4, Outcome.COMMIT),
            DecidedTransaction(5, 32_767, Outcome.ABORT),
        ],
        [RegisteredProducer(1 << 62, 5), RegisteredProducer(9, 0, Registration.SEALED)],
    ),
    Decision(8, 3, [], []),
]


def test_decisions_arrive_as_they_were_sent() -> None:
    assert decode_decisions(encode_decisions(DECISIONS)) == DECISIONS


def test_a_cut_decision_is_refused() -> None:
    with pytest.raises(struct.error):
        decode_decisions(encode_decisions(DECISIONS)[:-36])


def test_an_unknown_outcome_is_refused() -> None:
    encoded = bytearray(encode_decisions(DECISIONS[:1]))
    struct.pack_into("<h", encoded, 24 + 10, 9)
    with pytest.raises(ValueError, match="9"):
        decode_decisions(bytes(encoded))


def test_epochs_and_progress_arrive_as_they_were_sent() -> None:
    epochs = [ProducerEpoch(1 << 62, 0), ProducerEpoch(1 << 62 | 1, 32_767)]
    assert decode_epochs(encode_epochs(epochs)) == epochs
    for settled in (Settled(0), Settled(1 << 60, (3, 4))):
        assert decode_settled(encode_settled(settled)) == settled
