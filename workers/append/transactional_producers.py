"""Transactional producers that the coordinator has registered: what a worker may take batches of.

A batch is taken if exactly its (producer id, epoch) is registered:

    registered for the producer id         standing    answer to the batch
    -------------------------------------  ----------  -----------------------------------------
    the same epoch                         CURRENT     the partition decides (`transactions.py`)
    an earlier epoch                       NOT_YET     CONCURRENT_TRANSACTIONS: its decision is on
                                                       its way
    nothing, a later epoch, or sealed      FENCED      PRODUCER_FENCED

Owner: one worker. It changes by what the coordinator sends, and by nothing else.

Invariants:
- Of one transactional id the decision with the highest ordinal is valid, and names all of its
  producer ids.
- Before a feed is complete nothing is CURRENT or FENCED.

An id that a feed has registered stays packed until a batch of it comes, or a decision. Of 10,000
ids few are used.

Crash: fed again by the coordinator.
"""

from __future__ import annotations

from enum import Enum

from shm.messages.packed_registrations import PackedRegistrations
from shm.messages.transaction_messages import NO_TRANSACTIONAL_ID, Decision, Registration

_EPOCH_BITS = 15
_EPOCH_MASK = (1 << _EPOCH_BITS) - 1
_SEALED = 1 << _EPOCH_BITS
_SINCE_SHIFT = _EPOCH_BITS + 1
_ORDINAL_SHIFT = 63
_PRODUCER_MASK = (1 << _ORDINAL_SHIFT) - 1
"""Producer ids are non-negative 64-bit numbers."""


class Standing(Enum):
    """Answer to a (producer id, epoch)."""

    CURRENT = 0
    NOT_YET = 1
    FENCED = 2


class TransactionalProducers:
    """Registered producers of a worker."""

    def __init__(self) -> None:
        self.is_fed = False
        self._producers: dict[int, int] = {}
        """Producer id -> number of the registering decision, sealed, epoch, as one number: there
        may be a million.
        """
        self._ids: dict[int, int] = {}
        """Number of a transactional id -> ordinal of its last decision, its producer id, as one
        number.
        """
        self._branches: dict[int, tuple[int, ...]] = {}
        """Number of a transactional id -> its other producer ids, if it has any."""
        self._packed = PackedRegistrations()
        """Those of the feed that were not used since. They count as its first registration."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._producers) + len(self._packed)

    @property
    def registration_count(self) -> int:
        """Number of registrations since the feed began, for comparison with `registered_at`."""
        return self._count

    @property
    def by_id(self) -> dict[int, int] | None:
        """The producers by id, for `kernel.fast_append`: the 16 low bits of a value are the epoch
        of a producer that is CURRENT, and equal no epoch if it is sealed. None before the feed is
        complete. Packed ones are missing: `standing` adds them.
        """
        return self._producers if self.is_fed else None

    def begin_feed(self) -> None:
        """Forget everything: a feed follows."""
        self.is_fed = False
        self._producers.clear()
        self._ids.clear()
        self._branches.clear()
        self._packed = PackedRegistrations()
        self._count = 0

    def end_feed(self) -> None:
        """Note that everything was fed."""
        self.is_fed = True

    def try_pack(self, payload: bytes | memoryview) -> int | None:
        """Register the producers of a message of a feed as a whole, if it has nothing else. Returns
        the highest ordinal; None: nothing was done.
        """
        if self.is_fed:
            return None
        ordinal = self._packed.try_extend_by(payload, self._ids)
        self._count += ordinal is not None
        return ordinal

    def _unpack(self, index: int) -> None:
        """Keep a packed id like those that are used."""
        ordinal, id_number, producer_id, epoch = self._packed.take(index)
        self._producers[producer_id] = 1 << _SINCE_SHIFT | epoch
        self._ids[id_number] = ordinal << _ORDINAL_SHIFT | producer_id

    def _registered(self, producer_id: int) -> int | None:
        """The value of `by_id`, also of a packed producer."""
        found = self._producers.get(producer_id)
        if found is None and (index := self._packed.find_producer(producer_id)) is not None:
            self._unpack(index)
            found = self._producers[producer_id]
        return found

    def apply(self, decision: Decision) -> None:
        """Register the producers of a decision, unless a later one of its transactional id is
        known.
        """
        ordinal, id_number, _, registered = decision
        if id_number == NO_TRANSACTIONAL_ID:
            return
        if (index := self._packed.find(id_number)) is not None:
            self._unpack(index)
        known = self._ids.get(id_number)
        if known is not None and known >> _ORDINAL_SHIFT > ordinal:
            return
        earlier_ids = () if known is None else (
            known & _PRODUCER_MASK, *self._branches.pop(id_number, ())
        )  # fmt: skip
        before = {
            producer_id: self._producers.pop(producer_id, None) for producer_id in earlier_ids
        }
        self._count += 1
        for producer_id, epoch, state in registered:
            sealed = _SEALED if state is Registration.SEALED else 0
            earlier = before.get(producer_id)
            is_same = earlier is not None and earlier & _EPOCH_MASK == epoch
            since = earlier >> _SINCE_SHIFT if is_same and earlier is not None else self._count
            self._producers[producer_id] = since << _SINCE_SHIFT | sealed | epoch
        if registered:
            self._ids[id_number] = ordinal << _ORDINAL_SHIFT | registered[0].producer_id
            if len(registered) > 1:
                self._branches[id_number] = tuple(one.producer_id for one in registered[1:])
        else:
            self._ids.pop(id_number, None)

    def standing(self, producer_id: int, epoch: int) -> Standing:
        """Return whether a batch of this epoch may be taken. Sealed ones may not."""
        registered = self._registered(producer_id)
        if not self.is_fed:
            return Standing.NOT_YET
        if registered is None:
            return Standing.FENCED
        if epoch > registered & _EPOCH_MASK:
            return Standing.NOT_YET
        # one comparison for: the same epoch, and not sealed
        return (
            Standing.CURRENT if registered & (_SEALED | _EPOCH_MASK) == epoch else Standing.FENCED
        )

    def is_registered(self, producer_id: int, epoch: int) -> bool:
        """True if the transaction of this epoch may be open: also if it is sealed."""
        registered = self._registered(producer_id)
        return registered is not None and registered & _EPOCH_MASK == epoch

    def registered_at(self, producer_id: int, epoch: int) -> int:
        """Return the `registration_count` when this epoch was registered. 0 if it is unknown."""
        registered = self._registered(producer_id)
        if registered is None or registered & _EPOCH_MASK != epoch:
            return 0
        return registered >> _SINCE_SHIFT
