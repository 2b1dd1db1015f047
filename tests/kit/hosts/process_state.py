"""A program that tells what it finds when it begins, for tests of how processes are started. It
runs in the place of one of the appliance's.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import uuid

from shm import crash_points
from shm.runtime.agent_runner import SPEC_VARIABLE

_STANDARD_SIGNALS = (1 << 31) - 1
"""The C library has the two behind them for itself."""


def found_state() -> dict[str, object]:
    """State that must be the same however this process was started."""
    spec_fd = os.environ[SPEC_VARIABLE]
    with os.scandir("/proc/self/fd") as entries:
        descriptors = {int(entry.name): os.readlink(entry.path) for entry in entries}
    with open("/proc/self/status", encoding="ascii") as file:
        status = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    with open("/proc/self/cmdline", encoding="utf-8") as file:
        command = file.read().rstrip("\0").split("\0")
    return {
        "descriptors": {
            fd: name for fd, name in descriptors.items() if not name.startswith("/proc/")
        },
        "spec": os.pread(int(spec_fd), 100, 0).decode(),
        "environment": dict(os.environ),
        "arguments": sys.argv,
        "command": command,
        "directory": os.getcwd(),
        "path": sorted(set(sys.path)),
        "signals": {
            name: int(status[name], 16) & _STANDARD_SIGNALS for name in ("SigBlk", "SigIgn")
        },
        "handlers": [
            str(signal.getsignal(number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        ],
        "cores": sorted(os.sched_getaffinity(0)),
        "groups": [os.getpgid(0), os.getsid(0), os.getppid()],
        "umask": status["Umask"].strip(),
        "threads": [
            threading.active_count(),
            threading.current_thread().name,
            int(status["Threads"]),
        ],
        "log_handlers": len(logging.getLogger().handlers),
        "collects": gc.isenabled(),
        "armed": crash_points.is_armed(),
    }


def main() -> None:
    """Write the state, and what must differ, to the file that the specification names."""
    path = os.pread(int(os.environ[SPEC_VARIABLE]), 4096, 0).decode()
    state = found_state()
    differs = [os.getpid(), random.random(), random.getrandbits(64), str(uuid.uuid4())]
    with open(path, "x", encoding="utf-8") as file:
        json.dump({"same": state, "differs": differs}, file)
