"""Starts the appliance's processes: as forks of the zygote, or without a zygote as interpreters of
their own.

Owner: the supervisor, in its main thread, since PDEATHSIG watches the parent thread of a process.
Invariants:
- A forked process runs only after the supervisor has its pid and pidfd. Until then it waits at its
  gate, and exits when the gate closes.
- Every process is a child of the supervisor, which alone reaps it.
- Without a zygote every process can still be started.
Crash: the zygote ends with the supervisor. A zygote that exits or does not answer is replaced by an
    interpreter of its own. After QUICK_ENDS_MAX that exited soon after their start there is none
    until the appliance restarts.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from appliance.supervise.processes import zygote
from appliance.supervise.processes.restart_policy import SETTLED_AFTER_MS
from shm.runtime.agent_runner import SPEC_VARIABLE, SUPERVISORS_SIGNALS, adopt_descendants
from tailrace import launcher

logger = logging.getLogger("appliance.supervise.supervisor")

NS_PER_MS = 1_000_000
ANSWER_MS = 10_000
"""Time after which a zygote that has not forked a process is killed. A fork takes milliseconds, or
some hundred while the zygote still imports.
"""
QUICK_ENDS_MAX = 3


class Started(NamedTuple):
    """A running process."""

    pid: int
    pidfd: int


class ZygoteProcess(NamedTuple):
    """A zygote, and this process's end of its channel."""

    channel: socket.socket
    pid: int


class NotForkedError(Exception):
    """The zygote has not forked a process; the text has the reason."""


class Spawner:
    """The zygote, and the start of processes with or without it."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._pid = 0
        self.pidfd = -1
        """pidfd of the zygote, readable when it has ended; -1: no zygote."""
        self._started_ns = 0
        self._quick_ends = 0
        self._has_made = False
        """The zygote has forked a process."""
        self._is_enabled = False
        """A missing zygote is started again."""

    # ---- the zygote ------------------------------------------------------------------------------

    def fork_zygote(self) -> None:
        """Fork the zygote from this process, which has modules but no state of an appliance yet. If
        the kernel refuses, or a module cannot be imported, there is no zygote.

        This process imports what the zygote shares. That is 3 MB less than importing it in the
        zygote, whose imports write to most pages that it has of this process.
        """
        self._is_enabled = True
        supervisor = os.getpid()
        try:
            zygote.import_shared()
        except Exception as error:  # each process imports its own modules, and says what is wrong
            self._abandon(f"a module cannot be imported: {error}")
            return
        try:
            adopt_descendants()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                gc.freeze()  # neither collector writes to the shared pages
                pid = _fork_or_close(ours)
                if not pid:
                    _be_zygote(theirs, supervisor)
            self._keep(ours, pid)
        except OSError as error:
            self._abandon(str(error))

    def adopt(self, given: ZygoteProcess | None) -> bool:
        """Take the zygote that this process has had started before it became this program. Returns
        False if there is none that lives.
        """
        if given is None:
            return False
        self._is_enabled = True
        try:
            adopt_descendants()
            self._keep(given.channel, given.pid)
        except OSError as error:
            logger.warning("zygote_not_taken pid=%d error=%r", given.pid, str(error))
            return False
        return True

    def _keep(self, channel: socket.socket, pid: int) -> None:
        channel.setblocking(False)
        self._channel, self._pid, self._started_ns, self._has_made = (
            channel,
            pid,
            time.monotonic_ns(),
            False,
        )
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:  # a process that cannot be watched must not run
            self._end()
            raise

    def _end(self) -> int:
        """Kill and reap the zygote, if there is one. It holds no state. Returns its exit status."""
        status = 0
        if self._channel is not None:
            self._channel.close()
            os.kill(self._pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self._channel, self.pidfd = None, -1
        return status

    def replace_zygote(self, reason: str = "it ended") -> None:
        """Replace a zygote that has ended or does not fork, unless its successors failed, too."""
        pid, lived_ms = self._pid, (time.monotonic_ns() - self._started_ns) // NS_PER_MS
        status = self._end()
        self._quick_ends = self._quick_ends + 1 if lived_ms < SETTLED_AFTER_MS else 0
        ended = f"{reason} (status {status})"
        if status > 0 and not self._has_made:
            self._abandon(f"{ended} before it had forked a process; its reason is in the log above")
        elif self._quick_ends >= QUICK_ENDS_MAX:
            self._abandon(f"{ended}; {self._quick_ends} zygotes ended soon after their start")
        else:
            logger.warning(
                "ended process=zygote pid=%d status=%d reason=%r action=RESTART",
                pid,
                status,
                reason,
            )
            self._try_start_zygote()

    def _try_start_zygote(self) -> None:
        try:
            self._keep(*start_zygote())
        except OSError as error:  # no process or descriptor is free; the next start tries again
            logger.warning("zygote_not_started error=%r", str(error))

    def _abandon(self, reason: str) -> None:
        self._is_enabled = False
        logger.error(
            "no_zygote reason=%r from_now_on='each process is an interpreter of its own, which "
            "starts more slowly'",
            reason,
        )

    def close(self) -> None:
        """End the zygote; no process is started afterwards."""
        self._is_enabled = False
        self._end()

    def is_zygote(self, pid: int) -> bool:
        """True for the zygote's pid."""
        return self._channel is not None and pid == self._pid

    # ---- processes -------------------------------------------------------------------------------

    def start(self, module: str, spec_fd: int, descriptors: Sequence[int]) -> Started:
        """Start the program `module` with its specification in `spec_fd`. The process inherits
        `spec_fd` and `descriptors` under the same numbers. Blocking: some milliseconds. Raises
        OSError.
        """
        if self._channel is not None:
            try:
                started = self._fork(
                    self._channel, zygote.Request(module, spec_fd, [spec_fd, *descriptors])
                )
            except TimeoutError as error:
                self.replace_zygote(str(error))
            except NotForkedError as error:
                if _is_closed(self._channel):
                    self.replace_zygote(str(error))
                else:
                    logger.warning(
                        "not_forked module=%s reason=%r started='by itself'", module, str(error)
                    )
            else:
                self._has_made = True
                return started
        elif self._is_enabled:
            self._try_start_zygote()
        return _start_by_itself(module, spec_fd, descriptors)

    def _fork(self, channel: socket.socket, request: zygote.Request) -> Started:
        """Fork a process from the zygote. Raises NotForkedError, TimeoutError; then no process of
        this request will run.
        """
        gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with gate:
            with theirs:
                try:
                    socket.send_fds(
                        channel, [request.encode()], [theirs.fileno(), *request.numbers]
                    )
                except OSError as error:
                    raise NotForkedError(str(error)) from None
            poll = select.poll()
            poll.register(gate, select.POLLIN)
            if not poll.poll(ANSWER_MS):
                raise TimeoutError(f"no answer within {ANSWER_MS} ms")
            try:
                answer = gate.recv(32)
                if not answer:
                    raise NotForkedError("the zygote closed the gate without a process")
                pid = int(answer)
                pidfd = os.pidfd_open(pid)
            except OSError as error:
                raise NotForkedError(str(error)) from None
            try:
                gate.send(zygote.GO)
            except OSError as error:  # killed while it waited
                logger.warning("gate_closed module=%s error=%r", request.module, str(error))
            return Started(pid, pidfd)


def start_zygote(*options: str) -> ZygoteProcess:
    """Start a zygote as an interpreter of its own, so that it inherits no state of this process.
    Raises OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        arguments = launcher.command(
            zygote.MODULE, str(theirs.fileno()), str(os.getpid()), *options
        )
        theirs.set_inheritable(True)
        try:
            pid = os.posix_spawn(
                arguments[0], arguments, os.environ, setsigmask=zygote.BLOCKED_SIGNALS
            )
        except OSError:
            ours.close()
            raise
    return ZygoteProcess(ours, pid)


def _fork_or_close(channel: socket.socket) -> int:
    """Fork, or close the channel. Raises OSError."""
    try:
        return os.fork()
    except OSError:
        channel.close()
        raise


def _is_closed(channel: socket.socket) -> bool:
    """True when the zygote has ended. The channel closes before the pidfd becomes readable."""
    poll = select.poll()
    poll.register(channel, 0)
    return bool(poll.poll(0))


def _be_zygote(channel: socket.socket, supervisor: int) -> NoReturn:
    """Run the zygote in the fork; never returns."""
    try:
        zygote.serve(channel, supervisor)
    finally:
        os._exit(1)


def _start_by_itself(module: str, spec_fd: int, descriptors: Sequence[int]) -> Started:
    """Start an interpreter of its own. Raises OSError."""
    inherited = (spec_fd, *descriptors)
    arguments = launcher.command(module)
    environment: Mapping[str, str] = {**os.environ, SPEC_VARIABLE: str(spec_fd)}
    try:
        for fd in inherited:
            os.set_inheritable(fd, True)
        pid = os.posix_spawn(arguments[0], arguments, environment, setsigmask=SUPERVISORS_SIGNALS)
    finally:
        for fd in inherited:
            os.set_inheritable(fd, False)
    try:
        return Started(pid, os.pidfd_open(pid))
    except OSError:  # a process that cannot be watched must not run
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def reap_strangers(is_known: Callable[[int], bool]) -> None:
    """Reap ended children that are not in the process table: processes that the zygote was forking
    when it ended, and orphans of the appliance's processes.
    """
    try:
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) is not None and not is_known(ended.si_pid):
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        pass  # no children
