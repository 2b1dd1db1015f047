"""The image that supervisors of tests are forked of: see `tests.kit.starts.forked_starts`.

Owner: the test process that has started it. Crash: it ends with that process.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
import traceback
from typing import Any, NoReturn

from appliance.supervise import supervisor
from appliance.supervise.processes import zygote
from shm.runtime.agent_runner import EXIT_PARENT_GONE
from shm.runtime.command_line import show_command_line
from shm.runtime.descriptors import renumber

DESCRIPTORS_MAX = 3
REQUEST_MAX_BYTES = 64 << 10


def main() -> NoReturn:
    """Serve requests until the channel closes, with the arguments CHANNEL ROOM."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    zygote.import_shared()
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _flags, _address = socket.recv_fds(
            channel, REQUEST_MAX_BYTES, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            os._exit(0)
        maker = os.fork()
        if not maker:
            _make(json.loads(data), channel, descriptors)
        os.waitpid(maker, 0)
        for fd in descriptors:
            os.close(fd)


def _make(request: dict[str, Any], channel: socket.socket, descriptors: list[int]) -> NoReturn:
    """Fork the supervisor, and exit: it becomes a child of the test process."""
    try:
        maker_ended = os.pidfd_open(os.getpid())
        if os.fork():
            os._exit(0)
        channel.close()
        gate, log, ready = descriptors
        poll = select.poll()
        poll.register(maker_ended, select.POLLIN)
        poll.poll()
        if os.getppid() != request["parent"]:
            os._exit(EXIT_PARENT_GONE)
        with socket.socket(fileno=gate) as asked:
            asked.send(b"%d" % os.getpid())
            if not asked.recv(8):
                os._exit(EXIT_PARENT_GONE)
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        renumber([ready], [request["ready_fd"]])
        os.set_inheritable(request["ready_fd"], True)
        arguments = request["arguments"]
        show_command_line(arguments)
        # as `tailrace.launcher` runs it, of whose arguments the module's own are behind its name
        sys.argv = ["tailrace", *arguments[arguments.index(supervisor.__name__) + 1 :]]
        supervisor.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
