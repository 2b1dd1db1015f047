"""Operator commands: what `tailrace restart` and `tailrace upgrade` ask of the supervisor.

    {"command": "describe"}                        version, program, flags and settings' variables
    {"command": "restart", "processes": [...]}     a rolling restart; events, then the end
    {"command": "replace"}                         stop, and start with the code that is installed

Owner: the supervisor.
Invariants:
- One command that changes something runs at a time; another one is refused.
- A command's client may end; the command goes on.
Crash: commands end with the supervisor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from appliance.supervise.operations.control_socket import ControlClient, ControlSocket
from appliance.supervise.operations.rolling_restart import RollingRestart, chosen
from appliance.supervise.processes.child_processes import Child
from appliance.supervise.processes.next_zygote import NextZygote
from appliance.supervise.processes.process_table import ProcessTable
from tailrace import __version__, launcher


class OperatorCommands:
    """See the module's docstring."""

    def __init__(
        self,
        control: ControlSocket,
        table: ProcessTable,
        data_dirs: list[str],
        is_serving: Callable[[Child], bool],
        may_change: Callable[[], bool],
        next_zygote: NextZygote | None,
    ) -> None:
        """`may_change`: True once everything has served. `next_zygote`: None where the setting
        `zygote` is off.
        """
        self._control = control
        self._table = table
        self._data_dirs = data_dirs
        self._is_serving = is_serving
        self._may_change = may_change
        self._restart: RollingRestart | None = None
        self._client: ControlClient | None = None
        self._begun_ns = 0
        self._next_zygote = next_zygote
        self._replacing_client: ControlClient | None = None
        """The client of a replacement that waits for the next zygote."""
        self.is_replacing = False
        """True once the supervisor is asked to stop and to start with the installed code."""

    def fds(self) -> Iterator[int]:
        """Descriptors to poll for reading."""
        yield from self._control.fds()
        if self._next_zygote is not None:
            yield self._next_zygote.fd

    @property
    def next_deadline_ns(self) -> int | None:
        if self._restart is not None:
            return self._restart.next_deadline_ns
        return None if self._next_zygote is None else self._next_zygote.deadline_ns

    def step(self, now_ns: int) -> None:
        """Take new commands, and go on with the one that runs."""
        for client, command in self._control.commands():
            self._take(client, command, now_ns)
        if self._replacing_client is not None:
            self._replace_when_ready(self._replacing_client, now_ns)
        restart, asker = self._restart, self._client
        if restart is None or asker is None:
            return
        restart.step(now_ns)
        if restart.is_finished:
            self._restart = self._client = None
            if restart.failure:
                asker.fail(restart.failure)
            else:
                asker.finish({"ms": (now_ns - self._begun_ns) // 1_000_000})

    def _take(self, client: ControlClient, command: dict[str, Any], now_ns: int) -> None:
        match command.get("command"):
            case "describe":
                client.finish(self._described())
            case "restart" | "replace" if not self._may_change():
                client.fail("the appliance is starting; try again when it serves")
            case "restart" | "replace" if self._is_busy:
                client.fail("a restart is under way; try again when it has ended")
            case "restart":
                self._begin_restart(client, command.get("processes"), now_ns)
            case "replace":
                self._replacing_client = client
                if self._next_zygote is not None:
                    self._next_zygote.start(now_ns)
            case other:
                client.fail(f"there is no command {str(other)[:100]!r}")

    @property
    def _is_busy(self) -> bool:
        return self._restart is not None or self._replacing_client is not None

    def _replace_when_ready(self, client: ControlClient, now_ns: int) -> None:
        """Stop for the replacement when the next zygote has the modules."""
        if self._next_zygote is None or not self._next_zygote.is_awaited(now_ns):
            if not self.is_replacing:
                client.finish({"state": "stopping", "pid": os.getpid()})
            self.is_replacing = True

    def _begin_restart(self, client: ControlClient, names: object, now_ns: int) -> None:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            client.fail("processes is a list of names")
            return
        try:
            children = chosen(self._table, names)
        except ValueError as error:
            client.fail(str(error))
            return
        self._client, self._begun_ns = client, now_ns
        self._restart = RollingRestart(children, self._table, self._is_serving, client.send)

    def _described(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "program": os.path.dirname(os.path.abspath(launcher.__file__)),
            "python": sys.executable,
            "pid": os.getpid(),
            "data_dirs": self._data_dirs,
            "flags": sys.argv[1:],
            "working_directory": os.getcwd(),
            "environment": {
                name: value for name, value in os.environ.items() if name.startswith("TAILRACE_")
            },
            "serves": self._may_change(),
        }

    def close(self) -> None:
        """End the command that runs, for the appliance stops."""
        if self._client is not None:
            self._client.fail("the appliance stops")
        if self._replacing_client is not None and not self.is_replacing:
            self._replacing_client.fail("the appliance stops")
        self._control.close()
