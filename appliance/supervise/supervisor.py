"""The supervisor: makes the shared memory and the doorbells, starts the processes, restarts them,
and stops them in order.

Owner: shared-memory names, eventfds, the lock and manifest of the data directory; in the control
region the phase. The processes are in `process_table`.
Invariants:
- Regions are removed only when their rings are drained.
- The manifest names a region of an earlier run until it is drained.
Crash: children die with it (PDEATHSIG). Acknowledged batches are in the rings, which outlive every
process, and the next start drains them.

Start:  zygote | lock, identity | old rings found | regions, bells | controller, flusher, workers,
        fronts | scheduler, if a topic has delays | flusher recovered: RUNNING | front bound: READY
        | console
Stop:   zygote | console | fronts (nothing new) | groups | scheduler | workers (lanes empty) |
        flusher (rings settled, files synced) | controller | regions removed

Run by `tailrace.launcher`, isolated; `tailrace serve` does.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import sys
import time
from typing import NoReturn

from appliance.config.relations import planned_cores
from appliance.config.settings import Settings
from appliance.config.settings_sources import (
    Sources,
    checked_settings,
    environment_settings,
    given_flags,
    parse_flags,
)
from appliance.config.topology import Topology, read_topology
from appliance.data import format_versions
from appliance.data.data_dir_lock import DataDirLock
from appliance.data.data_dir_locks import acquire_all, forget_holders, record_holders, restore_locks
from appliance.data.directory_errors import DataDirectoryError, unusable
from appliance.supervise.announcement import Announcement
from appliance.supervise.hang_watch import HangWatch
from appliance.supervise.live_settings import HangUps, LiveSettings
from appliance.supervise.memory.memory_budget import needs, read_rooms, shortage
from appliance.supervise.memory.memory_pressure import MemoryPressure
from appliance.supervise.memory.shm_regions import Regions
from appliance.supervise.on_demand_processes import OnDemandProcesses
from appliance.supervise.operations.control_socket import ControlSocket
from appliance.supervise.operations.operator_commands import OperatorCommands
from appliance.supervise.operations.replacement import become_installed_program
from appliance.supervise.preflight import (
    allow_open_files,
    refuse_unfit_machine,
    slots_for_open_files,
    warn_of_python_kernel,
)
from appliance.supervise.process_specs import ProcessSpecs
from appliance.supervise.processes.child_processes import (
    NS_PER_MS,
    Child,
    first_children,
    other_cores,
)
from appliance.supervise.processes.next_zygote import NextZygote, taken_over
from appliance.supervise.processes.process_table import KILL_TIMEOUT_MS, ProcessTable
from appliance.supervise.processes.restart_policy import ExitCode, Halt
from appliance.supervise.processes.spawner import Spawner, reap_strangers
from appliance.supervise.sd_notify import SERVICE_VARIABLES, Notifier
from shm.crash_points import arm_from_environment, crash_point
from shm.memory.layout import Phase, ProcessWord, Role
from shm.memory.region import RegionError
from shm.queues.doorbell import Doorbell
from shm.runtime.agent_runner import (
    comm_name,
    end_with,
    log_to_stderr,
    process_name,
    set_comm_name,
)
from shm.runtime.core_dumps import limit_core_dumps
from shm.tables.control import Control
from tailrace.core.errors import InvalidSettingError

logger = logging.getLogger("appliance.supervise.supervisor")


class Supervisor:
    """One appliance. `run` returns its exit code."""

    def __init__(
        self,
        live: LiveSettings,
        topology: Topology,
        ready_fd: int = -1,
        notifier: Notifier | None = None,
        spawner: Spawner | None = None,
        sockets: dict[str, int] | None = None,
    ) -> None:
        """`ready_fd`: a pipe to the process that started this one (see `Announcement`). `sockets`:
        listening sockets of addresses of fronts.
        """
        self._live = live
        self._spawner = spawner or Spawner()
        self._sockets = sockets or {}
        self._next_zygote = NextZygote()
        self.notifier = notifier or Notifier(None)
        self._announcement = Announcement(self.notifier, ready_fd)
        self._plan = planned_cores(self.settings, topology)
        self._slots = self.settings.slots
        """Number of partition slots, as far as the limit of open files allows."""
        self._owners: list[DataDirLock] = []
        """One for each data directory; the first has the catalog."""
        self._worker_dirs: list[int] = []
        """Worker -> index of its data directory; dedicated workers come behind these."""
        self._regions: Regions
        self._specs: ProcessSpecs
        self._on_demand: OnDemandProcesses
        self._control: Control
        self._processes: ProcessTable
        self._operator: OperatorCommands
        self._bells: dict[str, Doorbell] = {}
        self._stop_requested = False
        self._hang_ups = HangUps()
        self._pressure = MemoryPressure(self.settings.memory_pressure_file)
        self._hang_watch: HangWatch

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._live.settings

    # ---- start -----------------------------------------------------------------------------------

    def run(self) -> int:
        """Start, supervise until told to stop, stop. Blocking; in the main thread, for PDEATHSIG
        and signals. Raises DataDirectoryError, Halt.
        """
        self._lock_directories()
        crash_point("supervisor.after_lock")
        self._slots = slots_for_open_files(
            self.settings, [owner.path for owner in self._owners], len(self._worker_dirs)
        )
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._hang_ups.watch()
        try:
            self._make_shared_memory()
        except RegionError as error:
            _complain(str(error))
            return ExitCode.SHARED_MEMORY
        self._make_parts()
        slot = self._control.process(Role.SUPERVISOR, 0)
        slot.store(ProcessWord.PID, os.getpid())
        slot.store(ProcessWord.LIVE, 1)
        code = ExitCode.OK
        try:
            for child in self._processes:
                self._processes.spawn(child)
            crash_point("supervisor.after_spawn")
            self._record_holders()
            self._supervise(wake_read)
        except Halt as halt:
            code = ExitCode(halt.code)
            _complain(halt.reason)
        except OSError as error:  # the children still end in order
            code = ExitCode.FAILED
            _complain(f"the supervisor cannot go on: {error}")
        clean = self._stop()
        return self._clean_up(clean, code)

    def _make_shared_memory(self) -> None:
        """Find what an earlier run left, and create this run's. Raises Halt, RegionError."""
        self._regions = Regions(self._owners, self.settings, self._worker_dirs)
        self._regions.find_old()
        too_much = shortage(needs(self.settings, len(self._worker_dirs)), read_rooms())
        if too_much:
            raise Halt(ExitCode.SHARED_MEMORY, too_much)
        self._control = self._regions.create()
        self._specs = ProcessSpecs(
            self._live, self._plan, self._owners, self._worker_dirs, self._slots, self._regions,
            self._pressure, self._sockets,
        )  # fmt: skip
        self._live.open(
            self._regions.settings_block("settings"),
            self._regions.settings_block("overrides"),
            self._specs.settings_of,
        )
        self._control.set_phase(Phase.RECOVERING)
        crash_point("supervisor.after_regions")

    def _make_parts(self) -> None:
        """Make the doorbells, and the parts that start and watch processes."""
        children = first_children(self._plan, self.settings.gateways)
        self._specs.make_doorbells(children)
        self._bells = self._specs.doorbells
        self._processes = ProcessTable(
            children, self._control, self._spawner, self._bells, self._inherited_fds,
            self._specs.spec_of, self._record_holders,
        )  # fmt: skip
        self._hang_watch = HangWatch(
            self._processes, self._control, self._bells, self.notifier, lambda: self.settings
        )
        self._on_demand = OnDemandProcesses(
            self._control, self._regions, children, self._bells, other_cores(self._plan),
            self._specs.spare_workers(), self.settings.front_count, self._processes.try_spawn,
            len(self._owners),
        )  # fmt: skip
        self._operator = OperatorCommands(
            ControlSocket(self._owners[0].directory_fd, self._owners[0].path), self._processes,
            [owner.path for owner in self._owners], self._is_ready,
            lambda: self._announcement.is_made, self._next_zygote if self.settings.zygote else None,
        )  # fmt: skip
        self._on_demand.add_groups_of(self._owners[0].path)

    def _lock_directories(self) -> None:
        """Take every data directory. Raises DataDirectoryError."""
        self._owners = acquire_all(self.settings.data_dirs)
        for owner in self._owners:
            format_versions.record(owner.path)
        if self.settings.is_secured:
            from shm.rights.server_keys import (  # most have none
                KeysUnusableError,
                address_for_keys,
                ensure_keys,
            )

            try:
                ensure_keys(self._owners[0].path, address_for_keys(self.settings.listen))
            except OSError as error:
                raise unusable(self._owners[0].path, error) from None
            except KeysUnusableError as error:
                raise DataDirectoryError(f"{error}.") from None
        self._worker_dirs = [w % len(self._owners) for w in range(len(self._plan.workers))]

    def _record_holders(self) -> None:
        record_holders(
            self._owners,
            {child.name: child.pid for child in self._processes},
            self._announcement.addresses,
        )

    def _inherited_fds(self, child: Child) -> list[int]:
        locks = [fd for owner in self._owners for fd in owner.lock_fds]
        return [*locks, *self._sockets.values()] if child.role is Role.FRONT else locks

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop_requested = True

    # ---- supervision -----------------------------------------------------------------------------

    def _supervise(self, wake_fd: int) -> None:
        """Run until told to stop.

        Raises: Halt.
        """
        bell = self._bells[process_name(Role.SUPERVISOR, 0)]
        ready_fd = self._announcement.ready_fd
        while not self._stop_requested and not self._operator.is_replacing:
            poll = select.poll()
            poll.register(wake_fd, select.POLLIN)
            poll.register(bell.fd, select.POLLIN)
            if ready_fd >= 0:
                poll.register(ready_fd, select.POLLIN)
            for watched in [
                self._spawner.pidfd,
                *(child.pidfd for child in self._processes),
                *self._operator.fds(),
            ]:
                if watched >= 0:
                    poll.register(watched, select.POLLIN)
            now_ns = time.monotonic_ns()
            ready = dict(poll.poll(max(0, (self._next_wake_ns() - now_ns) // NS_PER_MS + 1)))
            bell.clear()
            _drain(wake_fd)
            now_ns = time.monotonic_ns()
            if ready_fd in ready and self._announcement.has_starter_ended():
                logger.info("parent_gone action=STOP")
                return
            for child in [child for child in self._processes if child.pidfd in ready]:
                self._processes.reap(child, now_ns)
            if self._spawner.pidfd in ready:
                self._spawner.replace_zygote()
            reap_strangers(
                lambda pid: pid == self._next_zygote.pid or self._processes.is_known(pid)
            )
            self._operator.step(now_ns)
            self._apply_settings(now_ns)
            # A controller that serves has made its requests: note who serves before they are read.
            self._note_served()
            self._on_demand.step(may_halt=not self._announcement.is_made)
            self._processes.restart_due(now_ns)
            self._advance_phase()
            if self._announcement.is_made:
                self.notifier.report_absent(
                    [
                        c.name
                        for c in self._processes
                        if c.role is not Role.CLEANER and not self._is_ready(c)
                    ]
                )
            self._check_progress(now_ns)

    def _apply_settings(self, now_ns: int) -> None:
        """Apply what SIGHUP, a client's request, the catalog or the memory's pressure changes."""
        version = self._live.version
        hung_up = self._hang_ups.take()
        if hung_up and self._hang_ups.is_terminal_gone():
            logger.info("terminal_gone action=STOP")
            self._stop_requested = True
            return
        if self._live.take_overrides() or hung_up:
            self._reload()
        if self._pressure.check(self.settings.memory_pressure_percent, now_ns):
            self._live.republish()
        if self._live.version != version:
            logging.getLogger().setLevel(self.settings.log_level.upper())
            for bell in self._bells.values():
                bell.ring()

    def _reload(self) -> None:
        is_announced = self._announcement.is_made
        if is_announced:
            self.notifier.reloading()
        self._live.reload()
        self._live.log_reload()
        if is_announced:
            self._announcement.report_ready()

    def _next_wake_ns(self) -> int:
        times = [child.restart_at_ns for child in self._processes if child.restart_at_ns]
        if self._operator.next_deadline_ns is not None:
            times.append(self._operator.next_deadline_ns)
        if self._pressure.next_check_ns is not None:
            times.append(self._pressure.next_check_ns)
        return min([*times, self._hang_watch.next_check_ns()])

    def _is_ready(self, child: Child) -> bool:
        return (
            self._control.process(child.role, child.index).load(ProcessWord.READY_GENERATION)
            == child.generation
        )

    def _note_served(self) -> None:
        for child in self._processes:
            child.has_served = child.has_served or self._is_ready(child)

    def _advance_phase(self) -> None:
        """RECOVERING -> RUNNING when the flushers have recovered; READY when everything serves."""
        if self._control.phase is Phase.RECOVERING and all(
            c.has_served for c in self._processes if c.role is Role.FLUSHER
        ):
            self._control.set_phase(Phase.RUNNING)
            crash_point("supervisor.after_recovery")
            self._regions.forget_old()
            for bell in self._bells.values():
                bell.ring()
        needed = (c for c in self._processes if c.role not in (Role.GROUPS, Role.CLEANER))
        if (
            not self._announcement.is_made
            and self._control.phase is Phase.RUNNING
            and all(c.has_served for c in needed)
        ):
            self._announce()

    def _announce(self) -> None:
        """Announce that everything serves, then start the console."""
        settings, control = self.settings, self._control
        self._announcement.take_addresses(settings, control)
        self._record_holders()
        self._announcement.make(settings, control, self._owners[0].path)
        if settings.http_listen:
            console = Child(Role.CONSOLE, 0, other_cores(self._plan))
            self._processes.children.append(console)
            self._processes.try_spawn(console)

    def _check_progress(self, now_ns: int) -> None:
        """Look for locks that are gone, and for processes that hang."""
        if not self._hang_watch.is_due(now_ns):
            return
        if restore_locks(self._owners):
            self._record_holders()
        if self._hang_watch.check(now_ns) and not self._announcement.is_made:
            self.notifier.recovering(2 * self.settings.hang_timeout_ms * NS_PER_MS)

    @property
    def is_replacing(self) -> bool:
        """True if it has stopped to start again with the code that is installed now."""
        return self._operator.is_replacing and not self._stop_requested

    def for_installed_program(self) -> dict[str, str]:
        """Environment of the program that this process becomes."""
        return self._next_zygote.hand_over()

    # ---- stop ------------------------------------------------------------------------------------

    def _stop(self) -> bool:
        """End the children in order, within stop_timeout_ms. False: some had to be killed."""
        if self.is_replacing:
            logger.info("stopping to_become_installed_program=yes")
            self.notifier.announce_replacement()
        else:
            logger.info("stopping")
            timeout_ms = self.settings.stop_timeout_ms + KILL_TIMEOUT_MS
            self.notifier.stopping(timeout_ms * NS_PER_MS)
        self._operator.close()
        self._spawner.close()
        if not self.is_replacing:
            self._next_zygote.end()
        if self._control.phase is Phase.RUNNING:
            self._control.set_phase(Phase.STOPPING)
        return self._processes.stop(self.settings.stop_timeout_ms, self.notifier.feed_watchdog)

    def _clean_up(self, clean: bool, code: ExitCode) -> int:
        """Remove shared memory, unless a ring holds batches that are not on the disk: the next
        start drains it.
        """
        crash_point("supervisor.in_clean_up")
        drained = self._regions.are_drained()
        if drained:
            self._regions.remove()
            forget_holders(self._owners)
        else:
            logger.error("rings_not_drained data_dir=%s", self._owners[0].path)
        logger.info("stopped clean=%s", clean and drained)
        return ExitCode.FAILED if code is ExitCode.OK and not (clean and drained) else code


def _passed_sockets(settings: Settings) -> dict[str, int]:
    """Address -> listening socket of those that systemd passes. Raises InvalidSettingError."""
    if "LISTEN_FDS" not in os.environ:
        return {}
    from appliance.supervise.listen_sockets import inherited_sockets, sockets_of_fronts

    return sockets_of_fronts(inherited_sockets(os.environ), settings.listen, settings.fronts)


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 512):
            pass
    except OSError as error:
        if error.errno != errno.EAGAIN:
            raise


def _complain(reason: str) -> None:
    if reason:
        red = "\x1b[31m" if sys.stderr.isatty() else ""
        print(f"{red}tailrace: {reason}{red and chr(27) + '[0m'}", file=sys.stderr, flush=True)


def main() -> NoReturn:
    """Run the process."""
    end_with(_serve)


def _serve() -> int:
    flags = parse_flags(sys.argv[1:])
    set_comm_name(comm_name(Role.SUPERVISOR, 0))
    allow_open_files()
    service = {name: os.environ[name] for name in SERVICE_VARIABLES if name in os.environ}
    notifier = Notifier.from_environment()
    if flags.ready_fd >= 0:
        os.set_inheritable(flags.ready_fd, False)
    try:
        sources = Sources(flags.config, environment_settings(), given_flags(flags))
        topology = read_topology()
        settings, given = checked_settings(*sources, topology)
        sockets = _passed_sockets(settings)
    except InvalidSettingError as error:
        _complain(error.detail)
        return ExitCode.USAGE
    limit_core_dumps(are_allowed=settings.security_core_dumps)
    spawner = Spawner()
    # a fork of what there is by now: modules, and no log, crash point, directory or shared memory
    next_zygote = taken_over(os.environ)
    if settings.zygote and not spawner.adopt(next_zygote):
        spawner.fork_zygote()
    arm_from_environment()
    log_to_stderr(comm_name(Role.SUPERVISOR, 0), settings.log_level, settings.log_format)
    try:
        refuse_unfit_machine()
        warn_of_python_kernel()
        live = LiveSettings(sources, settings, given, topology)
        supervisor = Supervisor(live, topology, flags.ready_fd, notifier, spawner, sockets)
        code = supervisor.run()
        if code in (ExitCode.OK, ExitCode.FAILED) and supervisor.is_replacing:
            environment = {**service, **supervisor.for_installed_program()}
            become_installed_program([flags.ready_fd, *sockets.values()], environment)
        return code
    except InvalidSettingError as error:
        _complain(error.detail)
        return ExitCode.USAGE
    except DataDirectoryError as error:
        _complain(str(error))
        return ExitCode.DATA_UNUSABLE
    except Halt as halt:
        _complain(halt.reason)
        return halt.code
    except OSError as error:
        _complain(
            str(unusable(os.path.abspath(settings.data_dirs[0]), error))
            if error.filename
            else f"cannot start: {error}"
        )
        return ExitCode.FAILED


if __name__ == "__main__":
    main()
