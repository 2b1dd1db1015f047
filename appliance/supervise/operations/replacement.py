"""Replacement of the supervisor by the program that is installed now.

Owner: the supervisor, after it has stopped everything.
Invariants:
- The process id, the flags, the working directory, the environment, systemd's sockets and the
  descriptor of the program that started it stay.
- Locks end with the old program, whose other descriptors are closed.
Crash: as that of a start.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import NoReturn

from tailrace import launcher


def become_installed_program(descriptors: Iterable[int], service: dict[str, str]) -> NoReturn:
    """Become the installed program, which gets these descriptors (-1: none). `service`: systemd's
    variables, as they were at the start.
    """
    for fd in descriptors:
        if fd >= 0:
            os.set_inheritable(fd, True)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(service)
    arguments = launcher.command("appliance.supervise.supervisor", *sys.argv[1:])
    os.execv(arguments[0], arguments)
