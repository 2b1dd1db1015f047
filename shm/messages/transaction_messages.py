"""Messages between the transaction coordinator and the workers: registrations, decisions, and what
the workers report.

A lane leads from the coordinator to each worker and one back. Both are made when the first
transactional id is used.

    to a worker     DECISIONS, and around a feed TRANSACTIONS_FEED .. TRANSACTIONS_FED
    from a worker   TRANSACTIONS_CONNECTED, OPENED, SETTLED, ASK_OUTCOME

Owner: the coordinator decides. A worker acts on decisions, and decides nothing.
Invariants:
- A decision is durable before it is sent.
- A decision is exact: its outcomes concern the named (producer id, epoch) alone. It is absolute:
  `registered` are all producer ids that the transactional id may use from now on. So it may be
  repeated.
- Decisions of a lane are in the order of their ordinals. Of one transactional id the highest
  ordinal is valid.
Crash: a worker that starts says TRANSACTIONS_CONNECTED and takes no transactional batch before its
feed. A coordinator that starts feeds every worker.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum, unique
from typing import NamedTuple

_DECISION = struct.Struct("<QQII")
_PRODUCER = struct.Struct("<qhhI")
"""producer_id, epoch, an Outcome or a Registration or 0, 0"""
_ENDED = struct.Struct("<QQIIqhhIqhhI")
"""A decision with one outcome and one registered producer."""
_ORDINAL = struct.Struct("<Q")
PRODUCER_IDS_IN_BLOCK = 1 << 30
"""Producer ids in a block of PRODUCER_IDS, from its first one on."""
NO_TRANSACTIONAL_ID = 0
"""Number of the transactional id in an answer to ASK_OUTCOME, which registers nothing."""


@unique
class Outcome(IntEnum):
    """The decided end of a transaction. The values are the markers' control types."""

    COMMIT = 1
    ABORT = 2


@unique
class Registration(IntEnum):
    """State of a registered producer id."""

    OPEN = 0
    SEALED = 1
    """Prepared: its transaction takes no more batches, and waits for its decision."""


class ProducerEpoch(NamedTuple):
    """A transactional producer id and an epoch. Each transaction has an epoch of its own."""

    producer_id: int
    epoch: int


class DecidedTransaction(NamedTuple):
    """A transaction and its end."""

    producer_id: int
    epoch: int
    outcome: Outcome


class RegisteredProducer(NamedTuple):
    """A producer id with the only epoch whose batches a worker takes."""

    producer_id: int
    epoch: int
    state: Registration = Registration.OPEN


class Decision(NamedTuple):
    """One decision about one transactional id. `ordinal`: its number among all decisions.
    `id_number`: of the transactional id.
    """

    ordinal: int
    id_number: int
    outcomes: Sequence[DecidedTransaction]
    registered: Sequence[RegisteredProducer]


def _outcome_of(value: int) -> Outcome:
    """Outcome(value), without the call of an enumeration for each commit."""
    return Outcome.COMMIT if value == 1 else Outcome(value)


def _registration_of(value: int) -> Registration:
    return Registration(value) if value else Registration.OPEN


def encode_decisions(decisions: Iterable[Decision]) -> bytes:
    """Encode the payload of DECISIONS."""
    parts = []
    for ordinal, id_number, outcomes, registered in decisions:
        if len(outcomes) == len(registered) == 1:  # a commit or an abort
            parts.append(_ENDED.pack(ordinal, id_number, 1, 1, *outcomes[0], 0, *registered[0], 0))
            continue
        parts.append(_DECISION.pack(ordinal, id_number, len(outcomes), len(registered)))
        parts.extend(_PRODUCER.pack(*outcome, 0) for outcome in outcomes)
        parts.extend(_PRODUCER.pack(*producer, 0) for producer in registered)
    return b"".join(parts)


def decode_decisions(payload: bytes | memoryview) -> list[Decision]:
    """Decode the payload of DECISIONS. Raises struct.error, ValueError for other bytes."""
    decisions, at = [], 0
    while at < len(payload):
        ordinal, id_number, outcome_count, registered_count = _DECISION.unpack_from(payload, at)
        at += _DECISION.size
        outcomes = []
        for _ in range(outcome_count):
            producer_id, epoch, outcome, _ = _PRODUCER.unpack_from(payload, at)
            outcomes.append(DecidedTransaction(producer_id, epoch, _outcome_of(outcome)))
            at += _PRODUCER.size
        registered = []
        for _ in range(registered_count):
            producer_id, epoch, state, _ = _PRODUCER.unpack_from(payload, at)
            registered.append(RegisteredProducer(producer_id, epoch, _registration_of(state)))
            at += _PRODUCER.size
        decisions.append(Decision(ordinal, id_number, outcomes, registered))
    return decisions


def encode_epochs(epochs: Iterable[ProducerEpoch]) -> bytes:
    """Encode the payload of OPENED and ASK_PRODUCER."""
    return b"".join(_PRODUCER.pack(producer_id, epoch, 0, 0) for producer_id, epoch in epochs)


def decode_epochs(payload: bytes | memoryview) -> list[ProducerEpoch]:
    """Decode the payload of OPENED and ASK_PRODUCER. Raises struct.error."""
    return [ProducerEpoch(*fields[:2]) for fields in _PRODUCER.iter_unpack(payload)]


class Settled(NamedTuple):
    """Progress of a worker: every decision up to `ordinal` is carried out, and its markers are as
    durable as their topics require. The ordinals in `unfinished` are excepted: they wait for a
    partition that takes no marker now.
    """

    ordinal: int
    unfinished: Sequence[int] = ()


NO_PROGRESS = Settled(0)
"""Nothing is known to be carried out."""


def encode_settled(settled: Settled) -> bytes:
    """Encode the payload of SETTLED."""
    return b"".join(_ORDINAL.pack(ordinal) for ordinal in (settled.ordinal, *settled.unfinished))


def decode_settled(payload: bytes | memoryview) -> Settled:
    """Decode the payload of SETTLED. Raises struct.error, IndexError."""
    ordinals = [ordinal for (ordinal,) in _ORDINAL.iter_unpack(payload)]
    return Settled(ordinals[0], tuple(ordinals[1:]))
