"""The clients of threads keep to the same under gevent, whose threads are greenlets: the suite once
more, in a process that gevent has patched.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

SUITE = ["test_producer.py", "test_admin.py", "test_producer_places.py"]


def test_the_clients_of_threads_keep_to_the_suite_under_gevent() -> None:
    pytest.importorskip("gevent")
    folder = pathlib.Path(__file__).parent
    program = (
        "from gevent import monkey; monkey.patch_all()\n"
        "import sys, pytest\n"
        f"sys.exit(pytest.main([*{[str(folder / name) for name in SUITE]!r}, '-q', '-k', 'not "
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
