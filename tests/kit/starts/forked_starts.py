"""Appliances of tests start as forks of one process that has imported the supervisor's modules: a
start as an interpreter of its own takes several times the CPU.

    test process                 image                      intermediate    supervisor
    is a subreaper
    request, descriptors ------> fork  -------------------> fork  --------> waits for the end of
                                 waits for it               exits           the intermediate
    pid <------------------------------------------------------------------ pid
    is no subreaper
    "go" -----------------------------------------------------------------> runs

Owner: the test process; `tests/conftest.py` installs it.
Invariants:
- A supervisor is a child of the test process, and has the arguments, variables, directory, mask and
  limits that it would have as an interpreter of its own. Where the image has others, it is one.
- The image has one thread, and no state of an appliance.
Crash: the image and a supervisor without "go" end with the test process.

`tests/kit/starts/image.py` is the image's program. Programs that tests start, and
`tailrace serve`, start their supervisors as users do.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from tailrace import embedded_appliance, launcher

IMAGE = "tests.kit.starts.image"
GO = b"go"
ROOM = "-" * 1_000
"""An argument of the image: the kernel shows a supervisor's own arguments in its place."""
_PR_SET_CHILD_SUBREAPER = 36
_TEST_VARIABLE = "PYTEST_CURRENT_TEST"
_as_interpreter = embedded_appliance.start_supervisor
_lock = threading.Lock()
_usual: dict[str, Any] = {}
"""State that this process passes on to children between tests."""
_image: _Image | None = None


class ForkedSupervisor(subprocess.Popen[bytes]):
    """A child that this process did not start by itself."""

    def __init__(self, arguments: Sequence[str], pid: int) -> None:
        self.args = arguments
        self.pid = pid
        self.returncode: Any = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


class _Image:
    """The running image."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.owner = os.getpid()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                launcher.command(IMAGE, str(theirs.fileno()), ROOM),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=variables,
                start_new_session=True,
            )

    def fork(self, arguments: Sequence[str], log_fd: int, ready_fd: int) -> int:
        """Fork a supervisor; returns its pid. Raises OSError."""
        gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": arguments, "ready_fd": ready_fd, "parent": os.getpid()}
        with gate:
            _adopt_descendants(True)
            try:
                with theirs:
                    socket.send_fds(
                        self._channel,
                        [json.dumps(request).encode()],
                        [theirs.fileno(), log_fd, ready_fd],
                    )
                pid = int(gate.recv(32) or b"0")
            finally:
                _adopt_descendants(False)
            if not pid:
                raise OSError("the image of appliances did not fork a supervisor")
            gate.send(GO)
        return pid

    def close(self) -> None:
        """End it, unless it is another process's."""
        self._channel.close()
        if self.owner == os.getpid():
            self._process.wait()


def install() -> None:
    """From now on the appliances of this process start as forks, unless a test changes what they
    would inherit of it. A process that gevent has patched has no sockets that wait for the image.
    """
    if socket.socket.__module__.startswith("gevent"):
        return
    _usual.update(_inherited())
    setattr(embedded_appliance, "start_supervisor", start_supervisor)  # noqa: B010


def start_supervisor(
    arguments: Sequence[str], log_fd: int, ready_fd: int
) -> subprocess.Popen[bytes]:
    """Start it as `tailrace.embedded_appliance.start_supervisor` does, and faster."""
    global _image
    if _inherited() != _usual:
        return _as_interpreter(arguments, log_fd, ready_fd)
    with _lock:
        if _image is None:
            _image = _Image(_usual["variables"])
            atexit.register(_image.close)
        if _image.owner != os.getpid():  # a fork of the process that has it
            return _as_interpreter(arguments, log_fd, ready_fd)
        return ForkedSupervisor(arguments, _image.fork(arguments, log_fd, ready_fd))


def _inherited() -> dict[str, Any]:
    """All that a process has of the one that starts it."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
        umask = next(line for line in status if line.startswith("Umask"))
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "program": launcher.command(""),  # a test may put a shell before it, or in its place
        "variables": {
            name: value
            for name, value in embedded_appliance.supervisor_environment().items()
            if name != _TEST_VARIABLE
        },
        "directory": os.getcwd(),
        "umask": umask,
        "limits": {limit: resource.getrlimit(limit) for limit in limits},
        "cores": os.sched_getaffinity(0),
    }


def _adopt_descendants(adopts: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
