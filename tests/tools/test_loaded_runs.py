"""`make test-loaded`: counts the runs that succeed, and leaves no process that burns a core."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

TOOL = pathlib.Path(__file__).parents[2] / "tools/loaded_runs.py"
FAILS_ONCE = (
    "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.exists() or sys.exit(p.touch() or 3)"
)


def test_a_run_that_fails_is_counted_and_shown(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", FAILS_ONCE, str(tmp_path / "second")]
    done = subprocess.run(
        [sys.executable, "-P", TOOL, "3", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert [line.partition(" in ")[0] for line in done.stdout.splitlines()] == [
        "run 1: exit 3", "run 2: exit 0", "run 3: exit 0", "2 of 3 runs succeeded",
    ]  # fmt: skip


def test_each_run_is_beside_a_process_for_each_core_and_none_is_left() -> None:
    """The command counts its siblings; a pipe that a burner had kept open would never end."""
    count = "import os, psutil; print(len(psutil.Process(os.getppid()).children()) - 1)"
    done = subprocess.run(
        [sys.executable, "-P", TOOL, "1", sys.executable, "-c", count],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout.splitlines()[0]) == os.cpu_count()
