"""The clients of threads keep to the same under gevent, whose threads are greenlets: the suite once
more, in a process that gevent has patched.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.kit.matrices import short
from tests.kit.processes import HANG_LIMIT_S

SUITES = ["test_producer.py", "test_closing.py"], ["test_admin.py", "test_producer_places.py"]


@pytest.mark.slow_because("suites in a process of their own")
@pytest.mark.parametrize("suites", short(SUITES), ids=" ".join)
def test_the_clients_of_threads_keep_to_the_suite_under_gevent(suites: list[str]) -> None:
    pytest.importorskip("gevent")
    folder = pathlib.Path(__file__).parent
    program = (
        "from gevent import monkey; monkey.patch_all()\n"
        "import sys, pytest\n"
        f"sys.exit(pytest.main([*{[str(folder / name) for name in suites]!r}, '-q', '-k', 'not "
        "loop and not signal and not cancelled']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=folder.parent.parent,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-2_000:]


def test_a_socket_that_is_closed_while_a_greenlet_sleeps_on_it_ends_no_process() -> None:
    """libev aborts the process when it is to wait for a closed descriptor."""
    pytest.importorskip("gevent")
    program = """
import time
wait = time.sleep  # of the operating system
from gevent import monkey
monkey.patch_all()
import gevent, os
from tailrace.client.connections.runtime import DealerSocket, sleep_on
socket = DealerSocket("tcp://127.0.0.1:1")
fd = socket.fileno()
def close():
    socket.close()
    wait(0.2)  # until libzmq's own thread has closed the descriptor
gevent.joinall([gevent.spawn(sleep_on, (fd,), 50_000_000), gevent.spawn(close)], raise_error=True)
while os.path.exists(f"/proc/self/fd/{fd}"):  # it is closed when the sleep has ended
    wait(0.01)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
