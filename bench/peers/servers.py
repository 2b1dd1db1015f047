"""Starting, killing and running beside: what every peer needs."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

_CONTEXT = multiprocessing.get_context("spawn")
START_TIMEOUT_S = 60.0
CHILD_TIMEOUT_S = 240.0
_TIED = str(pathlib.Path(__file__).with_name("tied.py"))


class Missing(RuntimeError):
    """A peer that cannot be had here; the text says why, and what to install."""


def tied(command: Sequence[str]) -> list[str]:
    """The command, to be killed when the thread that starts it ends: a bench that is killed leaves
    nothing behind.
    """
    return [sys.executable, "-I", "-S", _TIED, str(os.getpid()), *command]


class Server:
    """A peer's process; ended with `stop`."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log_path: str,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start it and wait until `port` is open. Raises Missing when it ends, or does not listen
        in time.
        """
        self.port = port
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_open(port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise Missing(f"{command[0]} did not start; see {log_path}")
            time.sleep(0.005)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that takes too long."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


def is_open(port: int) -> bool:
    """True if a server listens on the port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port without a listener at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, from a fresh interpreter: no client shares a process, or what it has
    warmed up, with another. Raises RuntimeError without one.
    """
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    child = _CONTEXT.Process(target=_answer, args=(theirs, function, arguments))
    child.start()
    theirs.close()
    try:
        if not ours.poll(CHILD_TIMEOUT_S):
            child.kill()
            raise RuntimeError(f"{function.__name__} had no result after {CHILD_TIMEOUT_S:g} s")
        found = ours.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__} ended without a result") from None
    finally:
        child.join()
    return found


def _answer(connection: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    connection.send(function(*arguments))
