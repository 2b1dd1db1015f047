"""A run of the suite: seeds that come again, groups that stay together, slow tests that are
named.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.kit import seeds
from tests.kit.processes import HANG_LIMIT_S

ROOT = pathlib.Path(__file__).parents[2]
QUICK_TO_CALL_SLOW = "import tests.kit.runs.run_order\n\ntests.kit.runs.run_order.SLOW_S = 0.02\n"
SLOW = """
import threading
import pytest

def wait():
    threading.Event().wait(0.1)

def test_slow():
    wait()

@pytest.mark.slow_because("it waits")
def test_with_a_reason():
    wait()

@pytest.mark.long
def test_long():
    wait()

def test_quick():
    pass
"""
SHARED = """
import os
import pytest

@pytest.fixture(scope="module")
def shared():
    print("made")

@pytest.mark.parametrize("number", range(6))
def test_shares(shared, number):
    with open(os.environ["NOTES"], "a") as notes:
        print("shared", os.getpid(), file=notes)

def test_shares_nothing():
    pass
"""


def run(
    directory: pathlib.Path, text: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A run of one file with the suite's own hooks."""
    (directory / "test_it.py").write_text(text)
    (directory / "quick.py").write_text(QUICK_TO_CALL_SLOW)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "TAILRACE", seeds.VARIABLE))
    }
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-p",
        "quick",
        "-p",
        "tests.conftest",
        "-c",
        str(ROOT / "pyproject.toml"),
        *arguments,
    ]
    return subprocess.run(
        [*command, "--rootdir", str(directory), str(directory / "test_it.py")],
        cwd=directory, env={**kept, "PYTHONPATH": f"{directory}:{ROOT}", **environment},
        capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False,
    )  # fmt: skip


def test_a_slow_test_without_a_reason_is_named_and_fails_only_a_run_that_judges(
    tmp_path: pathlib.Path,
) -> None:
    told = run(tmp_path, SLOW)
    _, _, named = told.stdout.partition("without slow_because(...)")
    assert "test_slow" in named
    assert "test_with_a_reason" not in named
    assert "test_long" not in named
    assert told.returncode == 0, "a machine may be slow"
    assert run(tmp_path, SLOW, TAILRACE_DURATIONS="1").returncode == 1


def test_tests_that_share_a_fixture_of_their_module_run_in_one_process(
    tmp_path: pathlib.Path,
) -> None:
    notes = tmp_path / "notes"
    done = run(
        tmp_path,
        SHARED,
        "-n",
        "2",
        "--dist",
        "loadgroup",
        "--no-loadscope-reorder",
        NOTES=str(notes),
    )
    assert done.returncode == 0, done.stdout
    lines = notes.read_text().splitlines()
    assert len(lines) == 6
    assert len(set(lines)) == 1


def test_what_is_known_to_take_long_begins_first(tmp_path: pathlib.Path) -> None:
    listed = run(tmp_path, SLOW, "--collect-only", "-q").stdout.split()
    assert next(line.partition("::")[2] for line in listed if "::" in line) == "test_with_a_reason"


def test_a_run_says_its_seed_and_takes_one_that_is_given(tmp_path: pathlib.Path) -> None:
    assert (
        "SEED=77 runs the same new seeds again"
        in run(tmp_path, SLOW, "--collect-only", SEED="77").stdout
    )
    new = {
        run(tmp_path, SLOW, "--collect-only").stdout.partition("SEED=")[2].split()[0]
        for _ in range(2)
    }
    assert len(new) == 2


def test_new_seeds_follow_from_the_base_and_a_seed_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(seeds.VARIABLE, "40")
    assert seeds.new_blocks(2, 3) == [range(40, 43), range(43, 46)]
    assert [seeds.block_name(block) for block in (range(40, 43), range(7, 8))] == [
        "seeds 40-42",
        "seed 7",
    ]
    monkeypatch.setenv(seeds.VARIABLE, "forty")
    with pytest.raises(ValueError, match="SEED is 'forty': set it to a number"):
        seeds.base()


def test_the_seed_that_fails_is_named() -> None:
    def fails(seed: int) -> None:
        assert seed != 5

    with pytest.raises(AssertionError) as caught:
        seeds.run_each(fails, range(3, 9))
    assert caught.value.__notes__ == ["seed 5"]
