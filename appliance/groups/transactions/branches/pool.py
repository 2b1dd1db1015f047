"""The branch producers of a transactional id, as its row has them.

    branch producers   [----- registered -----|----- spare -----]

Each transaction uses the first ones again, under a raised epoch. So a transaction with branches
brings no new producer ids.

Owner: none; plain values.
Invariants:
- The workers take batches of the registered ones alone.
- A decision ends all registered ones, and raises their epochs. So no batch of one is ever taken
  for a later transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import NamedTuple

import orjson

from appliance.groups.store.schema import TransactionalIdRow
from shm.messages.transaction_messages import DecidedTransaction, Outcome, ProducerEpoch
from tailrace.core.errors import InvalidTransactionError

BRANCHES_MAX = 2_000
"""Branches of one transaction."""
BRANCHES_IN_ALL_MAX = 100_000
"""Registered branches of all ids: each worker keeps 150 bytes of one."""


class BranchPool(NamedTuple):
    """Branch producers. The first `registered_count` are registered."""

    registered_count: int
    producers: tuple[ProducerEpoch, ...]

    @property
    def registered(self) -> tuple[ProducerEpoch, ...]:
        """The branch producers of the current transaction."""
        return self.producers[: self.registered_count]


NO_BRANCHES = BranchPool(0, ())


def pool_of(row: TransactionalIdRow) -> BranchPool:
    """The branch producers of an id. Raises ValueError, TypeError."""
    return _decoded(row.branches) if row.branches else NO_BRANCHES


@lru_cache(maxsize=32)
def _decoded(text: str) -> BranchPool:
    count, producers = orjson.loads(text)
    return BranchPool(count, tuple(ProducerEpoch(*one) for one in producers))


def encoded_pool(pool: BranchPool) -> str:
    """The text of a pool in a row."""
    if not pool.producers:
        return ""
    return orjson.dumps([pool.registered_count, [list(one) for one in pool.producers]]).decode()


def with_registered(
    pool: BranchPool, count: int, new_producer: Callable[[], ProducerEpoch]
) -> BranchPool:
    """Register the first `count` branch producers. New ones are made where there are fewer."""
    missing = max(0, count - len(pool.producers))
    return BranchPool(count, (*pool.producers, *(new_producer() for _ in range(missing))))


def raised(
    pool: BranchPool, count: int, following: Callable[[int, int], tuple[int, int]]
) -> BranchPool:
    """The pool of the next transaction, which has the first `count` branch producers. Those that
    were registered get their next epoch.
    """
    used = tuple(ProducerEpoch(*following(*one)) for one in pool.registered)
    return BranchPool(count, (*used, *pool.producers[pool.registered_count :]))


def ended(
    pool: BranchPool, outcome: Outcome, kept: Collection[ProducerEpoch]
) -> list[DecidedTransaction]:
    """The end of each branch. Those in `kept` have the outcome of the transaction, the others are
    aborted.
    """
    return [
        DecidedTransaction(*one, outcome if one in kept else Outcome.ABORT)
        for one in pool.registered
    ]


def check_named(pool: BranchPool, named: frozenset[ProducerEpoch]) -> None:
    """Refuse branches that are not of the current transaction. Raises InvalidTransactionError."""
    if named:
        for one in sorted(named - frozenset(pool.registered)):
            raise InvalidTransactionError(
                f"(producer id {one.producer_id}, epoch {one.epoch}) is not a branch of the "
                "current transaction; nothing of it was decided"
            )
