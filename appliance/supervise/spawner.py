"""Starts the appliance's processes: as forks of the zygote, or, where there is none, as
interpreters of their own.

Owner: the supervisor, in its main thread: PDEATHSIG watches the thread that is a process's parent.
Invariants: a forked process runs only once its process id is known and its pidfd is held: until
    then it waits at its gate, and ends when that closes; every process is the supervisor's child,
    which alone reaps it; without a zygote each process is started all the same.
Crash: the zygote ends with the supervisor. One that ends by itself, or does not answer, is followed
    by another, an interpreter of its own; after QUICK_ENDS_MAX that ended soon after their start
    there is none until the appliance is started again.
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

from appliance.supervise import zygote
from appliance.supervise.restart_policy import SETTLED_AFTER_MS
from shm.runtime.agent_runner import SPEC_VARIABLE, SUPERVISORS_SIGNALS, adopt_descendants
from tailrace import launcher

logger = logging.getLogger("appliance.supervise.supervisor")

NS_PER_MS = 1_000_000
ANSWER_MS = 10_000
"""A zygote that has made no process for so long is killed. It needs some milliseconds, or some
hundred while it still imports.
"""
QUICK_ENDS_MAX = 3


class Started(NamedTuple):
    """A process that runs."""

    pid: int
    pidfd: int


class NotForkedError(Exception):
    """The zygote has made no process; the text says why."""


class Spawner:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._pid = 0
        self.pidfd = -1
        """Of the zygote: readable when it has ended; -1: there is none."""
        self._started_ns = 0
        self._quick_ends = 0
        self._has_made = False
        """Whether the zygote has made a process."""
        self._is_enabled = False
        """Whether one is to be started again when there is none."""

    # ---- the zygote ------------------------------------------------------------------------------

    def fork_zygote(self) -> None:
        """Make the zygote of this process as it is now: with modules, and nothing of an appliance
        yet. Without one when the kernel refuses.
        """
        self._is_enabled = True
        supervisor = os.getpid()
        try:
            adopt_descendants()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                gc.freeze()  # neither collector writes in what both share
                pid = _fork_or_close(ours)
                if not pid:
                    _be_zygote(theirs, supervisor)
            self._keep(ours, pid)
        except OSError as error:
            self._abandon(str(error))

    def _start_zygote(self) -> None:
        """Start one as an interpreter of its own: what this process has by now is no child's
        affair.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = launcher.command(zygote.MODULE, str(theirs.fileno()), str(os.getpid()))
            theirs.set_inheritable(True)
            try:
                pid = os.posix_spawn(
                    arguments[0], arguments, os.environ, setsigmask=zygote.BLOCKED_SIGNALS
                )
            except OSError:
                ours.close()
                raise
        self._keep(ours, pid)

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
        except OSError:  # who cannot be watched must not run
            self._end()
            raise

    def _end(self) -> int:
        """Kill the zygote, if there is one, and reap it: it holds nothing. Returns its exit
        status.
        """
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
        """The zygote has ended, or makes no processes: have another one, unless another would fare
        no better.
        """
        pid, lived_ms = self._pid, (time.monotonic_ns() - self._started_ns) // NS_PER_MS
        status = self._end()
        self._quick_ends = self._quick_ends + 1 if lived_ms < SETTLED_AFTER_MS else 0
        ended = f"{reason} (status {status})"
        if status > 0 and not self._has_made:
            self._abandon(f"{ended} before it had made a process; it said why above")
        elif self._quick_ends >= QUICK_ENDS_MAX:
            self._abandon(
                f"{ended}, and so did others: {self._quick_ends} times soon after a start"
            )
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
            self._start_zygote()
        except OSError as error:  # processes or descriptors are short; the next process that is started tries again  # noqa: E501
            logger.warning("zygote_not_started error=%r", str(error))

    def _abandon(self, reason: str) -> None:
        self._is_enabled = False
        logger.error(
            "no_zygote reason=%r from_now_on='each process is an interpreter of its own, which "
            "takes longer to start'",
            reason,
        )

    def close(self) -> None:
        """No process is started from now on."""
        self._is_enabled = False
        self._end()

    def is_zygote(self, pid: int) -> bool:
        """Whether `pid` is the zygote."""
        return self._channel is not None and pid == self._pid

    # ---- processes -------------------------------------------------------------------------------

    def start(self, module: str, spec_fd: int, descriptors: Sequence[int]) -> Started:
        """Start the program `module` with its specification in `spec_fd`; it has `descriptors` and
        that under the same numbers. Blocking: some milliseconds. Raises OSError.
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
        """Raises NotForkedError, TimeoutError; no process of this request runs then, or ever
        will.
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
                    raise NotForkedError("it has made none")
                pid = int(answer)
                pidfd = os.pidfd_open(pid)
            except OSError as error:
                raise NotForkedError(str(error)) from None
            try:
                gate.send(zygote.GO)
            except OSError as error:  # killed while it waited
                logger.warning("gate_closed module=%s error=%r", request.module, str(error))
            return Started(pid, pidfd)


def _fork_or_close(channel: socket.socket) -> int:
    """Raises OSError."""
    try:
        return os.fork()
    except OSError:
        channel.close()
        raise


def _is_closed(channel: socket.socket) -> bool:
    """Whether the zygote has ended. An ending process closes its descriptors, the channel among the
    first, before its pidfd says so.
    """
    poll = select.poll()
    poll.register(channel, 0)
    return bool(poll.poll(0))


def _be_zygote(channel: socket.socket, supervisor: int) -> NoReturn:
    """In the fork, which never comes back from here."""
    try:
        zygote.serve(channel, supervisor)
    finally:
        os._exit(1)


def _start_by_itself(module: str, spec_fd: int, descriptors: Sequence[int]) -> Started:
    """Raises OSError."""
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
    except OSError:  # who cannot be watched must not run
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def reap_strangers(is_known: Callable[[int], bool]) -> None:
    """Collect ended children that nobody else will: processes that the zygote was making when it
    ended, and orphans of the appliance's processes.
    """
    try:
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) is not None and not is_known(ended.si_pid):
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        pass  # there are no children at all
