"""Control region: the phase of the appliance, and the generation, liveness and counters of each
process.

Owner:
- Supervisor: phase, generations, pids and liveness.
- Each process: its own heartbeat and counters.
- Controller: the generations that it has fed.

Layout: `ControlLayout`, `ProcessWord`.

Crash: removed with the instance. A restarted process finds its generation here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shm.memory.atomic_word import AtomicBuffer, AtomicCounter
from shm.memory.layout import WORD_BYTES, ControlLayout, Measure, Phase, ProcessWord, Role
from shm.memory.region import Region
from shm.tables.measurements import (
    Counters,
    CreditState,
    Exemplars,
    Histogram,
    ThrottleState,
)

if TYPE_CHECKING:
    from shm.tables.kafka_measurements import KafkaMeasurements
    from shm.tables.rate_uses import RateUses


class _Cells(dict[ProcessWord, AtomicCounter]):
    """The counters of a process's words, each made when it is first used."""

    def __init__(self, words: AtomicBuffer, layout: ControlLayout, role: Role, index: int) -> None:
        super().__init__()
        self._words = words
        self._start = layout.process_word(role, index, ProcessWord(0))

    def __missing__(self, word: ProcessWord) -> AtomicCounter:
        cell = self[word] = AtomicCounter(self._words, self._start + word * WORD_BYTES)
        return cell


class ProcessSlot:
    """Words of one process."""

    def __init__(self, words: AtomicBuffer, layout: ControlLayout, role: Role, index: int) -> None:
        self.role = role
        self.index = index
        self._words = words
        self._layout = layout
        self._cells = _Cells(words, layout, role, index)

    def load(self, word: ProcessWord) -> int:
        return self._cells[word].load()

    def store(self, word: ProcessWord, value: int) -> None:
        self._cells[word].store(value)

    def cell(self, word: ProcessWord) -> AtomicCounter:
        return self._cells[word]

    def histogram(self, measure: Measure) -> Histogram:
        return Histogram(self._words, self._layout.histogram(self.role, self.index, measure))

    @property
    def exemplars(self) -> Exemplars:
        """Front: traces of its PRODUCE durations."""
        return Exemplars(self._words, self._layout.exemplars(self.index))

    @property
    def throttles(self) -> ThrottleState:
        """Front: waits for quotas."""
        return ThrottleState(self._words, self._layout.credit(self.index))

    @property
    def rate_uses(self) -> RateUses:
        """Front: uses of the rates that fronts share."""
        from shm.tables.rate_uses import RateUses  # a front without quotas has no use for it

        return RateUses(self._words, self._layout, self.index)

    @property
    def credit(self) -> CreditState:
        """Front: the occupancy of its credit."""
        return CreditState(self._words, self._layout.credit(self.index))

    @property
    def kafka(self) -> KafkaMeasurements:
        """Measurements of the Kafka gateway."""
        from shm.tables.kafka_measurements import KafkaMeasurements  # most processes have no use

        return KafkaMeasurements(self._words, self._layout.kafka)

    @property
    def requests(self) -> Counters:
        """Requests by API."""
        return Counters(self._words, self._layout.request_counters(self.role, self.index))

    @property
    def errors(self) -> Counters:
        """Refused requests, or parts of them, by error code."""
        return Counters(self._words, self._layout.error_counters(self.role, self.index))

    def show_decisions(self, decided: int, carried_out: int) -> None:
        """Groups: the newest durable decision about a transaction, and the one up to which all are
        carried out. A predecessor's newest one counts, too.
        """
        self.store(ProcessWord.DECIDED, max(decided + 1, self.load(ProcessWord.DECIDED)))
        self.store(ProcessWord.CARRIED_OUT, carried_out + 1)

    def decisions(self) -> tuple[int, int]:
        """The newest decision, and the one up to which all are carried out: the numbers of
        `show_decisions` plus 1. After a start of the appliance, until the coordinator has read the
        decisions that are stored, they say that one is not carried out.
        """
        return self.load(ProcessWord.DECIDED) or 1, self.load(ProcessWord.CARRIED_OUT)

    def is_live(self) -> bool:
        return bool(self._cells[ProcessWord.LIVE].load())


class Control:
    """Words of the whole region."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._layout = ControlLayout()
        self._phase = AtomicCounter(region.words, self._layout.phase)

    @property
    def phase(self) -> Phase:
        return Phase(self._phase.load())

    def set_phase(self, phase: Phase) -> None:
        self._phase.store(phase)

    def port(self, front: int) -> AtomicCounter:
        """Word of the TCP port that a front is bound to, 0 until it is bound or without TCP."""
        return AtomicCounter(self._region.words, self._layout.port(front))

    def process(self, role: Role, index: int) -> ProcessSlot:
        return ProcessSlot(self._region.words, self._layout, role, index)
