"""The control region: which processes live, which phase the appliance is in, who is making progress.

Owner: supervisor for phase, generations, pids and liveness; each process for its own beat and counters; coordinator for who has been fed.
Layout: `ControlLayout`, `ProcessWord`.
Crash: removed with the instance; a restarted process finds its generation here.
"""

from __future__ import annotations

from shm.cell import Cell, Words
from shm.layout import ControlLayout, Phase, ProcessWord, Role
from shm.region import Region


class ProcessSlot:
    """One process's words."""

    def __init__(self, words: Words, layout: ControlLayout, role: Role, index: int) -> None:
        self.role = role
        self.index = index
        self._cells = {word: Cell(words, layout.process_word(role, index, word)) for word in ProcessWord}

    def load(self, word: ProcessWord) -> int:
        return self._cells[word].load()

    def store(self, word: ProcessWord, value: int) -> None:
        self._cells[word].store(value)

    def cell(self, word: ProcessWord) -> Cell:
        return self._cells[word]

    def is_live(self) -> bool:
        return bool(self._cells[ProcessWord.LIVE].load())


class Control:
    """The whole region."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._layout = ControlLayout()
        self._phase = Cell(region.words, self._layout.phase)

    @property
    def phase(self) -> Phase:
        return Phase(self._phase.load())

    def set_phase(self, phase: Phase) -> None:
        self._phase.store(phase)

    def port(self, front: int) -> Cell:
        """The TCP port that front number `front` is bound to, 0 until it is (or where it has none)."""
        return Cell(self._region.words, self._layout.port(front))

    def process(self, role: Role, index: int) -> ProcessSlot:
        return ProcessSlot(self._region.words, self._layout, role, index)
