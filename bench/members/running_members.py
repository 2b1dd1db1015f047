"""Processes of members, and the load on their partitions, of `bench.members.rebalance`.

Owner: the bench, which ends both.
Invariants: each process writes its notes and its log to files of its own.
"""

from __future__ import annotations

import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from itertools import pairwise

from bench.members.member_notes import History, read_notes
from bench.peers.servers import tied

RATE = 20
"""Records a second to each partition."""


class Members:
    """The processes of members."""

    def __init__(self, command: list[str], directory: str) -> None:
        self._command, self._directory = command, pathlib.Path(directory)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (self._directory / "notes").mkdir(parents=True)

    def start(self, name: str, count: int) -> None:
        """One more process; its members are NAME.0, NAME.1, ..."""
        command = [*self._command, str(count), str(self._directory / "notes" / name)]
        with open(self._directory / f"{name}.log", "wb") as log:
            self._processes[name] = subprocess.Popen(
                tied(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def signal(self, name: str, number: int) -> None:
        """Send it to a process, which is looked after no longer, but for its end."""
        self._processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self._processes.pop(name).wait()

    def history(self) -> History:
        """The notes of all members. Raises RuntimeError when a process has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                said = (
                    (self._directory / f"{name}.log")
                    .read_text(errors="replace")
                    .strip()
                    .splitlines()
                )
                raise RuntimeError(
                    "a process of members has ended: "
                    f"{said[-1] if said else f'exit code {process.returncode}'}"
                )
        return read_notes(self._directory / "notes")

    def stop(self) -> None:
        """SIGKILL to all."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()


class Sender(threading.Thread):
    """Sends RATE records a second to each of `partitions`, until `stop`. Another set may be put in
    its place meanwhile.
    """

    def __init__(
        self, send: Callable[[Collection[int]], None], partitions: Collection[int]
    ) -> None:
        super().__init__(name="sender")
        self.partitions = partitions
        self._send = send
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._sent_ns: list[int] = []

    def run(self) -> None:
        """See the class."""
        due = time.monotonic()
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            try:
                self._send(self.partitions)
            except Exception as error:
                self._error = error
                return
            self._sent_ns.append(time.monotonic_ns())
            due = max(
                due + 1 / RATE, time.monotonic() - 1
            )  # one that was held up does not make up for more than a second

    def stop(self) -> None:
        """And wait for its end."""
        self._ended.set()
        self.join()

    def check(self) -> None:
        """Raises RuntimeError when it has ended before its time."""
        if self._error is not None:
            raise RuntimeError(f"the sender has failed: {self._error!r}") from self._error

    def longest_pause_ms(self, begin_ns: int) -> float:
        """Between two sends from `begin_ns` on."""
        times = [ns for ns in self._sent_ns if ns >= begin_ns]
        return max(after - before for before, after in pairwise(times)) / 1e6
