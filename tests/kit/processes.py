"""Looking at, stopping and killing the appliance's processes from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from shm.memory.layout import ProcessWord, RegionKind, Role
from shm.memory.region import Region
from shm.tables.control import Control
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.format.directory.data_dir import read_identity

HANG_LIMIT_S = 200.0
"""After so long, what a test waits for has hung; no test concludes anything else from it.
`--timeout` (pyproject.toml) ends a test that waits without such a limit.
"""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = HANG_LIMIT_S) -> None:
    """Poll a condition of the outside world (there is no event to wait on); fails the test when it
    never comes true.

    A condition that asks an appliance takes it milliseconds of CPU: the pause is longer then.
    """
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        asked = time.monotonic()
        if condition():
            return
        answered = time.monotonic()
        assert answered < deadline, f"never happened: {what}"
        pause.wait(min(max(0.01, 4 * (answered - asked)), 0.1))


def comm(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def children(appliance: EmbeddedAppliance) -> dict[str, int]:
    """comm name -> pid of the supervisor's children."""
    found = _children_of(appliance.pid)
    while found != (found := _children_of(appliance.pid)):
        pass  # one that ends while the kernel lists them hides another
    return {name: pid for pid in found if (name := comm(pid)).startswith("tr-")}


def _children_of(pid: int) -> list[int]:
    """The kernel's lists, one of each thread. A search among all processes (psutil's) takes
    milliseconds: in loops of waiting, a third of a core.
    """
    found: list[str] = []
    threads: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),  # it has ended
            open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file,
        ):
            found += file.read().split()
    return [int(child) for child in found]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process (SIGSTOP) for the block, which may kill it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # the supervisor has reaped it
            os.kill(pid, signal.SIGCONT)


def kill_and_wait_for_successor(
    appliance: EmbeddedAppliance, name: str, number: int = signal.SIGKILL
) -> None:
    """Kill one child by comm name; returns when another one of that name runs."""
    before = children(appliance)[name]
    os.kill(before, number)
    wait_until(lambda: children(appliance).get(name, before) != before, f"{name} is restarted")


def shared_memory(appliance: EmbeddedAppliance) -> list[str]:
    """Files that the instance has in /dev/shm now."""
    identity = read_identity(appliance.data_dir)
    assert identity is not None
    prefix = identity.prefix[1:]
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def word_of(appliance: EmbeddedAppliance, role: Role, index: int, word: ProcessWord) -> int:
    """A word of a process in the appliance's control region."""
    [name] = [name for name in shared_memory(appliance) if name.endswith("-control")]
    region = Region.attach(f"/{name}", RegionKind.CONTROL)
    try:
        return Control(region).process(role, index).load(word)
    finally:
        region.close()


def commits_of(appliance: EmbeddedAppliance, role: Role) -> int:
    """Number of transactions that the controller, or the process of groups, has committed."""
    return word_of(appliance, role, 0, ProcessWord.COMMIT_COUNT)
