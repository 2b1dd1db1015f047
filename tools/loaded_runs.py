"""Tests beside a busy machine: `python -P tools/loaded_runs.py RUNS COMMAND...` runs a command so
many times, one after the other, while a process of ours burns each core.

No test may depend on the machine's speed. The last line has the number of runs that succeeded; the
exit code is 1 unless all did.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager


def _burn() -> None:
    while True:
        pass


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Processes that each burn a core for the block."""
    processes = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        for _ in range(count):
            burner = processes.Process(target=_burn, daemon=True)
            burner.start()
            stack.callback(burner.join)
            stack.callback(burner.kill)
        yield


def main(arguments: Sequence[str]) -> int:
    runs, command = int(arguments[0]), arguments[1:]
    succeeded = 0
    with burning(os.cpu_count() or 1):
        for number in range(1, runs + 1):
            started = time.monotonic()
            status = subprocess.run(command, check=False).returncode
            succeeded += status == 0
            print(f"run {number}: exit {status} in {time.monotonic() - started:.0f} s", flush=True)
    print(f"{succeeded} of {runs} runs succeeded")
    return 0 if succeeded == runs else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
