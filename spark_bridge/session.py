"""A Spark session on this machine that leaves nothing behind: its settings, its temporary directory, its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


QUIET_LOGGING = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


def settings(scratch: str) -> dict[str, str]:
    """What a local session needs: no port to the world, no console bar, every temporary file in `scratch`."""
    return {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": scratch,
        "spark.sql.warehouse.dir": f"{scratch}/warehouse",
        "spark.driver.extraJavaOptions": " ".join(
            (
                "-XX:-UsePerfData",
                f"-Djava.io.tmpdir={scratch}",
                f"-Dderby.system.home={scratch}",
                f"-Dlog4j2.configurationFile={scratch}/log4j2.properties",
            )
        ),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": scratch,
    }


@contextlib.contextmanager
def local_session(master: str = "local[2]", name: str = "tailrace") -> Iterator[SparkSession]:
    """A session for the block. Raises RuntimeError with what to do when there is no Java 17."""
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        raise RuntimeError("Spark needs a Java 17 runtime: install openjdk-17-jre-headless, or set JAVA_HOME")
    # Short: Unix socket paths have 107 bytes.
    scratch = tempfile.mkdtemp(prefix="trspark-")
    saved = {
        key: os.environ.get(key) for key in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "TMPDIR", "SPARK_LOCAL_IP", "SPARK_LAUNCHER_OPTS")
    }
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # The launcher is a JVM of its own, started before any of the settings holds.
    os.environ["SPARK_LAUNCHER_OPTS"] = f"-XX:-UsePerfData -Djava.io.tmpdir={scratch}"
    os.environ["TMPDIR"] = scratch
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    with open(f"{scratch}/log4j2.properties", "w", encoding="ascii") as file:
        file.write(QUIET_LOGGING)
    try:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(master).appName(name)
        for key, value in settings(scratch).items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        try:
            yield session
        finally:
            _end(session)
    finally:
        for key, before in saved.items():
            if before is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = before
        _remove(scratch)


def _remove(directory: str) -> None:
    """Remove the scratch directory; Spark's Python workers may be writing their last in it."""
    for _ in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            return
        time.sleep(0.05)


def _end(session: SparkSession) -> None:
    """Stop Spark and its JVM: it would otherwise live as long as this process."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    session.stop()
    if gateway is not None:
        process = getattr(gateway, "proc", None)
        gateway.shutdown()
        SparkContext._gateway = None
        SparkContext._jvm = None
        if process is not None:
            process.stdin.close()
            try:
                process.wait(20)
            except Exception:
                process.kill()
                process.wait()
