"""A real Redis of a test's own, on a Unix socket; where there is none, the test is skipped with a
sentence.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
import redis

from tests.kit.processes import HANG_LIMIT_S, wait_until


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """The path of its socket. It keeps what it has acknowledged (appendfsync always)."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is missing (Debian: apt-get install redis-server)")
    with tempfile.TemporaryDirectory(
        prefix="tailrace-redis-"
    ) as directory:  # a socket's path must be short
        path = f"{directory}/socket"
        command = [
            program,
            "--port",
            "0",
            "--unixsocket",
            path,
            "--dir",
            directory,
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: process.poll() is not None or _answers(path), "redis-server answers")
            assert process.poll() is None, f"redis-server ended with {process.returncode}"
            yield path
        finally:
            process.terminate()
            process.wait(HANG_LIMIT_S)


def _answers(path: str) -> bool:
    try:
        with redis.Redis(unix_socket_path=path) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False
