"""The demo ends without a trace when it is interrupted, or nobody reads it; that it ends well is
`make demo`'s own check.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest

from bench.demo import EXIT_READER_GONE
from tailrace.format.directory.data_dir import read_identity
from tests.kit.matrices import short
from tests.kit.processes import HANG_LIMIT_S

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.slow_because("the demo starts Spark, a JVM of its own")
@pytest.mark.parametrize("number", short([signal.SIGINT, signal.SIGTERM]))
def test_an_interrupted_demo_leaves_no_process_no_memory_and_no_file(
    tmp_path: pathlib.Path, number: int
) -> None:
    # Its temporary files go where only it writes.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(
        [sys.executable, "-P", "-m", "bench.demo"], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    assert demo.stdout is not None
    seen = next(line for line in demo.stdout if line.startswith("start the appliance"))
    supervisor = psutil.Process(int(seen.split()[-1]))
    processes = [supervisor, *supervisor.children()]
    (instance,) = [path.parent for path in tmp_path.rglob("instance.json")]
    identity = read_identity(str(instance))
    assert identity is not None
    prefix = identity.prefix[1:]
    os.killpg(demo.pid, number)
    rest = demo.stdout.read()
    demo.stdout.close()
    # To a shell both are 130. CPython ends so by itself where the interrupt came within an `exec`
    # of text, as dataclasses have them: also when it was caught.
    assert demo.wait(HANG_LIMIT_S) in (130, -signal.SIGINT), rest
    assert "everything is cleaned up" in rest
    assert not any(process.is_running() for process in processes)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]
    assert os.listdir(tmp_path) == []


REPORTS_FOR_EVER = """
import itertools, os, sys
from bench import demo
def report(scratch):
    for number in itertools.count():
        demo.console.print(number)
demo._run = report
sys.exit(demo.main())
"""


def test_a_demo_whose_report_nobody_reads_any_more_ends_in_order(tmp_path: pathlib.Path) -> None:
    """`make demo | head`."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(
        [sys.executable, "-P", "-c", REPORTS_FOR_EVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    assert demo.stdout is not None
    assert demo.stdout.readline() == b"0\n"
    demo.stdout.close()
    assert demo.stderr is not None
    assert (demo.stderr.read(), demo.wait(HANG_LIMIT_S)) == (b"", EXIT_READER_GONE)
    demo.stderr.close()
    assert os.listdir(tmp_path) == []
