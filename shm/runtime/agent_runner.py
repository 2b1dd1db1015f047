"""Agent runner: starts a child process from its specification and runs its agent's loop.

Owner: the supervisor writes the specification into an inherited memory file. `start()` reads it.

Invariants:
- A child never outlives its supervisor. It sets PDEATHSIG, then checks its parent, which may have
  died before.
- A child ignores SIGINT, SIGTERM and SIGHUP, which terminals, `timeout` and some service managers
  send to the whole group. Children must end in order: the supervisor stops each with its STOP word
  and a ring.

Every agent's module has `build(context, ...)`, which wires the agent from its specification, and
`main()`, which runs it in a process. The simulation (`tests/sim`) builds the same agents over
another context.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol

import orjson

from shm.crash_points import arm_from_environment
from shm.memory.atomic_word import AtomicCounter
from shm.memory.layout import ProcessWord, RegionKind, Role
from shm.memory.region import Region, RegionError
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneReader, LaneWriter
from shm.runtime.logs.format import Advice, RateLimit
from shm.runtime.logs.handler import handler
from shm.runtime.logs.slow_operations import SLOW
from shm.tables.control import Control, ProcessSlot
from shm.tables.partition_table import PartitionTable
from shm.tables.settings_block import SettingsBlock, SettingsFollower

SPEC_VARIABLE = "TAILRACE_PROCESS"
SUPERVISORS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that are blocked when a child starts, until it ignores them."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_EXIT_NOT_WRITTEN = 120
"""Exit code of the interpreter when it cannot write its output at the end."""
EXIT_PARENT_GONE = 71
EXIT_ADDRESS_IN_USE = 72
EXIT_DATA_UNUSABLE = 73
EXIT_SHARED_MEMORY = 75
"""Exit codes of children. `appliance.supervise.processes.restart_policy` has the others."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Specification of a child: everything it needs to serve, or to continue
    after a killed predecessor.
    """

    role: int
    index: int
    generation: int
    instance: str
    """Identity of the data directory, 32 hexadecimal digits. Clients know it as the cluster id."""
    parent_pid: int
    data_dirs: list[str]
    regions: dict[str, str]
    """Shared-memory name by logical name ("control", "ring-0", "table-0", "front-0>worker-0")."""
    doorbells: dict[str, int]
    """File descriptor by process name ("worker-0")."""
    cores: list[int] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    recover: list[dict[str, Any]] = field(default_factory=list)
    """Rings and tables that an earlier run left. A flusher drains them first."""
    shared_memory: str = ""
    """Instance in the regions' headers if it differs from `instance`: a copied data directory has
    its own shared memory.
    """

    def to_inherited_file(self) -> int:
        """Write the specification to a memory file that a child inherits. Raises OSError.

        An environment variable holds 128 KiB, too little for many processes.
        """
        fd = os.memfd_create("tailrace-specification", 0)
        rest = memoryview(orjson.dumps(self))
        while len(rest):
            rest = rest[os.write(fd, rest) :]
        return fd

    @classmethod
    def from_environment(cls) -> ProcessSpec:
        """Read the specification from the inherited file whose number is in the environment."""
        fd = int(os.environ[SPEC_VARIABLE])
        try:
            return cls(**orjson.loads(os.pread(fd, os.fstat(fd).st_size, 0)))
        finally:
            os.close(fd)


def process_name(role: Role, index: int) -> str:
    """Return the name of a process in doorbell and lane names: "worker-0", but "controller"."""
    return (
        role.name.lower()
        if role in (Role.SUPERVISOR, Role.CONTROLLER, Role.CONSOLE)
        else f"{role.name.lower()}-{index}"
    )


def comm_name(role: Role, index: int) -> str:
    """Return the name for `ps` and /proc/PID/comm, at most 15 bytes."""
    return f"tr-{role.name.lower()}-{index}"[:15]


def set_comm_name(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends.

    Raises SystemExit if the parent has ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(EXIT_PARENT_GONE)


def adopt_descendants() -> None:
    """Become the parent of descendants whose own parent ends.

    Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Clock(NamedTuple):
    """Source of time for an agent."""

    monotonic_ns: Callable[[], int]
    wall_us: Callable[[], int]
    """Microseconds since 1970. It may jump."""


REAL_CLOCK = Clock(time.monotonic_ns, lambda: time.time_ns() // 1000)


class ProcessContext:
    """A started child with its attached memory, doorbells and stop word."""

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
        """Attach by shared-memory name. Regions of an earlier run have no logical name."""
        return Region.attach(name, kind, self.instance)

    def bell(self, role: Role, index: int) -> Doorbell:
        return Doorbell(self.spec.doorbells[process_name(role, index)])

    def lane_writer(self, target: str) -> LaneWriter:
        return LaneWriter(
            self.attach(f"{process_name(self.role, self.index)}>{target}", RegionKind.LANE)
        )

    def lane_reader(self, source: str, resume_at: int = 0) -> LaneReader:
        reader = LaneReader(
            self.attach(f"{source}>{process_name(self.role, self.index)}", RegionKind.LANE),
            resume_at,
        )
        reader.begin(self.spec.generation)
        return reader

    def table(self, data_dir: int) -> PartitionTable:
        return PartitionTable(self.attach(f"table-{data_dir}", RegionKind.TABLE))

    def follow_settings(self, apply: Callable[[dict[str, Any]], None]) -> SettingsFollower:
        """Follow the settings that the supervisor publishes; `apply` takes changed ones."""
        block = SettingsBlock(self.attach("settings", RegionKind.SETTINGS))
        seen = int(self.spec.settings.get("settings_version", 0))
        return SettingsFollower(block, block.applied(self.role, self.index), seen, apply)

    def ask_for_feed(self) -> None:
        """Request the whole catalog for this generation from the controller."""
        self.slot.store(ProcessWord.FEED_REQUESTED, self.spec.generation)
        self.bell(Role.CONTROLLER, 0).ring()

    def report_ready(self) -> None:
        """Report to controller and supervisor that this generation serves."""
        self.slot.store(ProcessWord.READY_GENERATION, self.spec.generation)
        self.bell(Role.CONTROLLER, 0).ring()
        self.bell(Role.SUPERVISOR, 0).ring()
        if self.spec.generation > 1:
            self.ring_everybody()

    def ring_everybody(self) -> None:
        """Ring all processes. A predecessor may have been killed between publishing and ringing."""
        for fd in self.spec.doorbells.values():
            Doorbell(fd).ring()


class NoPandas:
    """Import hook that hides pandas. pyarrow would import it with its first
    array, for 0.3 s and 40 MB.
    """

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for pandas. Return None for other modules."""
        if fullname == "pandas":
            raise ModuleNotFoundError("no process of the appliance uses pandas", name=fullname)


def start() -> ProcessContext:
    """Turn this interpreter into the child that its specification describes."""
    spec = ProcessSpec.from_environment()
    os.umask(0o077)
    sys.excepthook = _end_with_a_sentence
    die_with_parent(spec.parent_pid)
    set_comm_name(comm_name(Role(spec.role), spec.index))
    for number in SUPERVISORS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISORS_SIGNALS)
    if spec.generation == 1:
        arm_from_environment()
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    sys.meta_path.insert(0, NoPandas())
    return ProcessContext(spec)


def _end_with_a_sentence(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Log the exception that ends a process in one line before its traceback.

    An invalid shared-memory region ends the appliance: a successor would find it invalid too.
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


def end_with(main: Callable[[], object]) -> NoReturn:
    """Run `main` and exit with its status, without the interpreter's teardown of modules, which
    costs more than it frees.
    """
    status: object = 1
    try:
        status = main()
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if status is not None and not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    # as multiprocessing does: threads that are not daemons end first
    threading._shutdown()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):
            pass  # this process was started without the stream
        except OSError:
            status = _EXIT_NOT_WRITTEN
    os._exit(status or 0)


def configure_logging(context: ProcessContext) -> None:
    """Log key=value lines to standard error under the process's name."""
    settings = context.spec.settings
    log_to_stderr(
        comm_name(context.role, context.index), settings.get("log_level", "info"),
        settings.get("log_format", "text"),
    )  # fmt: skip
    SLOW.set_limit(settings.get("slow_operation_ms", 0))


def log_to_stderr(name: str, level: str = "info", form: str = "text") -> None:
    """Log to standard error at `level` (debug, info, warning or error), as text or json."""
    lines = handler(name, sys.stderr, form)
    lines.addFilter(RateLimit())
    lines.addFilter(Advice())
    logging.basicConfig(level=level.upper(), handlers=[lines])


class Agent(Protocol):
    """Work of a process, cut into steps that never wait (the term is Aeron's)."""

    def step(self, now_ns: int) -> int:
        """Do the work there is. Return how much was done. 0 means that the process may sleep."""

    def has_more(self) -> bool:
        """True, after a step with work, if another step has work that no ring announces: it arrived
        before the bell was last cleared.
        """

    def next_deadline_ns(self) -> int | None:
        """Return the time of the next work that no ring announces, or None."""

    def begin_stop(self) -> None:
        """Accept nothing new. Finish what was accepted."""

    def is_finished(self) -> bool:
        """True, after `begin_stop`, if everything accepted is finished."""


COLLECT_INTERVAL_NS = 2_000_000_000


def busy_poll_ns(role: Role, settings: dict[str, Any]) -> int:
    """Return how long a process polls for more work before it sleeps, in ns."""
    polls = role in (Role.FRONT, Role.WORKER)
    return int(settings.get("busy_poll_us", 0)) * 1000 if polls else 0


def run(
    agent: Agent,
    context: ProcessContext,
    wait: Callable[[float | None, int], None] | None = None,
    apply: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Step `agent` until it is stopped and has finished. Sleep on the doorbell, or in `wait`,
    without work.

    `wait(timeout_ms, busy_ns)` is like `shm.queues.doorbell.spin_then_sleep`. Only a step with work
    is followed by busy polling, so timers cost no more. Garbage is collected only when idle:
    everything alive at start-up is frozen, and a busy loop creates no cycles. `apply` is called,
    between two steps, with settings that were changed while the process runs.
    """
    sleep = wait or context.doorbell.wait
    beat: AtomicCounter = context.slot.cell(ProcessWord.BEAT)
    work_count: AtomicCounter = context.slot.cell(ProcessWord.WORK_COUNT)
    gc.collect()
    gc.freeze()
    gc.disable()
    collected_at = time.monotonic_ns()
    stop: AtomicCounter = context.slot.cell(ProcessWord.STOP)
    generation = context.spec.generation
    busy_ns = busy_poll_ns(context.role, context.spec.settings)

    def use(settings: dict[str, Any]) -> None:
        nonlocal busy_ns
        logging.getLogger().setLevel(settings["log_level"].upper())
        SLOW.set_limit(settings.get("slow_operation_ms", 0))
        busy_ns = busy_poll_ns(context.role, settings)
        if apply is not None:
            apply(settings)

    live = context.follow_settings(use)
    settings_version = live.version
    stopping = False
    total = 0
    while True:
        now_ns = time.monotonic_ns()
        beat.store(now_ns)
        if not stopping and stop.load() == generation:
            stopping = True
            agent.begin_stop()
        if settings_version.load() != live.seen:
            live.follow()
        work = agent.step(now_ns)
        if work:
            total += work
            work_count.store(total)
            if stopping or agent.has_more():
                continue
            # Anything that came since the bell was cleared has rung it. A further step without work
            # would cost as much as this one.
        elif stopping and agent.is_finished():
            return
        if now_ns - collected_at > COLLECT_INTERVAL_NS:
            gc.collect()
            collected_at = now_ns
        deadline_ns = agent.next_deadline_ns()
        if stopping:
            deadline_ns = min(deadline_ns or now_ns + 20_000_000, now_ns + 20_000_000)
        # Rounded up: a poll that wakes too early would spin until the deadline.
        sleep(
            None
            if deadline_ns is None
            else max(0.0, (deadline_ns - now_ns + 999_999) // 1_000_000),
            busy_ns if work else 0,
        )
