"""Class data of `spark_bridge.prepare`: made once however many ask, whole or not at all, refused
with what to do; sessions use it, or say that it is there.

Spark itself is not started: programs that behave as ill as one has to expect take the place of the
one that makes the archive.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import pytest

import spark_bridge
from spark_bridge import environment, session, session_cache

pytestmark = pytest.mark.spark
ROOT = pathlib.Path(spark_bridge.__file__).parent.parent
MAKE = "import sys; open(sys.argv[1] + '/classes.jsa', 'w').write('archive')"
PROGRAM_TIMEOUT_S = 60


@pytest.fixture
def directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Directory in which `prepare` puts what it makes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environment, "check_pyspark", lambda: None)
    return pathlib.Path(session_cache.cache_directory())


def made_by(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(
        session_cache,
        "_command",
        lambda directory: [sys.executable, "-P", "-c", program, directory],
    )


def test_a_home_without_the_zip_has_everything_else(tmp_path: pathlib.Path) -> None:
    home = session_cache.make_home(str(tmp_path / "home"))
    assert home is not None
    names = set(os.listdir(home))
    assert {"jars", "bin"} <= names
    assert "python" not in names
    assert session_cache.make_home(str(tmp_path / "home")) == home  # once more does no harm


def test_an_archive_of_classes_is_used_where_it_was_made_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = pathlib.Path(session_cache.cache_directory())
    assert session_cache.prepared() is None
    (directory / "home" / "jars").mkdir(parents=True)
    (directory / "classes.jsa.123").touch()  # a `prepare` that was killed
    assert session_cache.prepared() is None
    (directory / "classes.jsa").touch()
    found = session_cache.prepared()
    assert found is not None
    assert found[0] == f"{directory}/home"
    assert f"-XX:SharedArchiveFile={directory}/classes.jsa" in found[1]
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # another Java has another
    assert session_cache.prepared() is None


def test_what_is_made_is_found_and_made_anew_when_asked_again(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by(monkeypatch, MAKE.replace("'archive'", "str(__import__('os').getpid())"))
    assert session_cache.prepare() == str(directory)
    first = (directory / "classes.jsa").read_text()
    os.utime(directory / "classes.jsa", (1, 1))
    session_cache.prepare()
    assert (directory / "classes.jsa").read_text() != first


def test_what_spark_said_is_told_when_it_fails(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program, said in (
        ("import sys; sys.exit('no such class')", "no such class"),
        ("print('all is well')", "all is well"),
    ):  # which is not true: no archive
        made_by(monkeypatch, program)
        with pytest.raises(RuntimeError, match=f"could not be archived in {directory}:\n{said}"):
            session_cache.prepare()
    monkeypatch.setattr(session_cache, "PREPARE_TIMEOUT_S", 0.05)
    made_by(monkeypatch, "import time; time.sleep(100)")
    with pytest.raises(RuntimeError, match=r"not archived in .* within 0\.05 s: try again"):
        session_cache.prepare()
    assert session_cache.prepared() is None


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        RuntimeError,
        match=r"cannot be stored in .*/file/tailrace/spark-.* \(Not a directory\): set XDG",
    ):
        session_cache.prepare()
    assert session_cache.prepared() is None


class _Usage(NamedTuple):
    free: int


def test_a_full_disk_is_told_before_spark_is_started(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by(monkeypatch, MAKE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(50 << 20))
    with pytest.raises(
        RuntimeError,
        match=r"has 50 MB free, and Spark's classes take up to 200 MB: make room, or set XDG",
    ):
        session_cache.prepare()
    assert not (directory / "classes.jsa").exists()


def test_of_two_at_once_one_makes_it_and_both_have_it(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by(monkeypatch, "import sys; sys.exit('the second made it, too')")
    directory.mkdir(parents=True)
    waits, results = threading.Event(), []
    real = fcntl.flock

    def flock(lock: int, how: int) -> None:
        waits.set()
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with (directory / "lock").open("w") as lock:  # the first
        real(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: results.append(session_cache.prepare()))
        second.start()
        assert waits.wait(PROGRAM_TIMEOUT_S)
        assert not results
        (directory / "classes.jsa").touch()
    second.join(PROGRAM_TIMEOUT_S)
    assert results == [str(directory)]


KILLED = """
from spark_bridge import session_cache
child = (
    "import os, sys, time; open(sys.argv[1] + '/classes.jsa.1', 'w').write('half');"
    "open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); time.sleep(100)"
)
python = session_cache.sys.executable
session_cache._command = lambda directory: [python, "-P", "-c", child, directory]
session_cache.prepare()
"""


def test_what_one_left_that_was_killed_is_not_used_and_goes_when_the_next_is_made(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.makedirs(directory)
    os.mkfifo(directory / "pid")
    program = subprocess.Popen(
        [sys.executable, "-P", "-c", KILLED], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    child = int((directory / "pid").read_text())
    program.send_signal(signal.SIGKILL)
    program.wait(PROGRAM_TIMEOUT_S)
    with (directory / "lock").open("w") as lock:
        with pytest.raises(BlockingIOError):  # its child is still at it, and is waited for
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(child, signal.SIGKILL)
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert session_cache.prepared() is None
    made_by(monkeypatch, MAKE)
    session_cache.prepare()
    assert sorted(os.listdir(directory)) == ["classes.jsa", "lock", "pid"]


def test_java_starts_without_an_archive_that_is_damaged(directory: pathlib.Path) -> None:
    (directory / "home" / "jars").mkdir(parents=True)
    (directory / "classes.jsa").write_bytes(os.urandom(100_000))
    found = session_cache.prepared()
    assert found is not None
    done = subprocess.run(
        [environment.find_java(), "-XX:-UsePerfData", *found[1], "-version"],
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=True,
    )
    assert done.stdout == ""  # where Spark says its port
    assert 'version "' in done.stderr


class _Terminal:
    def __init__(self, *, there: bool) -> None:
        self.there = there
        self.said: list[str] = []

    def isatty(self) -> bool:
        return self.there

    def write(self, text: str) -> None:
        self.said.append(text)


def test_that_the_start_can_be_shorter_is_said_once_and_only_where_somebody_sees_it(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = session
    monkeypatch.setattr(module, "_advised", False)
    for there, prepared, lines in (
        (False, False, 0),
        (True, True, 0),
        (True, False, 1),
        (True, False, 0),
    ):
        terminal = _Terminal(there=there)
        monkeypatch.setattr(sys, "stderr", terminal)
        if prepared:
            (directory / "home" / "jars").mkdir(parents=True)
            (directory / "classes.jsa").touch()
        module._advise()
        assert "".join(terminal.said).count("\n") == lines
        shutil.rmtree(directory, ignore_errors=True)
