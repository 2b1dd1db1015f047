"""An embedded appliance for tests and notebooks: the real processes on a temporary data directory.

It is stopped and its directory removed at exit.

Owner: the program that starts it holds the other end of the socket that the supervisor watches.

Invariants:
- The appliance ends with its block, with the program, and when the program is killed: each closes
  the socket.
- A child that the program forks closes its copy at once, and stops and removes nothing.

Crash: a killed program leaves the temporary directory, and no process.
"""

from __future__ import annotations

import ast
import atexit
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tailrace import launcher
from tailrace.core import fork
from tailrace.core.errors import NotReachableError, NotSupportedError

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 40


class EmbeddedAppliance:
    """A running appliance; `stop()` ends it.

    `address` is for clients (`addresses` has one per front), `data_dir` contains its files, and
    `pid` is its supervisor's.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        lifeline: socket.socket,
        addresses: list[str],
        data_dir: str,
        remove: str | None,
        log_path: str,
        kafka_addresses: Sequence[str] = (),
    ) -> None:
        self.address = addresses[0]
        self.addresses = addresses
        self.kafka_addresses = list(kafka_addresses)
        """Addresses of Kafka clients, by the setting `kafka.listen`."""
        self.data_dir = data_dir
        self.pid = process.pid
        self.log_path = log_path
        """The file with the log of its processes."""
        self._process = process
        self._lifeline = lifeline
        self._remove = remove
        self._is_inherited = False
        """True in a child of the program that started it."""
        atexit.register(self._end_at_exit)
        fork.add(self)

    def after_fork(self) -> None:
        """Detach a child from the appliance, which ends with the program."""
        self._is_inherited = True
        self._lifeline.close()
        self._process.returncode = 0  # not a child of this process, so it cannot be waited for

    def close(self) -> None:
        """Stop it if it runs. Does nothing a second time, or in a child of the program that started
        it.
        """
        if not self._is_inherited:
            self.stop()

    def _end_at_exit(self) -> None:
        """Close the producers before the appliance, so that buffered records still reach it."""
        producers = sys.modules.get("tailrace.producer.producer")
        if producers is not None:
            producers.close_at_exit()
        self.close()

    def stop(self) -> int:
        """Stop it, remove the temporary directory, and return the exit code.

        Raises ClientClosedError in a child of the program that started it.
        """
        if self._is_inherited:
            raise fork.forked_error("appliance")
        atexit.unregister(self._end_at_exit)
        self._lifeline.close()
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._remove is not None:
            shutil.rmtree(self._remove, ignore_errors=True)
            self._remove = None
        return code


def start_embedded(
    *,
    data_dir: str | None = None,
    listen: str | Sequence[str] = "tcp://127.0.0.1:0",
    settings: Mapping[str, Any] | None = None,
    auto_create_topics: bool = True,
) -> EmbeddedAppliance:
    """Start an appliance and return when it serves.

    Raises NotReachableError with its output if it does not start, NotSupportedError if only the
    client is installed.
    """
    if launcher.server_root() is None:
        error = NotSupportedError(launcher.CLIENT_ALONE)
        error.advice = f"{launcher.INSTALL_SERVER}."
        raise error
    temporary = tempfile.mkdtemp(prefix="tailrace-") if data_dir is None else None
    directory = data_dir or os.path.join(str(temporary), "data")
    log_path = os.path.join(temporary or directory, "tailrace.log")
    os.makedirs(os.path.dirname(log_path), mode=0o700, exist_ok=True)
    ours, theirs = socket.socketpair()
    arguments = _arguments(directory, listen, settings or {}, auto_create_topics, theirs.fileno())
    with open(log_path, "ab", opener=_private) as log:
        process = start_supervisor(arguments, log.fileno(), theirs.fileno())
    theirs.close()
    ready = _await_ready(process, ours, temporary, log_path)
    # The JSON has only text and whole numbers, so it is also a Python literal. `json` may be a
    # module of the program's own.
    announced = ast.literal_eval(ready.decode())
    return EmbeddedAppliance(
        process,
        ours,
        announced["addresses"],
        directory,
        temporary,
        log_path,
        announced.get("kafka", ()),
    )


def _arguments(
    directory: str,
    listen: str | Sequence[str],
    settings: Mapping[str, Any],
    auto_create_topics: bool,
    ready_fd: int,
) -> list[str]:
    """The command line of the supervisor."""
    given = {
        "ring_bytes": 16 << 20,
        "http.listen": "",
        "auto_create_topics": str(auto_create_topics).lower(),
        **settings,
    }
    arguments = launcher.command(
        "appliance.supervise.supervisor",
        *(() if "data_dirs" in given else ("--data-dir", directory)),
        "--ready-fd",
        str(ready_fd),
    )
    for address in [listen] if isinstance(listen, str) else listen:
        arguments += ["--listen", address]
    for name, value in given.items():
        arguments += ["--set", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    return arguments


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def start_supervisor(
    arguments: Sequence[str], log_fd: int, ready_fd: int
) -> subprocess.Popen[bytes]:
    """Start the supervisor with its log and the socket that it watches. Raises OSError.

    It has a session of its own: Ctrl-C in the terminal goes to the program, which stops it.
    """
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=log_fd,
        stderr=log_fd,
        pass_fds=[ready_fd],
        env=supervisor_environment(),
        start_new_session=True,
    )


def supervisor_environment() -> dict[str, str]:
    """Return the program's environment without settings of another appliance."""
    dropped = {
        name for name in os.environ if name.startswith("TAILRACE_") or name == "NOTIFY_SOCKET"
    } - {"TAILRACE_PURE"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def _await_ready(
    process: subprocess.Popen[bytes], ours: socket.socket, temporary: str | None, log_path: str
) -> bytes:
    """Wait for the line of a ready appliance. Raises NotReachableError if it ends first."""
    try:
        ready = _read_line(ours)
    except BaseException:
        process.kill()
        process.wait()
        ours.close()
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if ready:
        return ready
    process.wait()
    ours.close()
    with open(log_path, encoding="utf-8", errors="replace") as log_file:
        messages = [line for line in log_file.read().splitlines() if line.startswith("tailrace:")]
    if temporary:
        shutil.rmtree(temporary, ignore_errors=True)
    raise NotReachableError(
        f"the embedded appliance did not start (exit code {process.returncode}): "
        f"{' '.join(messages) or 'see ' + log_path}"
    )


def _read_line(connection: socket.socket) -> bytes:
    """The supervisor's first line, b"" if it ended without one.

    Raises NotReachableError after START_TIMEOUT_S.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(START_TIMEOUT_S * 1000):
            raise NotReachableError(
                f"the embedded appliance did not start within {START_TIMEOUT_S} s; look at its log"
            )
        try:
            piece = connection.recv(4096)
        except ConnectionResetError:
            return b""
        if not piece:
            return b""
        line += piece
    return line


class Embedding:
    """The result of `embedded`: use it in a `with` block, or call `start()` and `close()`.

    It runs at most one appliance at a time.
    """

    def __init__(self, start: Callable[[], EmbeddedAppliance]) -> None:
        self._start = start
        self._running: EmbeddedAppliance | None = None

    def start(self) -> EmbeddedAppliance:
        """Start the appliance and return when it serves.

        Raises NotReachableError with its output if it does not start.
        """
        if self._running is None:
            self._running = self._start()
        return self._running

    @property
    def address(self) -> str:
        """The address for clients. Raises NotReachableError before `start` and after `close`."""
        if self._running is None:
            raise NotReachableError(
                "this appliance does not run: call start() first, or write `with "
                "tailrace.embedded() as appliance`"
            )
        return self._running.address

    def close(self) -> None:
        """Stop it if it runs. Does nothing in a child of the program that started it."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def __enter__(self) -> EmbeddedAppliance:
        return self.start()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()


def embedded(
    *,
    data_dir: str | None = None,
    listen: str | Sequence[str] = "tcp://127.0.0.1:0",
    settings: Mapping[str, Any] | None = None,
    auto_create_topics: bool = True,
) -> Embedding:
    """A private appliance for a `with` block, or from `start()` to `close()`.

    `settings` are the appliance's (`{"ring_bytes": "64MiB"}`). With `data_dir`, its files are kept.
    A producer that sends to a missing topic creates it, which a served appliance does not allow by
    default; `auto_create_topics=False` disables this.
    """
    return Embedding(
        lambda: start_embedded(
            data_dir=data_dir,
            listen=listen,
            settings=settings,
            auto_create_topics=auto_create_topics,
        )
    )
