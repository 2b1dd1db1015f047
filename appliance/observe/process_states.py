"""States of the appliance's processes, as the control region shows them: health and metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from appliance.observe.occupancy import OccupancyReader
from shm.memory.layout import (
    FLUSHERS_MAX,
    DirectoryState,
    Measure,
    Phase,
    ProcessWord,
    Role,
)
from shm.runtime.agent_runner import process_name
from shm.tables.control import Control
from shm.tables.measurements import CreditValues, Exemplar, HistogramValues

if TYPE_CHECKING:
    from shm.tables.kafka_measurements import KafkaValues

_MEASURES = {
    Role.FRONT: (Measure.PRODUCE, Measure.FETCH, Measure.DELIVERY),
    Role.FLUSHER: (Measure.SYNC,),
    Role.GROUPS: (Measure.COMMIT,),
}
LOST_DISK_ADVICE = (
    "mount it again, then run: tailrace topic online TOPIC; if it is lost for good, stop the "
    "appliance and run: tailrace disk replace"
)
FULL_DISK_ADVICE = (
    "free some space, lower retention.ms or retention.bytes, or run tailrace topic delete-records"
)
GROUPS_REFUSED = (
    "groups and transactions are refused because groups.db cannot be used: the log's "
    "groups_not_served says why, and tailrace status"
)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process."""

    role: Role
    index: int
    is_live: bool
    is_ready: bool
    restarts: int
    """Times that it was started again after it had ended by itself."""
    resident_bytes: int
    internal_errors: int
    pid: int = 0
    requests: Mapping[int, int] = field(default_factory=dict)
    """Requests by API."""
    errors: Mapping[int, int] = field(default_factory=dict)
    """Refused requests, or parts of them, by error code."""
    durations: Mapping[Measure, HistogramValues] = field(default_factory=dict)
    exemplars: Mapping[int, Exemplar] = field(default_factory=dict)
    """Front: traces of its PRODUCE durations, by bucket."""
    credit: CreditValues | None = None
    """Front: the occupancy of its credit."""
    throttles: tuple[int, Mapping[str, int]] = (0, {})
    """Front: waits for quotas, and microseconds by quota."""
    sessions: int = 0
    """Front: open connections."""
    sent_bytes: int = 0
    """Front: bytes of responses to fetches."""
    refused: int = 0
    """Front: connections that were refused."""
    kafka: KafkaValues | None = None
    """The Kafka gateway: its measurements."""
    cpu_seconds: float = 0.0
    open_files: int = 0

    @property
    def name(self) -> str:
        return process_name(self.role, self.index)


class CleanerCounts(NamedTuple):
    """Counters of a data directory's cleaner, over all its starts."""

    name: str
    bytes_in: int
    bytes_out: int
    passes: int
    throttled_seconds: float


class ProcessStates:
    """Reads the control region anew for each question."""

    def __init__(
        self,
        control: Control,
        roles: Callable[[], list[tuple[Role, int]]],
        data_dirs: Sequence[str] = (),
        occupancy: OccupancyReader | None = None,
        gateway: int | None = None,
    ) -> None:
        """`roles`: the processes that should run. `data_dirs`: by the numbers of their flushers.
        `gateway`: the Kafka gateway's number among the fronts.
        """
        self.control = control
        self.occupancy = occupancy
        self._data_dirs = data_dirs
        self._roles = roles
        self._gateway = None if gateway is None else (Role.FRONT, gateway)

    def processes(self) -> list[ProcessState]:
        found = []
        for role, index in self._roles():
            slot = self.control.process(role, index)
            generation = slot.load(ProcessWord.GENERATION)
            is_ready = (
                role is Role.SUPERVISOR or slot.load(ProcessWord.READY_GENERATION) == generation
            )
            pid = slot.load(ProcessWord.PID)
            found.append(
                ProcessState(
                    role, index, slot.is_live(), is_ready,
                    slot.load(ProcessWord.RESTARTS), _resident_bytes(pid),
                    slot.load(ProcessWord.INTERNAL_ERRORS), pid, slot.requests.values(),
                    slot.errors.values(),
                    {kind: slot.histogram(kind).values() for kind in _MEASURES.get(role, ())},
                    slot.exemplars.values() if role is Role.FRONT else {},
                    slot.credit.values() if role is Role.FRONT else None,
                    slot.throttles.values() if role is Role.FRONT else (0, {}),
                    slot.load(ProcessWord.SESSIONS) if role is Role.FRONT else 0,
                    slot.load(ProcessWord.BYTES_COUNT) if role is Role.FRONT else 0,
                    slot.load(ProcessWord.REFUSED_COUNT) if role is Role.FRONT else 0,
                    slot.kafka.values() if (role, index) == self._gateway else None,
                    _cpu_seconds(pid), _open_files(pid),
                )
            )  # fmt: skip
        return found

    def cleaners(self) -> list[CleanerCounts]:
        """The cleaners that have been started."""
        slots = [self.control.process(Role.CLEANER, d) for d in range(FLUSHERS_MAX)]
        return [
            CleanerCounts(
                process_name(Role.CLEANER, index),
                slot.load(ProcessWord.CLEANED_BYTES_IN),
                slot.load(ProcessWord.CLEANED_BYTES_OUT),
                slot.load(ProcessWord.CLEANED_PASSES),
                slot.load(ProcessWord.THROTTLED_US) / 1e6,
            )
            for index, slot in enumerate(slots)
            if slot.load(ProcessWord.GENERATION)
        ]

    def are_groups_refused(self) -> bool:
        """True while requests of groups and transactions are refused."""
        return bool(self.control.process(Role.GROUPS, 0).load(ProcessWord.GROUPS_REFUSED))

    def not_serving(self) -> list[str]:
        """Reasons why the appliance is not ready: processes that do not serve, directories that
        take no writes, and groups that are refused. Empty: it is ready.
        """
        if self.control.phase is not Phase.RUNNING:
            return [f"the appliance is {self.control.phase.name.lower()}"]
        why = {
            DirectoryState.FULL: f"its disk is full: {FULL_DISK_ADVICE}",
            DirectoryState.LOST: f"its disk is gone: {LOST_DISK_ADVICE}",
        }
        states = [
            (path, self.control.process(Role.FLUSHER, index).load(ProcessWord.DISK_FULL))
            for index, path in enumerate(self._data_dirs)
        ]
        return [
            *(
                f"{path} takes no writes because {why[DirectoryState(state)]}"
                for path, state in states
                if state
            ),
            *(
                process.name
                for process in self.processes()
                if not (process.is_live and process.is_ready) and process.role is not Role.CLEANER
            ),
            *([GROUPS_REFUSED] if self.are_groups_refused() else ()),
        ]


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _cpu_seconds(pid: int) -> float:
    """Processor time of all threads, of user and kernel."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except (OSError, IndexError, ValueError):
        return 0.0


def _open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
