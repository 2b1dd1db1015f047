"""The mark of a prepared transaction in the row of its transactional id.

Owner: none; plain values and pure functions.
Invariants: the mark is durable before the answer to `prepare`, and goes in the commit that decides.
"""

from __future__ import annotations

from typing import NamedTuple

import orjson

from appliance.groups.consumer.prepared_offsets import GroupOffsets, PreparedOffset
from appliance.groups.store.schema import TransactionalIdRow
from shm.messages.transaction_messages import ProducerEpoch


class Prepared(NamedTuple):
    """The mark of a prepared transaction. `tag`: the client's text. `elapsed_ms`: the moment in
    elapsed time, by which the operator's limit counts; `wall_ms`: for display. `branches`: those
    that are decided as the transaction is. `offsets`: those that its commit commits.
    """

    tag: str
    elapsed_ms: int
    wall_ms: int
    branches: frozenset[ProducerEpoch] = frozenset()
    offsets: tuple[GroupOffsets, ...] = ()


def prepared_of(row: TransactionalIdRow) -> Prepared | None:
    """The mark of a row; None: its transaction is not prepared. Raises ValueError, TypeError."""
    if not row.prepared:
        return None
    tag, elapsed_ms, wall_ms, *more = orjson.loads(row.prepared)
    branches, offsets = more or ((), ())
    return Prepared(
        tag,
        elapsed_ms,
        wall_ms,
        frozenset(ProducerEpoch(*one) for one in branches),
        tuple(
            GroupOffsets(group, tuple(PreparedOffset(*one) for one in rows))
            for group, rows in offsets
        ),
    )


def encoded_mark(prepared: Prepared) -> str:
    branches = sorted(list(one) for one in prepared.branches)
    offsets = [[group, [list(one) for one in rows]] for group, rows in prepared.offsets]
    return orjson.dumps([*prepared[:3], branches, offsets]).decode()


def is_over(prepared: Prepared, elapsed_ms: int, limit_ms: int) -> bool:
    """True if the operator's limit has passed. 0: there is none."""
    return 0 < limit_ms <= elapsed_ms - prepared.elapsed_ms


def due_ns(prepared: Prepared, now_ns: int, elapsed_ms: int, limit_ms: int) -> int | None:
    """The time at which the operator's limit passes; None: there is none."""
    if not limit_ms:
        return None
    return now_ns + max(1, prepared.elapsed_ms + limit_ms - elapsed_ms) * 1_000_000
