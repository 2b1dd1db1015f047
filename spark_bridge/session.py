"""A quiet local Spark session: its settings, its temporary directory, its end.

    spark = spark_bridge.session()         # a new local session, or the existing one, with
                                           # the format "tailrace"
    spark_bridge.session(spark)            # a session that the caller made

The standard error of the JVM and of Spark's Python workers goes into a file in that directory. It
has warnings without a remedy (incubator modules), and a traceback of BrokenPipeError for each
worker that the JVM disconnects. Its last lines become a note of the error that ends the block.

Spark takes `python3` from the PATH for its Python processes. In an environment that is not
activated this is another Python, without PySpark and `tailrace`. These sessions start their Python
processes with this Python and this process's packages.

Owner: the process that starts the session. The session ends with `stop()`, the block or the
process, and its directory with it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spark_bridge import session_cache
from spark_bridge.environment import check_here, find_java, import_paths, this_python

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
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""
LATE_OPTIMISATION = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
)
"""Ten times HotSpot's thresholds of its second compiler: what a start and a first query call was
compiled by it, for a third of their processor time, and thrown away with the session. Loops that
run long reach it by their own threshold (Tier4BackEdgeThreshold), which stays.
https://docs.oracle.com/en/java/javase/17/docs/specs/man/java.html; HotSpot's compilationPolicy.hpp
says what each of them is.
"""
ADVICE = (
    "tailrace: run spark_bridge.prepare() once to save a second or more of each start of Spark "
    "and its first query (it takes half a minute, and 160 MB in ~/.cache)"
)
_advised = False
LOG_FILE = "spark.log"
LINES_SHOWN = 20
END_TIMEOUT_S = 20.0
TEMPORARY_PATH_MAX = 40
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")


def settings(scratch: str, java_options: Sequence[str] = ()) -> dict[str, str]:
    """Settings of a local session: no open port, no progress bar, every temporary file in
    `scratch`.
    """
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
                *LATE_OPTIMISATION,
                *_collector(java_options),
                f"-Djava.io.tmpdir={scratch}",
                f"-Dderby.system.home={scratch}",
                f"-Dlog4j2.configurationFile={scratch}/log4j2.properties",
                *java_options,
            )
        ),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": scratch,
    }


def _collector(java_options: Sequence[str]) -> list[str]:
    """The option for the parallel collector, or none where another collector was chosen: a JVM with
    two does not start.

    Rows through Arrow take 0.85 of the JVM's time that they take with G1 (docs/measurements.md).
    """
    given = [
        *java_options,
        *(
            os.environ.get(name, "")
            for name in (
                "JAVA_TOOL_OPTIONS",
                "JDK_JAVA_OPTIONS",
                "_JAVA_OPTIONS",
                "SPARK_SUBMIT_OPTS",
            )
        ),
    ]
    return [] if _COLLECTOR.search(" ".join(given)) else ["-XX:+UseParallelGC"]


def session(
    spark: SparkSession | None = None,
    *,
    master: str = "local[*]",
    name: str = "tailrace",
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session in which `spark.read.format("tailrace")` works: `spark`, the active one, or a new
    local one with `config` beside our settings.

    A new one is the caller's: `stop()` ends it, or the end of the process; it is a context manager,
    too. Raises RuntimeError with what to do when there is no Java 17; NotSupportedError without
    PySpark or pandas.
    """
    check_here()
    from pyspark.sql import SparkSession

    found = spark if spark is not None else SparkSession.getActiveSession() or _running()
    if found is not None:
        return register(found)
    scratch, started = _start_in_scratch(master, name, dict(config or {}))
    _advise()
    atexit.register(_end_at_exit, started, scratch, os.getpid())
    return started


def _running() -> SparkSession | None:
    """The session of this process, also in a thread that Spark has none for: its active session is
    a thread's own.
    """
    from pyspark.sql import SparkSession

    session = SparkSession._instantiatedSession
    is_running = session is not None and session.sparkContext._jsc is not None
    return session if is_running else None


def _advise() -> None:
    """Say once in a process, where somebody sees it, that the start can be made shorter: it takes
    half a minute and 160 MB, so it is not done unasked.
    """
    global _advised
    if (
        _advised
        or not (sys.stderr.isatty() or "ipykernel" in sys.modules)
        or session_cache.prepared() is not None
    ):
        return
    _advised = True
    print(ADVICE, file=sys.stderr)


def register(spark: SparkSession) -> SparkSession:
    """Make the format "tailrace" known to an existing session, and return the session.

    Its Python processes for this source run this Python, with this process's packages. Those of
    other sources and of functions stay as they are.
    """
    from spark_bridge.datasource import TailraceDataSource

    check_here()
    with this_python(spark):
        spark.dataSource.register(TailraceDataSource)
    return spark


@contextlib.contextmanager
def local_session(
    master: str = "local[2]",
    name: str = "tailrace",
    *,
    java_options: Sequence[str] = (),
    home: str | None = None,
    end_timeout_s: float = END_TIMEOUT_S,
) -> Iterator[SparkSession]:
    """A new session for the block; at its end, so long is waited for the JVM. Raises RuntimeError
    with what to do when there is no Java 17.
    """
    scratch, started = _start_in_scratch(master, name, {}, java_options, home)
    try:
        yield started
    except Exception as error:
        _note_log(error, scratch)
        raise
    finally:
        try:
            _end(started, end_timeout_s)
        finally:
            _remove(scratch)


def _start_in_scratch(
    master: str,
    name: str,
    config: dict[str, str],
    java_options: Sequence[str] = (),
    home: str | None = None,
) -> tuple[str, SparkSession]:
    """A session and its directory. Raises RuntimeError."""
    find_java()
    # Short: Unix socket paths have 107 bytes, and Spark's names in it 45.
    scratch = tempfile.mkdtemp(
        prefix="trspark-", dir=None if len(tempfile.gettempdir()) <= TEMPORARY_PATH_MAX else "/tmp"
    )
    try:
        with open(f"{scratch}/log4j2.properties", "w", encoding="ascii") as file:
            file.write(QUIET_LOGGING)
        if home is None and (ready := session_cache.prepared()) is not None:
            home, java_options = ready[0], (*java_options, *ready[1])
        home = home or session_cache.make_home(f"{scratch}/home")
        with _environment(scratch, home):
            given = {
                "spark.master": master,
                "spark.app.name": name,
                **settings(scratch, java_options),
                **config,
            }
            started = _start(given, f"{scratch}/{LOG_FILE}")
        # Spark also looks for pyspark_* modules, but ignores a failure on a busy machine; the
        # format would then be unknown.
        return scratch, register(started)
    except BaseException as error:
        _note_log(error, scratch)
        _remove(scratch)
        raise


@contextlib.contextmanager
def _environment(scratch: str, home: str | None) -> Iterator[None]:
    """Set the environment of the JVM and its Python processes, in this process for the block
    only.
    """
    paths = [*import_paths(), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    requested = {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # The launcher is a JVM of its own, started before any of the settings holds.
        "SPARK_LAUNCHER_OPTS": f"-XX:-UsePerfData -Djava.io.tmpdir={scratch}",
        "TMPDIR": scratch,
        "SPARK_LOCAL_IP": "127.0.0.1",
        **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}),
        **({"SPARK_HOME": home} if home is not None else {}),
    }
    saved = {key: os.environ.get(key) for key in requested}
    os.environ.update(requested)
    try:
        yield
    finally:
        for key, before in saved.items():
            if before is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = before


def _start(given: dict[str, str], log_path: str) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    conf = SparkConf().setAll(list(given.items()))
    with open(log_path, "wb") as log:
        if SparkContext._gateway is None:
            SparkContext._ensure_initialized(gateway=launch_gateway(conf, {"stderr": log}))
    session = SparkSession.builder.config(conf=conf).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _note_log(error: BaseException, scratch: str) -> None:
    if lines := _last_lines(f"{scratch}/{LOG_FILE}"):
        error.add_note("\n".join(["The last lines of what Spark wrote to standard error:", *lines]))


def _last_lines(path: str) -> list[str]:
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().splitlines()[-LINES_SHOWN:]


def _remove(directory: str) -> None:
    """Remove the scratch directory; Spark's Python workers may be writing their last in it."""
    for _ in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory):
            return
        time.sleep(0.05)


def _end_at_exit(started: SparkSession, scratch: str, pid: int) -> None:
    """End the session in the process that started it, not in one that was forked from it."""
    if os.getpid() == pid:
        _end(started)
        _remove(scratch)


def _end(session: SparkSession, timeout_s: float = END_TIMEOUT_S) -> None:
    """Stop Spark and its JVM, which would otherwise live as long as this process. A JVM that has
    ended already leaves nothing to stop.
    """
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        return
    process = getattr(gateway, "proc", None)
    if process is None or process.poll() is None:
        try:
            with _no_word_of_a_lost_jvm():
                session.stop()
        except (Py4JError, OSError):
            if process is not None:
                process.kill()  # its connection is gone, so it cannot be asked to end
    gateway.shutdown()
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None
    if process is not None:
        process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _no_word_of_a_lost_jvm() -> Iterator[None]:
    """Keep py4j and Spark from telling, with tracebacks, that a JVM which is to end has ended. Py4j
    logs by the root logger, too.
    """

    def is_anothers(record: logging.LogRecord) -> bool:
        return f"{os.sep}py4j{os.sep}" not in record.pathname

    logger = logging.getLogger("py4j")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    logging.root.addFilter(is_anothers)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Unable to cleanly shutdown Spark JVM", RuntimeWarning
            )
            yield
    finally:
        logging.root.removeFilter(is_anothers)
        logger.setLevel(level)


class _CallableModule(types.ModuleType):
    """A module that can be called: `spark_bridge.session` is the module, and
    `spark_bridge.session()` returns a session.
    """

    def __call__(self, *arguments: Any, **named: Any) -> SparkSession:
        return session(*arguments, **named)


sys.modules[__name__].__class__ = _CallableModule
