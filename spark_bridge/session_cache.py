"""A cache for faster starts of Spark: a Spark home whose PySpark is compiled, and an archive of the
JVM's classes.

Spark puts `python/lib/pyspark.zip` of its home in front of the path of each Python process that it
starts, and a zip keeps no compiled code. Each of the four kinds of process of a first query would
compile PySpark, for half a second of CPU. A home without that zip, made of links to the real one,
has them import the installed package.

`prepare` also makes an archive of the classes that a query loads (Java's AppCDS:
https://docs.oracle.com/en/java/javase/17/docs/specs/man/java.html, under -XX:ArchiveClassesAtExit).
The JVM checks it against its version and each jar's date, and starts without it when it does not
match.

Owner: `prepare` writes the cache directory, under its lock; sessions read it.
Crash:
- Unfinished files have another name, and the next `prepare` removes them.
- The lock ends with the last process that makes an archive, so a `prepare` waits for the processes
  of a killed one too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys

from spark_bridge.environment import check_here, find_java, import_paths

ARCHIVE = "classes.jsa"
LOCK = "lock"
PREPARE_TIMEOUT_S = 900
ROOM_BYTES = 200 << 20
"""An archive has 160 MB."""


def _real_home() -> str:
    from pyspark.find_spark_home import _find_spark_home

    return str(os.path.realpath(_find_spark_home()))


def _is_needed(home: str) -> bool:
    """True if there is a zip to leave out, and Python processes find its packages elsewhere."""
    for name in ("pyspark", "py4j"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
            return False
    return os.path.exists(f"{home}/python/lib/pyspark.zip")


def make_home(directory: str) -> str | None:
    """Make a Spark home of links in `directory`; None if the real one needs no change.

    Raises: OSError.
    """
    home = _real_home()
    if not _is_needed(home):
        return None
    os.makedirs(directory, exist_ok=True)
    for name in os.listdir(home):
        if name != "python":
            with contextlib.suppress(FileExistsError):  # an earlier one, or another process's
                os.symlink(f"{home}/{name}", f"{directory}/{name}")
    return directory


def cache_directory() -> str:
    """The cache directory for this PySpark and this Java, which `prepare` fills."""
    import pyspark

    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    java = os.path.realpath(os.environ.get("JAVA_HOME") or shutil.which("java") or "")
    mark = hashlib.sha256(f"{_real_home()} {java}".encode()).hexdigest()[:12]
    return f"{base}/tailrace/spark-{pyspark.__version__}-{mark}"


def prepared() -> tuple[str, list[str]] | None:
    """(home, options for Java) where `prepare` has run; None: it has not."""
    directory = cache_directory()
    if not os.path.isfile(f"{directory}/{ARCHIVE}"):
        return None
    home = f"{directory}/home" if os.path.isdir(f"{directory}/home/jars") else _real_home()
    if _is_needed(home):
        return None  # its home was removed
    return home, [
        f"-XX:SharedArchiveFile={directory}/{ARCHIVE}",
        "-Xlog:disable",
        "-Xlog:all=error:stderr",
    ]


def prepare() -> str:
    """Make the start of later sessions of this user shorter, once for each PySpark and Java; 160
    MB, half a minute. Returns where it lies.

    Where another `prepare` is at it, its result is waited for, and taken. Raises RuntimeError with
    what to do, or with what Spark said; NotSupportedError.
    """
    check_here()
    find_java()
    directory = cache_directory()
    before = _archive_mark(directory)
    try:
        os.makedirs(directory, exist_ok=True)
        lock = os.open(f"{directory}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_writable(directory, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _archive_mark(directory) in {before, None}:
            _remove_unfinished(directory)
            _make_archive(directory, lock)
    except OSError as error:
        raise _not_writable(directory, error) from error
    finally:
        os.close(lock)
    return directory


def _not_writable(directory: str, error: OSError) -> RuntimeError:
    return RuntimeError(
        f"Spark's classes cannot be stored in {directory} ({error.strerror or error}): set "
        "XDG_CACHE_HOME to a writable directory"
    )


def _archive_mark(directory: str) -> tuple[int, int] | None:
    """Tells one archive from another; None: there is none."""
    try:
        found = os.stat(f"{directory}/{ARCHIVE}")
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _remove_unfinished(directory: str) -> None:
    """Remove the unfinished files of a killed `prepare`. The lock keeps others away."""
    for name in os.listdir(directory):
        if name.startswith(f"{ARCHIVE}."):
            os.unlink(f"{directory}/{name}")


def _command(directory: str) -> list[str]:
    return [sys.executable, "-P", "-m", "spark_bridge.class_data_sharing", directory]


def _make_archive(directory: str, lock: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < ROOM_BYTES:
        raise RuntimeError(
            f"{directory} has {free >> 20} MB free, and Spark's classes take up to "
            f"{ROOM_BYTES >> 20} MB: make room, or set XDG_CACHE_HOME to a directory elsewhere"
        )
    before = _archive_mark(directory)
    paths = [*import_paths(), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    environment = {**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
    try:
        # The child has the lock, too: it may outlive this process.
        done = subprocess.run(
            _command(directory),
            capture_output=True,
            text=True,
            timeout=PREPARE_TIMEOUT_S,
            check=False,
            pass_fds=(lock,),
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"Spark's classes were not archived in {directory} within {PREPARE_TIMEOUT_S} s: "
            "try again when the machine is less busy"
        ) from None
    if done.returncode or _archive_mark(directory) in {before, None}:
        raise RuntimeError(
            "Spark's classes could not be archived in "
            f"{directory}:\n{(done.stderr or done.stdout)[-2_000:]}"
        )
