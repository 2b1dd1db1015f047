"""The model of the program fuzzer's queues: the second table of docs/delivery.md as code.

Owner: one ProgramRun (`tests.fuzz.program.run`).
Invariants:
- A record has one holder, and none when it is accepted or given up.
- A delivery raises its count by one. A record that no program was given has no delivery, unless a
  process was killed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tests.fuzz.program.model import Place, expect


class Word(enum.Enum):
    """Knowledge about a record that a reader holds."""

    SILENT = "handed out by a poll"
    IN_LOOP = "handed out by a loop"
    LEFT = "handed out by a loop that an exception has left"
    KEPT = "waits for acknowledge()"
    MAYBE = "the next poll accepts it, if the one that was cut off has not"


@dataclass(slots=True)
class Job:
    """One record of a queue. `least` and `most`: how often it was delivered."""

    least: int = 0
    most: int = 0
    holder: object = None
    is_done: bool = False
    may_be_done: bool = False
    is_rejected: bool = False
    is_settled: bool = False
    """`commit` has confirmed what was said of it."""
    may_be_held: bool = False


class Queue:
    """The records of one share group."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.jobs: dict[Place, Job] = {}
        self._loss_count = 0

    def job(self, place: Place) -> Job:
        """The record at a place."""
        unseen = Job(most=self._loss_count, may_be_held=self._loss_count > 0)
        return self.jobs.setdefault(place, unseen)

    def lost_sight(self) -> None:
        """A process was killed: what it had acquired counts as delivered, and what was said may
        have come too late.
        """
        self._loss_count += 1
        for job in self.jobs.values():
            job.most += 1
            job.may_be_held = True
            if not job.is_settled:
                job.may_be_done = job.may_be_done or job.is_done or job.is_rejected
                job.is_done = job.is_rejected = False


@dataclass(slots=True)
class QueueReader:
    """A share consumer, from its construction to its end."""

    name: str
    queue: Queue
    is_implicit: bool
    words: dict[Place, Word] = field(default_factory=dict)
    said: set[Place] = field(default_factory=set)
    """Acknowledged, and not confirmed by `commit`."""
    has_acknowledged: bool = False
    """`acknowledge` was called since the last poll."""

    def __hash__(self) -> int:
        return id(self)

    def delivered(self, place: Place, count: int, *, in_loop: bool) -> None:
        """The program was given a record."""
        job = self.queue.job(place)
        where = f"{self.name}: {place[0].hex()[:6]}-{place[1]} offset {place[2]}"
        expect(not job.is_done, f"{where} comes again, and was accepted")
        expect(not job.is_rejected, f"{where} comes again, and was rejected")
        is_free = job.holder is None or job.may_be_held
        expect(is_free, f"{where} comes, and {getattr(job.holder, 'name', '')} holds it")
        expect(
            job.least + 1 <= count <= job.most + 1,
            f"{where} has delivery_count {count} behind {job.least} to {job.most} deliveries",
        )
        expect(count <= self.queue.limit, f"{where} is delivered {count} times")
        job.least = job.most = count
        job.holder, job.may_be_held, job.may_be_done, job.is_settled = self, False, False, False
        self.words[place] = Word.IN_LOOP if in_loop else Word.SILENT

    def _accept(self, place: Place) -> None:
        self.words.pop(place, None)
        job = self.queue.job(place)
        if job.holder is self:
            job.holder = None
            job.is_done, job.may_be_done = not job.may_be_held, True
            self.said.add(place)

    def asks(self) -> None:
        """A poll, or a loop that is begun: it accepts what the poll before has handed out."""
        for place, word in list(self.words.items()):
            if word in (Word.SILENT, Word.MAYBE) and self.is_implicit:
                if self.has_acknowledged:
                    self.words[place] = Word.KEPT
                else:
                    self._accept(place)
            elif word is Word.LEFT:
                self.words[place] = Word.KEPT
        self.has_acknowledged = False

    def may_have_asked(self) -> None:
        """`asks`, by a call that was cut off."""
        for place, word in list(self.words.items()):
            if word is Word.LEFT:
                self.words[place] = Word.KEPT
                self.queue.job(place).may_be_done = True
            elif word is Word.SILENT and self.is_implicit and not self.has_acknowledged:
                self.words[place] = Word.MAYBE
                self.queue.job(place).may_be_done = True

    def asks_on(self, place: Place) -> None:
        """A loop asks for the next record."""
        if self.words.get(place) is Word.IN_LOOP:
            if self.is_implicit:
                self._accept(place)
            else:
                self.words[place] = Word.KEPT

    def leaves_loop(self, place: Place, *, by_break: bool) -> None:
        """A loop ends with this record."""
        if self.words.get(place) is Word.IN_LOOP:
            self.words[place] = Word.SILENT if by_break else Word.LEFT

    def is_cut_off_in_loop(self, place: Place) -> None:
        """A loop was asked for the next record, and did not get that far."""
        if self.words.get(place) is Word.IN_LOOP:
            self.words[place] = Word.KEPT
            self.queue.job(place).may_be_done = self.is_implicit

    def acknowledges(self, place: Place, outcome: str) -> None:
        """The program says what becomes of a record that it holds."""
        self.has_acknowledged = True
        job = self.queue.job(place)
        if outcome == "accept":
            self._accept(place)
        elif outcome == "release":
            self.words.pop(place, None)
            job.holder = None
            self.said.add(place)
        elif outcome == "reject":
            self.words.pop(place, None)
            job.holder, job.is_rejected = None, not job.may_be_held
            job.may_be_done = True
            self.said.add(place)
        elif outcome == "renew":
            self.words[place] = Word.KEPT

    def commits(self, *, is_certain: bool) -> None:
        """`commit`: accepts what was delivered last, unless something was said since."""
        if self.is_implicit and not self.has_acknowledged:
            for place, word in list(self.words.items()):
                if word is Word.KEPT:
                    continue
                if is_certain:
                    self._accept(place)
                else:
                    self.words[place] = Word.MAYBE
                    self.queue.job(place).may_be_done = True
        if is_certain:
            for place in self.said:
                self.queue.job(place).is_settled = True
            self.said.clear()

    def failed_on(self, place: Place) -> None:
        """A deserializer failed on the record: it was delivered, and is released."""
        job = self.queue.job(place)
        job.least += 1
        job.most += 1

    def closed(self) -> None:
        """The end, or `unsubscribe`: what is not accepted is released."""
        for place in self.words:
            job = self.queue.job(place)
            if job.holder is self:
                job.holder = None
        self.words.clear()
        self.has_acknowledged = False
