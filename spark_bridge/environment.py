"""Checks of a machine before Spark starts: Java, pandas, a tested PySpark. Each error says what to
install or set.

Invariants: a PySpark that was not tested is a warning, once in a process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from tailrace.core.errors import NotSupportedError

JAVA_LEAST = 17
JAVA_TIMEOUT_S = 60
PYSPARK_TESTED = "4.3"
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
JAVA_ADVICE = (
    "install openjdk-17-jre-headless (or your system's package of it), or set JAVA_HOME to an "
    "installed one"
)
_warned: set[str] = set()


def check_here() -> None:
    """Check the packages that each Python process of Spark needs.

    Raises: NotSupportedError without PySpark or pandas.
    Warns: of a PySpark that was not tested.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise NotSupportedError(f"{sys.executable} has no PySpark: pip install 'tailrace[spark]'")
    if importlib.util.find_spec("pandas") is None:
        raise NotSupportedError(
            f"Spark's Arrow exchange needs pandas, and {sys.executable} does not have it: pip "
            "install 'tailrace[spark]', or set PYSPARK_PYTHON to a Python that has it"
        )
    check_pyspark()


def check_pyspark() -> None:
    """Warn once of a version of PySpark that was not tested."""
    import pyspark

    version = pyspark.__version__
    if version.rsplit(".", 1)[0] != PYSPARK_TESTED and version not in _warned:
        _warned.add(version)
        warnings.warn(
            f"Tailrace's Spark bridge was tested with PySpark {PYSPARK_TESTED}, and this is "
            f"{version}: if something fails, pip install 'pyspark=={PYSPARK_TESTED}.*'",
            RuntimeWarning,
            stacklevel=2,
        )


def find_java() -> str:
    """The java that Spark's launcher will take, at least of version JAVA_LEAST. Raises RuntimeError
    with what to do.
    """
    home = os.environ.get("JAVA_HOME")
    path = f"{home}/bin/java" if home else shutil.which("java")
    if path is None or not os.access(path, os.X_OK):
        where = (
            f"JAVA_HOME is {home}, which has no bin/java"
            if home
            else "there is no java on the PATH"
        )
        raise RuntimeError(f"Spark needs a Java {JAVA_LEAST} runtime, and {where}: {JAVA_ADVICE}")
    try:
        completed = subprocess.run(
            [path, "-XX:-UsePerfData", "-version"],
            capture_output=True,
            text=True,
            timeout=JAVA_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(
            f"Spark needs a Java {JAVA_LEAST} runtime, and {path} cannot be run ({error}): "
            f"{JAVA_ADVICE}"
        ) from error
    found = _JAVA_VERSION.search(completed.stderr + completed.stdout)
    if found is None:
        raise RuntimeError(
            f"Spark needs a Java {JAVA_LEAST} runtime, and {path} does not print its version: "
            f"{JAVA_ADVICE}"
        )
    if int(found[1]) < JAVA_LEAST:
        raise RuntimeError(
            f"Spark needs Java {JAVA_LEAST} or newer, and {path} is Java {found[1]}: {JAVA_ADVICE}"
        )
    return path


def import_paths() -> list[str]:
    """Directories or zips that another process of this Python needs on its path, so that it finds
    the packages that Spark's tasks import.
    """
    own = {os.path.realpath(path) for path in (*site.getsitepackages(), site.getusersitepackages())}
    found = []
    for name in ("spark_bridge", "tailrace", "pyspark"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        path = os.path.dirname(os.path.dirname(spec.origin))
        if os.path.realpath(path) not in own and path not in found:
            found.append(path)
    return found


@contextlib.contextmanager
def this_python(spark: Any) -> Iterator[None]:
    """Run what a local session is given inside the block in this Python, with this process's
    packages.

    Spark notes the Python of a function or a source when it is given one. The session gets its own
    Python back at the end of the block.
    """
    from pyspark.errors import PySparkException

    try:
        context = spark.sparkContext
    except PySparkException:  # Spark Connect: the server's Python processes are the server's
        context = None
    if (
        context is None
        or not hasattr(context, "pythonExec")
        or not str(context.master).startswith("local")
    ):  # elsewhere, executors have one of their own
        yield
        return
    before = context.pythonExec, context.environment
    context.pythonExec = sys.executable
    if paths := [*import_paths(), *filter(None, [before[1].get("PYTHONPATH", "")])]:
        context.environment = {**before[1], "PYTHONPATH": os.pathsep.join(paths)}
    try:
        yield
    finally:
        context.pythonExec, context.environment = before
