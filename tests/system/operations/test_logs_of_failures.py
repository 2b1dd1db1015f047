"""A test that fails shows what its appliances have logged, also when their logs are removed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from tests.kit.processes import HANG_LIMIT_S

FAILING = """
import pathlib
from tailrace import embedded

def test_that_passes():
    with embedded() as ended_before:
        pathlib.Path("passed").write_text(ended_before.address)

def test_that_fails():
    with embedded() as gone:
        pathlib.Path("gone").write_text(gone.address)
    assert not pathlib.Path(gone.data_dir).exists()
    raise AssertionError("as it must")
"""


def test_a_test_that_fails_shows_what_its_appliances_have_logged(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-q",
        str(tmp_path),
    ]
    root = str(pathlib.Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
    )
    said = done.stdout
    assert "1 failed, 1 passed" in said, said + done.stderr
    address = (tmp_path / "gone").read_text()
    assert f"log of the appliance at {address}, ended with status 0" in said
    assert f"ready address={address}" in said
    assert (tmp_path / "passed").read_text() not in said, "what passed is not shown"
