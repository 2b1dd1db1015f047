"""Values that processes of one transaction pass to each other: its branches, and the transaction
after `prepare_transaction`.

Owner: none. Each can be pickled, and has a text: `to_json` and `from_json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from tailrace.core.errors import InvalidRequestError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TransactionBranch:
    """The right to write in a transaction of another producer:
    `Producer(address, transaction_branch=branch)`.

    It names the transaction (transactional id, owner, producer id and epoch) and its number there.
    """

    transactional_id: str
    owner: int
    producer_id: int
    producer_epoch: int
    number: int

    def to_json(self) -> str:
        """The branch as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> TransactionBranch:
        """The branch of a `to_json` text. Raises InvalidRequestError."""

        def make(fields: dict[str, Any]) -> TransactionBranch:
            return TransactionBranch(**_checked(fields, _BRANCH))

        return _decoded(TransactionBranch, text, make)


@dataclass(frozen=True, slots=True)
class WrittenPartition:
    """A partition that a branch has written."""

    topic: str
    partition: int
    batch_count: int
    record_count: int


@dataclass(frozen=True, slots=True)
class FinishedBranch:
    """A branch whose records are acknowledged, for `commit_transaction(branches=[...])`.

    `producer_id`, `producer_epoch`: of its batches; the producer id is -1 if it has none.
    """

    branch: TransactionBranch
    producer_id: int
    producer_epoch: int
    partitions: tuple[WrittenPartition, ...]

    @property
    def record_count(self) -> int:
        """Number of its records."""
        return sum(one.record_count for one in self.partitions)

    @property
    def batch_count(self) -> int:
        """Number of its batches."""
        return sum(one.batch_count for one in self.partitions)

    def to_json(self) -> str:
        """The finished branch as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> FinishedBranch:
        """The finished branch of a `to_json` text. Raises InvalidRequestError."""

        def make(fields: dict[str, Any]) -> FinishedBranch:
            found = _checked(
                fields,
                {"branch": dict, "producer_id": int, "producer_epoch": int, "partitions": list},
            )
            return FinishedBranch(
                TransactionBranch(**_checked(found["branch"], _BRANCH)),
                found["producer_id"],
                found["producer_epoch"],
                tuple(WrittenPartition(**_checked(one, _WRITTEN)) for one in found["partitions"]),
            )

        return _decoded(FinishedBranch, text, make)


@dataclass(frozen=True, slots=True)
class PreparedTransaction:
    """A prepared transaction, for `complete_transaction`, or to be decided by its id. It is stored
    where the decision is made. `tag`: the program's text.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    tag: str

    def to_json(self) -> str:
        """The prepared transaction as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> PreparedTransaction:
        """The prepared transaction of a `to_json` text. Raises InvalidRequestError."""

        def make(fields: dict[str, Any]) -> PreparedTransaction:
            return PreparedTransaction(**_checked(fields, _PREPARED))

        return _decoded(PreparedTransaction, text, make)


_PREPARED = {"transactional_id": str, "producer_id": int, "producer_epoch": int, "tag": str}
_BRANCH = {
    "transactional_id": str, "owner": int, "producer_id": int, "producer_epoch": int, "number": int,
}  # fmt: skip
_WRITTEN = {"topic": str, "partition": int, "batch_count": int, "record_count": int}


def _checked(fields: Any, kinds: dict[str, type]) -> dict[str, Any]:
    if type(fields) is not dict or fields.keys() != kinds.keys():
        raise ValueError(f"it takes the fields {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(fields[name]) is not kind:
            raise ValueError(f"{name} is {fields[name]!r:.100}")
    return fields


def _decoded(kind: type[T], text: str | bytes, make: Callable[[dict[str, Any]], T]) -> T:
    try:
        return make(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(
            f"this is not the text of a {kind.__name__}, as to_json() makes it: {error}"
        ) from error
