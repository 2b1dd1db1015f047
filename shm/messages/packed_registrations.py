"""Registered transactional ids at rest, packed. Thousands may be registered of which few are used.
One takes 27 bytes here, and hundreds as objects.

Owner: its maker, the coordinator or a worker.
Invariants:
- Id numbers ascend. Each id has one producer id, which is open, and no branches.
- An id that was taken is known elsewhere, and is not found here any more.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

_WORDS = 5
"""Words of a decision without an outcome, and with one open producer id (`_REGISTERED` in
`shm.messages.transaction_messages`): ordinal, id number, counts, producer id, epoch.
"""
_COUNTS = 1 << 32
"""No outcome, one registered producer."""
_EPOCHS = 1 << 15
_IDS_IN_MESSAGE = 200


class PackedRegistration(NamedTuple):
    """The registrations of the newest decision of an id."""

    ordinal: int
    id_number: int
    producer_id: int
    epoch: int


class PackedRegistrations:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._ordinals = array("q")
        self._numbers = array("q")
        self._producers = array("q")
        self._epochs = array("h")
        self._untaken = bytearray()
        """1 for each id that was not taken."""
        self._by_producer: array[int] | None = None
        """Indexes in the order of the producer ids, if that is another one and was asked for."""
        self._is_sorted = True
        """True if the producer ids ascend as the id numbers do."""
        self._count = 0

    def __len__(self) -> int:
        """Number of ids that were not taken."""
        return self._count

    # ---- filling ---------------------------------------------------------------------------------

    def try_extend(
        self, ordinals: Sequence[int], numbers: Sequence[int], producers: Sequence[int],
        epochs: Sequence[int],
    ) -> bool:  # fmt: skip
        """Add ids. False, and nothing is added, if their numbers do not ascend."""
        before = self._numbers[-1] if self._numbers else -1
        if not _ascends(numbers, before):
            return False
        last = self._producers[-1] if self._producers else -1
        self._is_sorted = self._is_sorted and _ascends(producers, last)
        self._by_producer = None
        self._ordinals.extend(array("q", ordinals))
        self._numbers.extend(array("q", numbers))
        self._producers.extend(array("q", producers))
        self._epochs.extend(array("h", epochs))
        self._untaken.extend(b"\1" * len(numbers))
        self._count += len(numbers)
        return True

    def try_extend_by(self, payload: bytes | memoryview, known: Mapping[int, object]) -> int | None:
        """Add the ids of a DECISIONS message that has nothing but decisions without outcome, with
        one open producer id each. Returns the highest ordinal; None: it has others, or one of the
        `known` numbers, or numbers that do not ascend, and nothing is added.
        """
        if not payload or len(payload) % (8 * _WORDS):
            return None
        words = array("q", bytes(payload))
        counts, epochs = words[2::_WORDS], words[4::_WORDS]
        if counts.count(_COUNTS) != len(counts) or not 0 <= min(epochs) <= max(epochs) < _EPOCHS:
            return None
        ordinals, numbers = words[0::_WORDS], words[1::_WORDS]
        if not known.keys().isdisjoint(numbers):
            return None
        is_added = self.try_extend(ordinals, numbers, words[3::_WORDS], epochs)
        return max(ordinals) if is_added else None

    # ---- looking up ------------------------------------------------------------------------------

    def find(self, id_number: int) -> int | None:
        """The index of an id that was not taken."""
        index = bisect_left(self._numbers, id_number)
        is_found = index < len(self._numbers) and self._numbers[index] == id_number
        return index if is_found and self._untaken[index] else None

    def find_producer(self, producer_id: int) -> int | None:
        """The index of the id that has this producer id, and was not taken."""
        producers = self._producers
        if self._is_sorted:
            index = bisect_left(producers, producer_id)
        else:
            order = self._by_producer
            if order is None:
                sorted_ones = sorted(range(len(producers)), key=producers.__getitem__)
                order = self._by_producer = array("I", sorted_ones)
            place = bisect_left(order, producer_id, key=producers.__getitem__)
            index = order[place] if place < len(order) else len(producers)
        is_found = index < len(producers) and producers[index] == producer_id
        return index if is_found and self._untaken[index] else None

    def at(self, index: int) -> PackedRegistration:
        """One id."""
        return PackedRegistration(
            self._ordinals[index], self._numbers[index], self._producers[index], self._epochs[index]
        )

    def take(self, index: int) -> PackedRegistration:
        """One id, which is not found any more."""
        self._count -= self._untaken[index]
        self._untaken[index] = 0
        return self.at(index)

    def first_numbers(self, limit: int) -> list[int]:
        """The lowest numbers of ids that were not taken."""
        numbers: list[int] = []
        start = 0
        while len(numbers) < limit and (index := self._untaken.find(1, start)) >= 0:
            numbers.append(self._numbers[index])
            start = index + 1
        return numbers

    # ---- messages --------------------------------------------------------------------------------

    def messages(self) -> Iterator[bytes]:
        """The payloads of DECISIONS messages of all ids that were not taken."""
        for begin in range(0, len(self._numbers), _IDS_IN_MESSAGE):
            part = slice(begin, begin + _IDS_IN_MESSAGE)
            untaken = self._untaken[part]
            count = sum(untaken)
            if not count:
                continue
            words = array("q", bytes(8 * _WORDS * count))
            words[0::_WORDS] = array("q", compress(self._ordinals[part], untaken))
            words[1::_WORDS] = array("q", compress(self._numbers[part], untaken))
            words[2::_WORDS] = array("q", [_COUNTS]) * count
            words[3::_WORDS] = array("q", compress(self._producers[part], untaken))
            words[4::_WORDS] = array("q", compress(self._epochs[part], untaken))
            yield words.tobytes()


def _ascends(values: Sequence[int], last: int) -> bool:
    for value in values:
        if value <= last:
            return False
        last = value
    return True
