"""The zygote of the program that is installed now. An upgrade starts it before it stops anything,
so that the modules are imported while the appliance serves (docs/adr/0039).

    old supervisor                     zygote                   new supervisor, same process id
    "replace": starts it ------------> imports the modules
    stops everything  <--------------- "imported"
    execv: channel and process id are
    in ZYGOTE_VARIABLE  --------------------------------------> takes it: forks its processes

Owner: the supervisor.
Invariants:
- A zygote that ends, or takes longer than READY_MAX_NS, keeps no upgrade from going on: the new
  program makes one.
- It is a child of the supervisor's process before and behind its execv.
Crash: it ends with the supervisor, as every zygote.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import MutableMapping

from appliance.supervise.processes.spawner import ZygoteProcess, start_zygote
from appliance.supervise.processes.zygote import ANNOUNCE

ZYGOTE_VARIABLE = "_TAILRACE_ZYGOTE"
"""CHANNEL:PID. It is no setting, and nothing inherits it."""
READY_MAX_NS = 10_000_000_000


class NextZygote:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._process: ZygoteProcess | None = None
        self.deadline_ns: int | None = None
        """While it imports: the latest time until which an upgrade waits."""

    @property
    def fd(self) -> int:
        """Readable when it is ready, or has ended; -1: it does not import."""
        if self._process is None or self.deadline_ns is None:
            return -1
        return self._process.channel.fileno()

    @property
    def pid(self) -> int:
        """0: there is none."""
        return 0 if self._process is None else self._process.pid

    def start(self, now_ns: int) -> None:
        """Start it. If the host refuses, there is none."""
        self.deadline_ns = now_ns + READY_MAX_NS
        try:
            self._process = start_zygote(ANNOUNCE)
        except OSError:
            return
        self._process.channel.setblocking(False)

    def is_awaited(self, now_ns: int) -> bool:
        """True while it imports and the upgrade may wait for it."""
        if self._process is None or self.deadline_ns is None:
            return False
        try:
            is_imported = bool(self._process.channel.recv(32))
        except BlockingIOError:
            if now_ns < self.deadline_ns:
                return True
            is_imported = False
        except OSError:
            is_imported = False
        self.deadline_ns = None
        if not is_imported:
            self.end()
        return False

    def end(self) -> None:
        """Kill and reap it, if there is one."""
        if self._process is not None:
            self._process.channel.close()
            os.kill(self._process.pid, signal.SIGKILL)
            os.waitpid(self._process.pid, 0)
            self._process = None

    def hand_over(self) -> dict[str, str]:
        """The environment for the program that this process becomes; its channel stays open."""
        if self._process is None:
            return {}
        channel = self._process.channel
        channel.set_inheritable(True)
        return {ZYGOTE_VARIABLE: f"{channel.fileno()}:{self._process.pid}"}


def taken_over(environment: MutableMapping[str, str]) -> ZygoteProcess | None:
    """The zygote that this process was given by the program that it was. None: there is none."""
    given = environment.pop(ZYGOTE_VARIABLE, "")
    try:
        fd, pid = map(int, given.split(":"))
        channel = socket.socket(fileno=fd)
    except (ValueError, OSError):
        return None
    channel.set_inheritable(False)
    return ZygoteProcess(channel, pid)
