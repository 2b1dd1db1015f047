"""The zygote: a process with the imported modules that the appliance's processes share, which forks
them on the supervisor's request (after Android's zygote).

    supervisor                       zygote                intermediate    new process
    request, gate, descriptors ----> fork  --------------> fork  --------> waits for the end of
                                     waits for it          exits           the intermediate
    has its pid  <-------------------------------------------------------- pid, through the gate
    has its pidfd: "go"  ------------------------------------------------> runs the program

The supervisor is the nearest subreaper, so it becomes the parent of the new process when the
intermediate exits.

The zygote has one thread, no lock, no socket except the channel to the supervisor, no ZeroMQ
context, no shared memory and no secret. A child starts with modules only.

Owner: none. The supervisor (`appliance.supervise.processes.spawner`) sends requests and ends it.
Invariants:
- A process that the supervisor does not know never runs. Without "go" it exits.
- A child has the descriptors, signals, environment, names and arguments of an interpreter of its
  own.
- A malformed request costs one line in the log.
Crash: nothing is lost, since its children are the supervisor's. The gate of a process that it was
    forking closes. That process exits and is started in another way.

The first zygote is a fork of the supervisor, made when the supervisor has only modules: its own and
the shared ones, so that both share all pages of them. A later one is an interpreter of its own, run
by `tailrace.launcher`, as is the one that an upgrade starts before it stops anything
(`appliance.supervise.processes.next_zygote`).
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from typing import Any, NamedTuple, NoReturn

import orjson

from appliance.supervise.processes.child_processes import KAFKA_GATEWAY, MODULES
from shm.memory.layout import Role
from shm.runtime.agent_runner import (
    EXIT_PARENT_GONE,
    SPEC_VARIABLE,
    SUPERVISORS_SIGNALS,
    die_with_parent,
    end_with,
    set_comm_name,
)
from shm.runtime.command_line import show_command_line
from shm.runtime.descriptors import STANDARD, renumber, retain
from tailrace import launcher

MODULE = "appliance.supervise.processes.zygote"
COMM_NAME = "tr-zygote-0"
SHARED = (
    *(MODULES[role] for role in (Role.CONTROLLER, Role.FLUSHER, Role.WORKER, Role.FRONT)),
    "encodings.ascii",
)
"""Modules imported before the first fork: the programs of every appliance, and the codec that each
process needs to read files of /proc. Other programs are imported at their first request.
"""
GO = b"go"
IMPORTED = b"imported"
"""The one message of a zygote on its channel, if the supervisor waits for it: it has the shared
modules.
"""
ANNOUNCE = "announce"
"""An argument of a zygote that is to send IMPORTED."""
REQUEST_MAX_BYTES = 64 << 10
DESCRIPTORS_MAX = 253
"""Limit of descriptors in one message (SCM_MAX_FD)."""
BLOCKED_SIGNALS = SUPERVISORS_SIGNALS
"""Signals that a terminal sends to the whole process group. The zygote ends with the supervisor."""


class Request(NamedTuple):
    """A request to fork one process. The gate's descriptor comes before the others."""

    module: str
    spec_fd: int
    """Number of the descriptor with the specification, one of `numbers`."""
    numbers: list[int]
    """Numbers of the descriptors in the new process."""

    def encode(self) -> bytes:
        return orjson.dumps(self._asdict())


class RequestError(ValueError):
    """The message is not a valid request."""


def decode_request(data: bytes, descriptor_count: int) -> Request:
    """Decode and validate a request. Raises RequestError."""
    try:
        found: dict[str, Any] = orjson.loads(data)
        request = Request(**found)
    except (ValueError, TypeError) as error:
        raise RequestError(f"not a request: {error}") from None
    if request.module not in (*MODULES.values(), KAFKA_GATEWAY):
        raise RequestError(f"{request.module!r} is not a program of the appliance")
    numbers = request.numbers
    if not isinstance(numbers, list) or not all(
        type(number) is int and number > max(STANDARD) for number in numbers
    ):
        raise RequestError(f"{numbers!r} are not numbers of descriptors")
    if (
        len(set(numbers)) != len(numbers)
        or len(numbers) + 1 != descriptor_count
        or request.spec_fd not in numbers
    ):
        raise RequestError(
            f"{descriptor_count} descriptors came for {len(numbers)} numbers and a gate"
        )
    return request


def import_shared() -> None:
    """Import the modules that the processes share. Raises the errors of these modules."""
    for module in SHARED:
        importlib.import_module(module)


def serve(channel: socket.socket, supervisor: int, *, announces: bool = False) -> NoReturn:
    """Serve as the zygote of the process `supervisor` until `channel` closes, with all other
    descriptors closed. Ends the process. `announces`: the supervisor waits for IMPORTED.
    """
    try:
        retain([channel.fileno()])
        set_comm_name(COMM_NAME)
        show_command_line(launcher.command(MODULE, str(channel.fileno()), str(supervisor)))
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        die_with_parent(supervisor)
        gc.disable()
        import_shared()  # before the first fork, since later imports are not shared
        if announces:
            channel.send(IMPORTED)
        _serve(channel, supervisor)
    except Exception as error:
        _complain(f"the zygote ends: {error}")
        os._exit(1)
    os._exit(0)


def _serve(channel: socket.socket, supervisor: int) -> None:
    """Serve requests until `channel` closes. Raises OSError, and the errors of imported modules."""
    while True:
        data, descriptors, _flags, _address = socket.recv_fds(
            channel, REQUEST_MAX_BYTES, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        if not data and not descriptors:
            return
        try:
            request = decode_request(data, len(descriptors))
        except RequestError as error:
            _complain(f"the zygote received an invalid request: {error}")
        else:
            importlib.import_module(request.module)
            gc.freeze()  # a child's collector does not write to the shared pages
            try:
                _make(request, channel, supervisor, descriptors)
            except OSError as error:
                _complain(f"{request.module} could not be forked: {error}")
        for fd in descriptors:
            os.close(fd)


def _make(
    request: Request, channel: socket.socket, supervisor: int, descriptors: list[int]
) -> None:
    """Fork a process that becomes the supervisor's child. Raises OSError when the kernel
    refuses.
    """
    maker = os.fork()
    if maker:
        os.waitpid(maker, 0)
        return
    try:  # whatever happens from here on, this process never returns into the zygote's loop
        maker_ended = os.pidfd_open(os.getpid())
        if os.fork():
            os._exit(0)
        channel.close()
        _pass_gate(descriptors[0], maker_ended, supervisor)
        renumber(descriptors[1:], request.numbers)
        become(request)
    except BaseException as error:
        _complain(f"{request.module} could not be forked: {error}")
    finally:
        os._exit(1)


def _pass_gate(gate_fd: int, maker_ended: int, supervisor: int) -> None:
    """Send the pid to the supervisor and wait for its "go". Exit without it, since the supervisor
    does not know this process or has ended.
    """
    poll = select.poll()
    poll.register(maker_ended, select.POLLIN)
    poll.poll()
    if os.getppid() != supervisor:
        os._exit(EXIT_PARENT_GONE)
    with socket.socket(fileno=gate_fd) as gate:
        try:
            gate.send(b"%d" % os.getpid())
            may_go = gate.recv(len(GO)) == GO
        except OSError:  # the supervisor has closed it
            may_go = False
    if not may_go:
        os._exit(EXIT_PARENT_GONE)


def become(request: Request) -> NoReturn:
    """Run the program of `request` as in an interpreter of its own."""
    arguments = launcher.command(request.module)
    sys.argv = ["tailrace"]
    show_command_line(arguments)
    os.environ[SPEC_VARIABLE] = str(request.spec_fd)
    signal.pthread_sigmask(signal.SIG_SETMASK, SUPERVISORS_SIGNALS)
    gc.enable()
    end_with(sys.modules[request.module].main)


def _complain(sentence: str) -> None:
    sys.stderr.write(
        f"{sentence}\n" if sentence.startswith("tailrace: ") else f"tailrace: {sentence}\n"
    )
    sys.stderr.flush()


def main() -> NoReturn:
    """Run the zygote as an interpreter of its own, with the arguments CHANNEL SUPERVISOR, and
    perhaps ANNOUNCE.
    """
    channel_fd, supervisor = map(int, sys.argv[1:3])
    serve(socket.socket(fileno=channel_fd), supervisor, announces=ANNOUNCE in sys.argv[3:])
