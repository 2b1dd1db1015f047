"""Programs that start processes as a supervisor does. Each is a process of its own: who becomes a
subreaper stays one.
"""

from __future__ import annotations

import json
from typing import Any

from tests.kit.hosts.programs import run_program

PRELUDE = """
import contextlib, json, logging, os, pathlib, select, signal, socket, sys, time
from appliance.supervise.processes import spawner
from appliance.supervise.processes import zygote
from appliance.supervise.processes.child_processes import MODULES
from appliance.supervise.processes.spawner import Spawner, reap_strangers
from shm.memory.layout import Role

logging.basicConfig(stream=sys.stderr, format="LOG %(message)s")
directory = pathlib.Path(sys.argv[1])
MODULES[Role.CONSOLE] = "tests.kit.hosts.process_state"
zygote.SHARED = ()

def start(spawner, name, descriptors=()):
    # The specification of this program is the path that it writes to.
    spec = os.memfd_create("specification")
    os.write(spec, str(directory / name).encode())
    os.set_inheritable(spec, True)
    try:
        return spawner.start("tests.kit.hosts.process_state", spec, list(descriptors))
    finally:
        os.close(spec)

def ended(started):
    # Waits for its end; the exit status.
    poll = select.poll()
    poll.register(started.pidfd, select.POLLIN)
    assert poll.poll(60_000)
    os.close(started.pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1])

def told(name):
    return json.loads((directory / name).read_text())
"""


def run_as_supervisor(text: str, directory: object) -> tuple[Any, list[str]]:
    """Run `text` behind the prelude; returns the JSON that it printed last, and the lines that it
    logged. Fails when it does.
    """
    done = run_program(PRELUDE + text, str(directory))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), [
        line.removeprefix("LOG ") for line in done.stderr.splitlines() if line
    ]
