"""The model of the program fuzzer: docs/delivery.md as code.

It is fed with each call of a program and with each result, and says what the next one may be. A
value that a fault leaves undecided is the set of the values that it may have.

Owner: one ProgramRun (`tests.fuzz.program.run`).
Invariants:
- A place (topic id, partition, offset) has one value.
- A cursor's offset is the next record of its partition: exactly one, unless a start or a fault
  leaves several. It is moved by deliveries and by the program's own seeks alone.
- A committed offset is one that a cursor had, at a moment at which it may be committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Key = tuple[str, int]
"""(topic, partition)"""
Place = tuple[bytes, int, int]
"""(topic id, partition, offset)"""


class Finding(AssertionError):
    """A broken promise."""


def expect(holds: object, finding: str) -> None:
    """Raises Finding."""
    if not holds:
        raise Finding(finding)


class Topics:
    """The creations of each name, and the values that were seen in their logs."""

    def __init__(self) -> None:
        self.creations: dict[str, list[bytes]] = {}
        self.live: set[str] = set()
        self._values: dict[Place, bytes] = {}
        self._known: set[bytes] = set()

    def created(self, name: str, topic_id: bytes) -> None:
        """The name is that of a new topic from now on."""
        expect(topic_id not in self._known, f"{name} was created with an id that it had before")
        self._known.add(topic_id)
        self.creations.setdefault(name, []).append(topic_id)
        self.live.add(name)

    def see(self, place: Place, value: bytes, where: str) -> None:
        """A record was read or acknowledged."""
        expect(place[0] in self._known, f"{where} is of a topic that never was: {place[0].hex()}")
        known = self._values.setdefault(place, value)
        expect(known == value, f"{where} was {known!r} and is {value!r}")

    def is_current(self, topic_id: bytes | None) -> bool:
        """True for the topic that has its name now."""
        return any(
            name in self.live and ids[-1] == topic_id for name, ids in self.creations.items()
        )


class Committed:
    """The committed offset of one group in one partition: `values[certain:]` may be it, in the
    order in which they were committed. 0 stands for none, too.
    """

    def __init__(self) -> None:
        self.values = [0]
        self.certain = 0
        self._pending: dict[object, list[int]] = {}
        """Reader -> its commits that may still be on their way."""

    def now(self, since: int | None = None) -> set[int]:
        """The offsets that it may be; that it may have been since then."""
        return set(self.values[self.certain if since is None else since :])

    def may_be(self, reader: object, offsets: Iterable[int]) -> int:
        """A commit whose end is not known, of one of these offsets. Returns its number."""
        number = len(self.values)
        self.values += sorted(offsets)
        self._pending.setdefault(reader, []).extend(offsets)
        return number

    def is_surely(self, reader: object, offsets: Iterable[int]) -> None:
        """A commit that was confirmed: behind all commits of this reader."""
        self._pending.pop(reader, None)
        self.certain = len(self.values)
        self.values += sorted(offsets)
        for others in self._pending.values():
            self.values += others

    def confirmed(self, number: int) -> None:
        """The commit of this number took place: one of its offsets, or what came later."""
        self.certain = max(self.certain, number)

    def ended(self, reader: object) -> None:
        """The reader commits no more."""
        self._pending.pop(reader, None)


@dataclass(slots=True)
class Cursor:
    """An assigned partition of a reader."""

    since: dict[bytes, int]
    """Creation -> what was certain of its committed offset when the partition was assigned."""
    topic_id: bytes | None
    """None: of several creations the reader may have assigned any."""
    former: Cursor | None = None
    """The cursor of a deleted topic of that name, which the reader may go on with."""
    offsets: set[int] | None = None
    """None: it begins at the committed offset, which nobody has asked for yet."""
    repeated: set[int] = field(default_factory=set)
    """Offsets where auto commit has nothing to do: the start, and the latest commit of
    this reader.
    """


@dataclass(slots=True)
class Reader:
    """A consumer, from its construction to its end."""

    name: str
    topics: Topics
    offsets: dict[tuple[str, bytes, int], Committed]
    """(group, topic id, partition) -> committed offset; of all readers."""
    group: str | None
    commits_itself: bool
    commits_at_each_call: bool
    cursors: dict[Key, Cursor] = field(default_factory=dict)
    paused: set[Key] = field(default_factory=set)
    last: dict[Key, int] = field(default_factory=dict)
    """First offset of each partition in the last delivery."""
    may_be_processed: bool = False
    """The call behind it was cut off: perhaps before it began."""

    def __hash__(self) -> int:
        return id(self)

    def committed(self, key: Key, topic_id: bytes) -> Committed:
        """The group's offset of a partition."""
        return self.offsets.setdefault((self.group or "", topic_id, key[1]), Committed())

    # ---- assignment ------------------------------------------------------------------------------

    def assigned(self, keys: Iterable[Key], formers: Mapping[Key, Cursor] | None = None) -> None:
        """New partitions, which begin at what is committed, or at the first record. `formers`: the
        cursors of deleted topics that the reader may go on with.
        """
        for key in keys:
            ids = self.topics.creations.get(key[0], [])
            since = {topic_id: self.committed(key, topic_id).certain for topic_id in ids}
            former = (formers or {}).get(key)
            if former is not None and former.topic_id is None:
                former = former.former
            is_known = len(ids) == 1 and former is None
            self.cursors[key] = Cursor(since, ids[0] if is_known else None, former)

    def dropped(self, keys: Iterable[Key]) -> None:
        """These are not read any more."""
        for key in keys:
            self.cursors.pop(key, None)
            self.paused.discard(key)
            self.last.pop(key, None)

    def revoked(self, keys: Iterable[Key], *, is_certain: bool, is_handled: bool = True) -> None:
        """Auto commit ends with what was delivered; the partitions are another reader's."""
        keys = [key for key in keys if key in self.cursors]
        if self.commits_itself:
            for key in keys:
                self._commit_one(key, is_certain=is_certain, is_handled=is_handled)
        self.dropped(keys)

    def _commit_one(self, key: Key, *, is_certain: bool, is_handled: bool) -> None:
        if self.group is None:
            return
        cursor = self.cursors[key]
        if cursor.topic_id is None:
            for topic_id in self.topics.creations.get(key[0], []):
                offsets = (cursor.offsets or set()) | self._starts(key, topic_id)
                self.committed(key, topic_id).may_be(self, offsets)
            return
        committed = self.committed(key, cursor.topic_id)
        offsets = self.offsets_of(key)
        if not is_handled:
            first = {self.last[key]} if key in self.last else offsets
            offsets = first | offsets if self.may_be_processed else first
            # It never goes back behind what the program has committed itself.
            is_certain = is_certain and max(committed.now()) < min(offsets)
        if is_certain and not offsets <= cursor.repeated:
            committed.is_surely(self, offsets)
        else:
            committed.may_be(self, offsets)
        cursor.repeated = offsets

    def closed(self, *, is_certain: bool, is_handled: bool) -> None:
        """The end: with auto commit what was delivered is committed, unless the block raised."""
        self.revoked(list(self.cursors), is_certain=is_certain, is_handled=is_handled)
        for committed in self.offsets.values():
            committed.ended(self)

    # ---- reading ---------------------------------------------------------------------------------

    def asks(self) -> None:
        """A call asks for more: what was delivered is processed."""
        self.may_commit()
        self.last, self.may_be_processed = {}, False

    def may_commit(self) -> None:
        """A call that asks for more has perhaps begun: auto commit of what was delivered."""
        if self.commits_itself and self.commits_at_each_call:
            for key in self.cursors:
                self._commit_one(key, is_certain=False, is_handled=True)

    def delivered(self, records: Iterable[tuple[Key, bytes, int]]) -> None:
        """(key, topic id, offset) of what one call has delivered, in its order."""
        self.last, self.may_be_processed = {}, False
        for key, topic_id, offset in records:
            where = f"{self.name}: offset {offset} of {key[0]}-{key[1]}"
            cursor = self.cursors.get(key)
            expect(cursor is not None, f"{where} came, and the partition is not assigned")
            assert cursor is not None
            former = cursor.former
            if cursor.topic_id is None and former is not None and former.topic_id == topic_id:
                cursor = self.cursors[key] = former
            expect(key not in self.paused, f"{where} came while the partition is paused")
            expect(
                cursor.topic_id in (None, topic_id),
                f"{where} is of another topic of that name: {topic_id.hex()}",
            )
            cursor.topic_id = topic_id
            allowed = self.offsets_of(key)
            expect(offset in allowed, f"{where} came where {sorted(allowed)} belongs")
            cursor.offsets = {offset + 1}
            self.last.setdefault(key, offset)

    def offsets_of(self, key: Key) -> set[int]:
        """Offsets that the cursor may be at."""
        cursor = self.cursors[key]
        if cursor.offsets is not None:
            return cursor.offsets
        return {0} if cursor.topic_id is None else self._starts(key, cursor.topic_id)

    def _starts(self, key: Key, topic_id: bytes) -> set[int]:
        if self.group is None:
            return {0}
        since = self.cursors[key].since.get(topic_id, 0)
        return self.committed(key, topic_id).now(since)

    def sought(self, key: Key, offset: int) -> None:
        """The program goes on elsewhere."""
        self.cursors[key].offsets = {offset}
        self.last.pop(key, None)

    def is_at(self, positions: Mapping[Key, int]) -> None:
        """The consumer says where it is."""
        for key, offset in positions.items():
            expect(key in self.cursors, f"{self.name} has a position of {key}: not assigned")
            cursor = self.cursors[key]
            if cursor.topic_id is not None:
                allowed = self.offsets_of(key)
                expect(
                    offset in allowed,
                    f"{self.name} is at {offset} of {key[0]}-{key[1]}, not at {sorted(allowed)}",
                )
                if cursor.offsets is None:
                    cursor.repeated = {offset}
                cursor.offsets = {offset}

    # ---- committing ------------------------------------------------------------------------------

    def commits(
        self, offsets: Mapping[Key, int] | None, *, is_certain: bool
    ) -> dict[Committed, int]:
        """The program commits: None, all that was delivered. Returns the numbers of the commits."""
        numbers: dict[Committed, int] = {}
        for key in list(self.cursors) if offsets is None else offsets:
            topic_id = self.cursors[key].topic_id
            if topic_id is None:
                self._commit_one(key, is_certain=False, is_handled=True)
                continue
            committed = self.committed(key, topic_id)
            values = self.offsets_of(key) if offsets is None else {offsets[key]}
            self.cursors[key].repeated = values
            if is_certain:
                committed.is_surely(self, values)
            else:
                numbers[committed] = committed.may_be(self, values)
        return numbers
