"""The zygote: a process that has imported what the appliance's processes share, and forks them when
the supervisor asks (Android's name and idea).

    supervisor                        zygote                    maker              the new process
    request, gate, descriptors  ----> fork  ------------------> fork  -----------> waits until the maker has ended: the supervisor, its
                                      waits for the maker       ends               nearest subreaper, is its parent then
    knows its pid  <-------------------------------------------------------------- pid, through the gate
    holds its pidfd: "go"  ------------------------------------------------------> becomes what a plain start makes

One thread, no lock, no socket but the one to the supervisor, no ZeroMQ context, no shared memory,
no secret: a child begins with modules and nothing else.

Owner: nothing. The supervisor asks (`appliance.supervise.spawner`) and ends it.
Invariants: a process that the supervisor does not know never runs (without "go" it ends); a child
    has the descriptors, signals, environment, names and arguments that an interpreter of its own
    would have; a request that is no request costs one line in the log.
Crash: nothing is lost with it: its children are the supervisor's. A process that it was making
    ends, since its gate closes, and is started otherwise.

A zygote is the supervisor's fork, made before the supervisor has anything but modules. A later one
is an interpreter of its own, run by `tailrace.launcher`.
"""  # noqa: E501

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import orjson

from appliance.supervise.child_processes import MODULES
from shm.layout import Role
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

MODULE = "appliance.supervise.zygote"
COMM_NAME = "tr-zygote-0"
SHARED = (
    *(
        MODULES[role]
        for role in (Role.CONTROLLER, Role.FLUSHER, Role.WORKER, Role.FRONT, Role.SCHEDULER)
    ),
    "encodings.ascii",
)
"""What every appliance runs, and what each process would load for the first file of the kernel that
it reads; imported first of all. The modules of the others are imported when they are first asked
for.
"""
GO = b"go"
REQUEST_MAX_BYTES = 64 << 10
DESCRIPTORS_MAX = 253
"""As many as one message may carry (SCM_MAX_FD)."""
BLOCKED_SIGNALS = (*SUPERVISORS_SIGNALS, signal.SIGHUP)
"""Sent to the whole group by a terminal; the zygote goes on as long as the supervisor."""


class Request(NamedTuple):
    """One process to make. The gate's descriptor comes before the others."""

    module: str
    spec_fd: int
    """Where the specification is read from; one of `numbers`."""
    numbers: list[int]
    """What the descriptors are called in the new process."""

    def encode(self) -> bytes:
        return orjson.dumps(self._asdict())


class RequestError(ValueError):
    """A message that is no request."""


def decode_request(data: bytes, descriptor_count: int) -> Request:
    """Raises RequestError."""
    try:
        found: dict[str, Any] = orjson.loads(data)
        request = Request(**found)
    except (ValueError, TypeError) as error:
        raise RequestError(f"no request: {error}") from None
    if request.module not in MODULES.values():
        raise RequestError(f"{request.module!r} is none of the appliance's processes")
    numbers = request.numbers
    if not isinstance(numbers, list) or not all(
        type(number) is int and number > max(STANDARD) for number in numbers
    ):
        raise RequestError(f"{numbers!r} are no numbers of descriptors")
    if (
        len(set(numbers)) != len(numbers)
        or len(numbers) + 1 != descriptor_count
        or request.spec_fd not in numbers
    ):
        raise RequestError(
            f"{descriptor_count} descriptors came for {len(numbers)} numbers and a gate"
        )
    return request


def serve(channel: socket.socket, supervisor: int, ahead: Sequence[str] = SHARED) -> NoReturn:
    """Be the zygote of the process `supervisor` until `channel` closes, with nothing else of what
    it has open. Ends the process.
    """
    try:
        retain([channel.fileno()])
        set_comm_name(COMM_NAME)
        show_command_line(launcher.command(MODULE, str(channel.fileno()), str(supervisor)))
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        die_with_parent(supervisor)
        gc.disable()
        _serve(channel, supervisor, ahead)
    except Exception as error:
        _complain(f"the zygote ends: {error}")
        os._exit(1)
    os._exit(0)


def _serve(channel: socket.socket, supervisor: int, ahead: Sequence[str]) -> None:
    """Until `channel` closes. Raises OSError, and what a module that is imported raises."""
    for module in (
        ahead
    ):  # all before the first fork: what is imported behind it is not shared with that process
        importlib.import_module(module)
    while True:
        data, descriptors, _flags, _address = socket.recv_fds(
            channel, REQUEST_MAX_BYTES, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        if not data and not descriptors:
            return
        try:
            request = decode_request(data, len(descriptors))
        except RequestError as error:
            _complain(f"the zygote was asked for something else than a process: {error}")
        else:
            importlib.import_module(request.module)
            gc.freeze()  # the collector of a child leaves alone what it shares
            try:
                _make(request, channel, supervisor, descriptors)
            except OSError as error:
                _complain(f"{request.module} could not be forked: {error}")
        for fd in descriptors:
            os.close(fd)


def _make(
    request: Request, channel: socket.socket, supervisor: int, descriptors: list[int]
) -> None:
    """Fork a process that becomes the supervisor's child. Raises OSError when the kernel makes no
    process.
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
    """Tell the supervisor the process id, and wait for its "go". Without it, end: the supervisor
    does not know of this process, or is gone.
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
    """Run the program of `request` as an interpreter of its own would from here on."""
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
    """The zygote as an interpreter of its own: `appliance.supervise.zygote CHANNEL SUPERVISOR`."""
    channel_fd, supervisor = map(int, sys.argv[1:])
    serve(socket.socket(fileno=channel_fd), supervisor)
