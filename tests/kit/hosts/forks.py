"""Forked children, and how they ended."""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable

import pytest

from tailrace.core.errors import ClientClosedError

CHILD_TIMEOUT_S = 60
REFUSED = 7
USED = 9


def wait_for_child(pid: int) -> int:
    """Its exit code; one that hangs is killed, and the test fails."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(CHILD_TIMEOUT_S * 1000):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(act: Callable[[], object]) -> int:
    """Fork; what came of `act` there: REFUSED (by the sentence about fork), USED, or 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = USED
        except ClientClosedError as error:
            code = REFUSED if "fork()" in str(error) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return wait_for_child(pid)
