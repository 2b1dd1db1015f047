"""How every child process begins: its specification, its name, its tie to the supervisor, its signals.

Owner: the supervisor writes the specification into a file in memory that the child inherits; `start()` reads it.
Invariants: a child never outlives its supervisor (PDEATHSIG, and the parent is checked after it is set, since it may have died in between);
    SIGINT and SIGTERM are the supervisor's affair (terminals, `timeout` and some service managers send them to the whole group, and the
    children must end in order): a child is stopped by its STOP word and a ring.

Every agent's module has `build(context, ...)`, which wires it from its specification, and `main()`, which runs what was built in a process of its own.
The simulation (`tests/sim`) builds the same agents over another context.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Protocol

import orjson

from shm.cell import Cell
from shm.control import Control, ProcessSlot
from shm.crash_points import arm_from_environment
from shm.doorbell import Doorbell
from shm.lane import LaneReader, LaneWriter
from shm.layout import ProcessWord, RegionKind, Role
from shm.partition_table import PartitionTable
from shm.region import Region, RegionError
from shm.runtime.log_lines import RateLimit, formatter

SPEC_VARIABLE = "TAILRACE_PROCESS"
SUPERVISORS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""A child is started with these blocked: they must not end it before it ignores them."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
EXIT_PARENT_GONE = 71
EXIT_ADDRESS_IN_USE = 72
EXIT_DATA_UNUSABLE = 73
EXIT_SHARED_MEMORY = 75
"""Exit codes of children that mean something; the rest of the table is `appliance.restart_policy`."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Everything a child needs to know to serve, or to go on where its predecessor was killed."""

    role: int
    index: int
    generation: int
    instance: str
    """32 hexadecimal digits, the data directory's identity; clients know the appliance by it."""
    parent_pid: int
    data_dirs: list[str]
    regions: dict[str, str]
    """Logical name ("control", "ring-0", "table-0", "front-0>worker-0") -> shared-memory name."""
    doorbells: dict[str, int]
    """Process name ("worker-0") -> file descriptor."""
    cores: list[int] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    recover: list[dict[str, Any]] = field(default_factory=list)
    """Rings and tables that an earlier run left; a flusher drains them first."""
    shared_memory: str = ""
    """What the regions' headers name, where that is not `instance`: a copied data directory has shared memory of its own."""

    def to_inherited_file(self) -> int:
        """A file in memory that a child inherits, with the specification in it: an environment variable holds 128 KiB, too little for many processes.
        Raises OSError.
        """
        fd = os.memfd_create("tailrace-specification", 0)
        rest = memoryview(orjson.dumps(asdict(self)))
        while len(rest):
            rest = rest[os.write(fd, rest) :]
        return fd

    @classmethod
    def from_environment(cls) -> ProcessSpec:
        """What the supervisor wrote, by the number of the inherited file."""
        fd = int(os.environ[SPEC_VARIABLE])
        try:
            return cls(**orjson.loads(os.pread(fd, os.fstat(fd).st_size, 0)))
        finally:
            os.close(fd)


def process_name(role: Role, index: int) -> str:
    """How processes are called in doorbell and lane names: "worker-0", but "coordinator"."""
    return role.name.lower() if role in (Role.SUPERVISOR, Role.COORDINATOR, Role.CONSOLE) else f"{role.name.lower()}-{index}"


def comm_name(role: Role, index: int) -> str:
    """What `ps` and /proc/PID/comm show; 15 bytes at most."""
    short = "coord" if role is Role.COORDINATOR else role.name.lower()
    return f"tr-{short}-{index}"[:15]


def set_comm_name(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Clock:
    """Where an agent takes the time from."""

    monotonic_ns: Callable[[], int]
    wall_us: Callable[[], int]
    """Microseconds since 1970; may jump."""


REAL_CLOCK = Clock(time.monotonic_ns, lambda: time.time_ns() // 1000)


class ProcessContext:
    """A started child: its memory attached, its bells, its stop flag."""

    def __init__(self, spec: ProcessSpec, clock: Clock = REAL_CLOCK) -> None:
        self.spec = spec
        self.clock = clock
        self.role = Role(spec.role)
        self.index = spec.index
        self.instance = bytes.fromhex(spec.shared_memory or spec.instance)
        self.doorbell = self.bell(self.role, self.index)
        self.control = Control(self.attach("control", RegionKind.CONTROL))
        self.slot: ProcessSlot = self.control.process(self.role, spec.index)

    def attach(self, logical_name: str, kind: RegionKind) -> Region:
        return self.attach_named(self.spec.regions[logical_name], kind)

    def attach_named(self, name: str, kind: RegionKind) -> Region:
        """By its name in shared memory, which for an earlier run's regions is all there is."""
        return Region.attach(name, kind, self.instance)

    def bell(self, role: Role, index: int) -> Doorbell:
        return Doorbell(self.spec.doorbells[process_name(role, index)])

    def lane_writer(self, target: str) -> LaneWriter:
        return LaneWriter(self.attach(f"{process_name(self.role, self.index)}>{target}", RegionKind.LANE))

    def lane_reader(self, source: str, resume_at: int = 0) -> LaneReader:
        return LaneReader(self.attach(f"{source}>{process_name(self.role, self.index)}", RegionKind.LANE), resume_at)

    def table(self, data_dir: int) -> PartitionTable:
        return PartitionTable(self.attach(f"table-{data_dir}", RegionKind.TABLE))

    def ask_for_feed(self) -> None:
        """Have the coordinator send the whole catalog to this generation."""
        self.slot.store(ProcessWord.WANTS_FEED, self.spec.generation)
        self.bell(Role.COORDINATOR, 0).ring()

    def report_ready(self) -> None:
        """Tell coordinator and supervisor that this generation serves."""
        self.slot.store(ProcessWord.READY_GENERATION, self.spec.generation)
        self.bell(Role.COORDINATOR, 0).ring()
        self.bell(Role.SUPERVISOR, 0).ring()
        if self.spec.generation > 1:
            self.ring_everybody()

    def ring_everybody(self) -> None:
        """A predecessor may have been killed between publishing something and ringing who waits for it."""
        for fd in self.spec.doorbells.values():
            Doorbell(fd).ring()


class NoPandas:
    """pyarrow loads pandas, where there is one, with the first array it makes: 0.3 s in which nothing is delivered, and 40 MB. To the appliance there is
    none.
    """

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for pandas; others are not its affair."""
        if fullname == "pandas":
            raise ModuleNotFoundError("no process of the appliance uses pandas", name=fullname)


def start() -> ProcessContext:
    """Turn this interpreter into the child that its specification describes."""
    spec = ProcessSpec.from_environment()
    if spec.role != Role.FRONT:  # a front makes no files, and who may connect to its ipc sockets is for its service's umask to say
        os.umask(0o077)
    sys.excepthook = _end_with_a_sentence
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != spec.parent_pid:
        sys.exit(EXIT_PARENT_GONE)
    libc.prctl(_PR_SET_NAME, comm_name(Role(spec.role), spec.index).encode(), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISORS_SIGNALS)
    if spec.generation == 1:
        arm_from_environment()
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    sys.meta_path.insert(0, NoPandas())
    return ProcessContext(spec)


def _end_with_a_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What ends a process, in one line first: its trace is for who mends the program. Shared memory that is gone ends the appliance: no successor would
    find it either.
    """
    if isinstance(error, RegionError):
        sys.stderr.write(f"tailrace: {error}\n")
        sys.stderr.flush()
        os._exit(EXIT_SHARED_MEMORY)
    reason = str(error)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        reason += "; allow more open files: ulimit -n 65536, or LimitNOFILE=65536 in the unit"
    logging.getLogger(__name__).error("ended_by_error kind=%s reason=%r", kind.__name__, reason)
    sys.__excepthook__(kind, error, trace)


def configure_logging(context: ProcessContext) -> None:
    """key=value lines on standard error, under the process's name."""
    log_to_stderr(comm_name(context.role, context.index), context.spec.settings.get("log_level", "info"))


def log_to_stderr(name: str, level: str = "info") -> None:
    """`level`: debug, info, warning or error; what is below it is not written."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(name, sys.stderr.fileno()))
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class Agent(Protocol):
    """A process's work, cut into steps that never wait (the word and the idea are Aeron's)."""

    def step(self, now_ns: int) -> int:
        """Do what can be done now; answer how much was done (0: nothing, sleep)."""

    def has_more(self) -> bool:
        """After a step that did something: whether another would, of which no ring tells (it came before the bell was last cleared, and was left)."""

    def next_deadline_ns(self) -> int | None:
        """When there is something to do without a ring."""

    def begin_stop(self) -> None:
        """Take nothing new; finish what was taken."""

    def is_finished(self) -> bool:
        """After `begin_stop`: whether everything taken is finished."""


COLLECT_INTERVAL_NS = 2_000_000_000


def busy_poll_ns(context: ProcessContext) -> int:
    """How long this process looks for more work before it sleeps, when it has just worked."""
    return int(context.spec.settings.get("busy_poll_us", 0)) * 1000 if context.role in (Role.FRONT, Role.WORKER) else 0


def run(agent: Agent, context: ProcessContext, wait: Callable[[float | None, int], None] | None = None) -> None:
    """Step `agent` until it is told to stop and has finished; sleep on the doorbell (or by `wait`) when there is nothing to do.

    `wait(timeout_ms, busy_ns)`: see `shm.doorbell.look_then_sleep`. Only a step that did something is followed by looking: timers cost no more than before.
    Garbage is collected only when idle: everything alive at start-up is frozen, and a busy loop makes no cycles.
    """
    sleep = wait or context.doorbell.wait
    beat: Cell = context.slot.cell(ProcessWord.BEAT)
    work_count: Cell = context.slot.cell(ProcessWord.WORK_COUNT)
    gc.collect()
    gc.freeze()
    gc.disable()
    collected_at = time.monotonic_ns()
    stop: Cell = context.slot.cell(ProcessWord.STOP)
    generation = context.spec.generation
    busy_ns = busy_poll_ns(context)
    stopping = False
    total = 0
    while True:
        now_ns = time.monotonic_ns()
        beat.store(now_ns)
        if not stopping and stop.load() == generation:
            stopping = True
            agent.begin_stop()
        work = agent.step(now_ns)
        if work:
            total += work
            work_count.store(total)
            if stopping or agent.has_more():
                continue
            # Whatever came since the bell was cleared has rung it: looking once more, in vain, would cost as much as the step itself.
        elif stopping and agent.is_finished():
            return
        if now_ns - collected_at > COLLECT_INTERVAL_NS:
            gc.collect()
            collected_at = now_ns
        deadline_ns = agent.next_deadline_ns()
        if stopping:
            deadline_ns = min(deadline_ns or now_ns + 20_000_000, now_ns + 20_000_000)
        # Rounded up: a poll that wakes early would spin until the deadline.
        sleep(None if deadline_ns is None else max(0.0, (deadline_ns - now_ns + 999_999) // 1_000_000), busy_ns if work else 0)
