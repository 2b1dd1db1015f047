"""Sessions: what a machine lacks is said; sessions that others made, `spark-submit` with a zip, and
a Python whose environment is not activated work.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import stat
import subprocess
import sys
import warnings
import zipfile
from typing import Any

import pytest

import spark_bridge
from spark_bridge import environment
from spark_bridge.environment import check_here, find_java
from tailrace import Producer
from tailrace.core.errors import NotSupportedError
from tailrace.embedded_appliance import EmbeddedAppliance

pytestmark = pytest.mark.spark
ROOT = pathlib.Path(spark_bridge.__file__).parent.parent
PROGRAM_TIMEOUT_S = 220
JAVA_OPTIONS = f"{os.environ['JAVA_TOOL_OPTIONS']} -XX:-UsePerfData -Xmx700m"


def java_options_of(*given: str) -> list[str]:
    made: dict[str, str] = spark_bridge.session.settings("/tmp/x", given)
    return made["spark.driver.extraJavaOptions"].split()


def test_a_collector_that_was_chosen_elsewhere_is_not_met_by_a_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A JVM that is told of two does not start."""
    for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS"):
        monkeypatch.delenv(name, raising=False)
    assert "-XX:+UseParallelGC" in java_options_of("-Xmx1g")
    assert "-XX:+UseParallelGC" not in java_options_of("-XX:+UseZGC")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xmx700m -XX:+UseG1GC")
    assert "-XX:+UseParallelGC" not in java_options_of()


# ---- what a machine lacks ------------------------------------------------------------------------


def test_no_java_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        RuntimeError,
        match=r"needs a Java 17 runtime, and there is no java on the PATH: install openjdk-17",
    ):
        find_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"JAVA_HOME is {tmp_path}, which has no bin/java"):
        find_java()


def java(directory: pathlib.Path, said: str) -> None:
    path = directory / "bin" / "java"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_java_that_is_too_old_is_named_with_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    for said, version in (
        ('openjdk version "11.0.2" 2019-01-15', "11"),
        ('java version "1.8.0_401"', "8"),
    ):
        java(tmp_path, said)
        with pytest.raises(
            RuntimeError,
            match=rf"needs Java 17 or newer, and {tmp_path}/bin/java is Java {version}: install",
        ):
            find_java()
    java(tmp_path, 'openjdk version "21" 2023-09-19')
    assert find_java() == f"{tmp_path}/bin/java"
    java(tmp_path, "what?")
    with pytest.raises(RuntimeError, match="does not print its version"):
        find_java()


def test_no_pandas_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pandas" else real(name)
    )
    with pytest.raises(
        NotSupportedError,
        match=r"needs pandas, and .* does not have it: pip install 'tailrace\[spark\]'",
    ):
        check_here()


def test_another_pyspark_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.__version__", "4.1.0")
    monkeypatch.setattr(environment, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"was tested with PySpark 4\.3, and this is 4\.1\.0"):
        check_here()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_here()


def test_no_pyspark_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pyspark" else real(name)
    )
    for call in (spark_bridge.session, spark_bridge.prepare):
        with pytest.raises(
            NotSupportedError, match=r"has no PySpark: pip install 'tailrace\[spark\]'"
        ):
            call()


def test_a_java_that_cannot_be_run_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    java(tmp_path, "")
    (tmp_path / "bin" / "java").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(
        RuntimeError, match=rf"{tmp_path}/bin/java cannot be run \(.*\): install openjdk-17"
    ):
        find_java()
    (tmp_path / "bin" / "java").write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(environment, "JAVA_TIMEOUT_S", 0.05)
    with pytest.raises(RuntimeError, match=r"cannot be run \(.*timed out"):
        find_java()


# ---- programs ------------------------------------------------------------------------------------

USERS_SESSION = """
import importlib.util
import os
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.driver.bindAddress", "127.0.0.1")
builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.local.dir", os.environ["SCRATCH"])
spark = builder.config("spark.sql.warehouse.dir", os.environ["SCRATCH"] + "/warehouse").getOrCreate()
before = spark.sparkContext.pythonExec, dict(spark.sparkContext.environment)
import spark_bridge
assert spark_bridge.session() is spark
assert (spark.sparkContext.pythonExec, spark.sparkContext.environment) == before
frame = spark.read.format("tailrace").option("bootstrap", os.environ["ADDRESS"]).option("subscribe", "orders").load()
print("ROWS", frame.count())
print("SCANNED", spark_bridge.scan(spark, "orders", os.environ["ADDRESS"]).count())
assert (spark.sparkContext.pythonExec, spark.sparkContext.environment) == before
spark.stop()
"""  # noqa: E501
OWN_SESSION = """
import concurrent.futures
import importlib.util
import os
import spark_bridge
names = ("PYSPARK_PYTHON", "PYTHONPATH", "SPARK_HOME", "TMPDIR")
before = [os.environ.get(name) for name in names]
with spark_bridge.session(master="local[2]", config={"spark.driver.memory": "700m"}) as spark:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # Spark's active session is a thread's own
        assert pool.submit(spark_bridge.session).result() is spark
    assert [os.environ.get(name) for name in names] == before
    frame = spark.read.format("tailrace").option("bootstrap", os.environ["ADDRESS"]).option("subscribe", "orders").load()
    print("ROWS", frame.count())
    print("SCANNED", spark_bridge.scan(spark, "orders", os.environ["ADDRESS"]).count())
"""  # noqa: E501
LOSES_ITS_JVM = """
import importlib.util
import os
import signal
import spark_bridge
spark = spark_bridge.session(master="local[1]")
from pyspark import SparkContext
os.kill(SparkContext._gateway.proc.pid, signal.SIGKILL)
"""
SUBMITTED = """
import importlib.util
import os
import sys
from pyspark.sql import SparkSession
import spark_bridge

spark = spark_bridge.session(SparkSession.builder.getOrCreate())
frame = spark.read.format("tailrace").option("bootstrap", os.environ["ADDRESS"]).option("subscribe", "orders").load()
print("ROWS", frame.count())

def where(batches):
    import pyarrow as pa
    import spark_bridge.datasource
    import tailrace.scanning
    for _ in batches:
        servers = [name for name in ("shm", "workers", "netfront", "appliance") if name in sys.modules]
        yield pa.RecordBatch.from_pydict({"tailrace": [tailrace.scanning.__file__], "bridge": [spark_bridge.__file__], "servers": [",".join(servers)]})

(row,) = spark.range(1, numPartitions=1).mapInArrow(where, "tailrace string, bridge string, servers string").collect()
print("FROM", row.tailrace, row.bridge, "servers:", row.servers or "none")
spark.stop()
"""  # noqa: E501


@pytest.fixture(scope="module")
def filled(appliance: EmbeddedAppliance) -> EmbeddedAppliance:
    from tailrace import Admin, NewTopic

    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic("orders")])
        for number in range(10):
            producer.send("orders", b"%d" % number)
        producer.flush(60)
    return appliance


def run(
    command: list[str], tmp_path: pathlib.Path, filled: EmbeddedAppliance, **environment: str
) -> str:
    """The output of a program in an environment in which nothing is activated."""
    given = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path),
        "SCRATCH": str(tmp_path), "ADDRESS": filled.address,
        "SPARK_LOCAL_IP": "127.0.0.1", "JAVA_TOOL_OPTIONS": f"{JAVA_OPTIONS} "
                                                            f"-Djava.io.tmpdir={tmp_path}",
                                                            **environment,
    }  # fmt: skip
    if "JAVA_HOME" in os.environ:
        given["JAVA_HOME"] = os.environ["JAVA_HOME"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=given,
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5_000:]
    assert "Traceback" not in done.stderr, done.stderr[-5_000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [OWN_SESSION, USERS_SESSION],
    ids=["our session", "a session of the user's"],
)
def test_without_an_activated_environment_topics_are_read(
    tmp_path: pathlib.Path, filled: EmbeddedAppliance, program: str
) -> None:
    path = tmp_path / "notebook.py"
    path.write_text(program)
    # Only this process is told where the packages are, as a notebook's kernel is; Spark's are not.
    start = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        f"exec(compile(open({str(path)!r}).read(), 'notebook', 'exec'))"
    )
    said = run([sys.executable, "-P", "-c", start], tmp_path, filled)
    assert "ROWS 10" in said
    assert "SCANNED 10" in said
    left = [name for name in os.listdir(tmp_path) if name.startswith("trspark-")]
    assert left == []


def zip_of_the_two_packages(directory: pathlib.Path) -> pathlib.Path:
    archive = directory / "tailrace.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for package in ("tailrace", "spark_bridge"):
            for path in sorted((ROOT / package).rglob("*.py")):
                file.write(path, path.relative_to(ROOT))
    return archive


ONLY_WHAT_IS_NAMED = """
import importlib
import sys

class Others:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if path is None and top not in sys.stdlib_module_names and top not in ALLOWED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

archive, *named = sys.argv[1:]
ALLOWED = {"tailrace", "spark_bridge", "pyspark", "py4j", *(name.replace("pyzmq", "zmq") for name in named)}
for name in ("pandas", "pyarrow"):  # with what they take themselves
    importlib.import_module(name)
sys.meta_path.insert(0, Others())
sys.path.insert(0, archive)
import tailrace
assert tailrace.__file__.startswith(archive)
for name in ("datasource", "source.planner", "source.reader", "sink.entry", "sink.commit", "sink.task_writer", "sink.former_log", "sink.forget", "stream.reader", "stream.tasks", "source.arrow_scan"):
    importlib.import_module(f"spark_bridge.{name}")
from tailrace import Admin, Consumer, Producer
"""  # noqa: E501


def test_the_packages_that_the_page_names_are_enough_for_the_zip(tmp_path: pathlib.Path) -> None:
    page = " ".join((ROOT / "docs/spark.md").read_text().split())
    (named,) = re.findall(
        r"The Python of the driver and of the executors needs ([^(]*) \(`pip install` them\)", page
    )
    command = [
        sys.executable,
        "-P",
        "-c",
        ONLY_WHAT_IS_NAMED,
        str(zip_of_the_two_packages(tmp_path)),
        *re.split(r", | and ", named),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]


@pytest.mark.long
def test_a_jvm_that_was_killed_is_the_end_of_a_session_without_a_traceback(
    tmp_path: pathlib.Path, filled: EmbeddedAppliance
) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{LOSES_ITS_JVM}"
    assert run([sys.executable, "-P", "-c", program], tmp_path, filled) == ""
    assert [name for name in os.listdir(tmp_path) if name.startswith("trspark-")] == []


def test_a_thread_that_spark_has_no_active_session_for_gets_the_one_that_runs(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for a machine without one, registered a second time, and ended twice, with a
    traceback after the end.
    """
    monkeypatch.setattr(type(spark), "getActiveSession", classmethod(lambda _cls: None))
    assert spark_bridge.session() is spark


@pytest.mark.long
def test_spark_submit_with_a_zip_of_the_two_packages(
    tmp_path: pathlib.Path, filled: EmbeddedAppliance
) -> None:
    import pyspark

    archive = zip_of_the_two_packages(tmp_path)
    job = tmp_path / "job.py"
    job.write_text(SUBMITTED)
    submit = str(pathlib.Path(pyspark.__file__).parent / "bin" / "spark-submit")
    said = run(
        [submit, "--master", "local[2]", "--conf", "spark.ui.enabled=false", "--conf",
        f"spark.local.dir={tmp_path}", "--conf",
         f"spark.sql.warehouse.dir={tmp_path}/warehouse", "--py-files", str(archive), str(job)],
        tmp_path, filled, PYSPARK_PYTHON=sys.executable, PYSPARK_DRIVER_PYTHON=sys.executable,
    )  # fmt: skip
    assert "ROWS 10" in said
    (line,) = (line for line in said.splitlines() if line.startswith("FROM"))
    assert line.count("tailrace.zip/") == 2
    assert line.endswith("servers: none")
