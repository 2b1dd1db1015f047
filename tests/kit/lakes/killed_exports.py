"""Exports that a kill ends at each of their steps in turn: before every call that makes a file, a
name or a commit, and in the middle of a file.

A process that has loaded everything forks one child for each step; what the n-th leaves lies in
DIRECTORY/n. Whoever goes on with it is another process.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

from tests.kit.processes import HANG_LIMIT_S

CALLS = ("fsync", "link", "unlink", "rename", "makedirs")
STEPS_MAX = 500


def killed_exports(
    directory: pathlib.Path, topic: str, address: str, **settings: Any
) -> list[pathlib.Path]:
    """The directories of exports that were killed, each at another step; one more was not, for it
    had fewer.
    """
    arguments = [str(directory), topic, address, repr(settings)]
    command = [
        sys.executable,
        "-P",
        "-c",
        "from tests.kit.lakes.killed_exports import main; main()",
        *arguments,
    ]
    subprocess.run(
        command, check=True, timeout=4 * HANG_LIMIT_S, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    return sorted((path for path in directory.iterdir()), key=lambda path: int(path.name))


def main() -> None:
    import ast

    import pyarrow.parquet as pq

    from tailrace.export.export import Export

    assert pq.write_table is not None  # loaded here, not in every child
    directory, topic, address, settings = sys.argv[1:]
    for step in range(1, STEPS_MAX):
        pid = os.fork()
        if not pid:
            _kill_at(step)
            list(Export(topic, f"{directory}/{step}", address, **ast.literal_eval(settings)).run())
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not status:
            return
        assert os.WIFSIGNALED(status), f"step {step} ended with {status}"
        assert os.WTERMSIG(status) == signal.SIGKILL
    raise AssertionError("it never ended")


def _kill_at(step: int) -> None:
    """Have this process killed before the step-th of these calls."""
    from tailrace.export import file_sink as file_target

    done = 0

    def count() -> bool:
        nonlocal done
        done += 1
        return done == step

    def counted(call: Any) -> Any:
        def counting(*arguments: Any, **named: Any) -> Any:
            if count():
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return counting

    write_rows = file_target.write_rows

    def write_half(sink: Any, *arguments: Any) -> None:
        if count():
            sink.write(b"PAR1 half of a file")
            sink.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write_rows(sink, *arguments)

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    file_target.write_rows = write_half  # type: ignore[assignment]
