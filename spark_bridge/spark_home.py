"""Spark's start, made shorter: Python processes that need not compile PySpark, a JVM that has its classes at hand.

Spark puts `python/lib/pyspark.zip` of its home in front of the path of each Python process that it starts, and a zip keeps no compiled code: each of the four
kinds of process that a first query starts compiles PySpark anew, for half a second of processor time. A home without that zip, of links to the real one, has
them take the installed package.

`prepare` also makes an archive of the classes that a query loads (Java's AppCDS: https://docs.oracle.com/en/java/javase/17/docs/specs/man/java.html, under
-XX:ArchiveClassesAtExit). The JVM proves it against its version and each jar's date, and starts without it when it does not fit.

Owner: `prepare` writes the cache directory, sessions read it. Crash: what is half written has another name, and is left for the next `prepare` to replace.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys

ARCHIVE = "classes.jsa"
PREPARE_TIMEOUT_S = 300


def _real_home() -> str:
    from pyspark.find_spark_home import _find_spark_home

    return str(os.path.realpath(_find_spark_home()))


def _is_needed(home: str) -> bool:
    """Whether there is a zip to leave out, and Python processes find the packages in it elsewhere."""
    for name in ("pyspark", "py4j"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
            return False
    return os.path.exists(f"{home}/python/lib/pyspark.zip")


def make_home(directory: str) -> str | None:
    """A home of links in `directory`; None: the real one is as good. Raises OSError."""
    home = _real_home()
    if not _is_needed(home):
        return None
    os.makedirs(directory, exist_ok=True)
    for name in os.listdir(home):
        if name != "python" and not os.path.lexists(f"{directory}/{name}"):
            os.symlink(f"{home}/{name}", f"{directory}/{name}")
    return directory


def cache_directory() -> str:
    """Of this PySpark and this Java: what `prepare` has made is there."""
    import pyspark

    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    java = os.path.realpath(os.environ.get("JAVA_HOME") or shutil.which("java") or "")
    mark = hashlib.sha256(f"{_real_home()} {java}".encode()).hexdigest()[:12]
    return f"{base}/tailrace/spark-{pyspark.__version__}-{mark}"


def prepared() -> tuple[str, list[str]] | None:
    """(home, options for Java) where `prepare` has run; None: it has not."""
    directory = cache_directory()
    if not os.path.isfile(f"{directory}/{ARCHIVE}") or not os.path.isdir(f"{directory}/home/jars"):
        return None
    return f"{directory}/home", [f"-XX:SharedArchiveFile={directory}/{ARCHIVE}", "-Xlog:disable", "-Xlog:all=error:stderr"]


def prepare() -> str:
    """Make the start of later sessions of this user shorter, once for each PySpark and Java; 160 MB, half a minute. Returns where it lies. Raises RuntimeError
    with what Spark said.
    """
    directory = cache_directory()
    os.makedirs(directory, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "spark_bridge.archive_classes", directory],
        capture_output=True,
        text=True,
        timeout=PREPARE_TIMEOUT_S,
        check=False,
    )
    if done.returncode or not os.path.exists(f"{directory}/{ARCHIVE}"):
        raise RuntimeError(f"Spark's classes could not be archived in {directory}:\n{(done.stderr or done.stdout)[-2_000:]}")
    return directory
