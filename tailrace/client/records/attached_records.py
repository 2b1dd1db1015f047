"""Records of a share consumer whose acknowledgement goes with the commit of a transaction.

Owner: the share consumer that made it; the producer of the transaction sets `ended_by`.
Invariants:
- `ended_by` is one store, also from another thread. The consumer acts on it in its next call, so
  that no other thread changes its state.
- An end that is not known counts as an abort: a release of records that are acknowledged is
  refused, and changes nothing.
Crash: the locks of the records expire, unless the commit is durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tailrace.core.records import Record


class AttachedMember(NamedTuple):
    """The member of a share group that has the records."""

    group: str
    member_id: str
    epoch: int


@dataclass(slots=True, eq=False)
class AttachedRecords:
    """Records of one member in one transaction."""

    member: AttachedMember
    places: tuple[tuple[str, int, int], ...]
    """(topic, partition, offset)."""
    rows: Sequence[tuple[str, int, int]]
    """(topic id, partition, offset)."""
    outcome: str = "accept"
    ended_by: str | None = None
    """"commit" or "abort"; None: the transaction is open."""


class AttachesRecords(Protocol):
    """A `ShareConsumer` or `AsyncShareConsumer`."""

    def _attach(self, records: Iterable[Record], outcome: str) -> AttachedRecords: ...
