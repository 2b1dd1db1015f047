"""The ingestion example on the flights: killed with -9 and started again, it has put out what one
batch query makes of the topic, each row once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import tailrace
from spark_bridge import session
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.filterwarnings("ignore")]
ROOT = pathlib.Path(__file__).parents[2]
OFFSETS_MAX = 60_000
"""Offsets of a micro-batch: six of them, of which the third is the first to put out weeks."""
EXAMPLE = ROOT / "examples/spark/flights_by_week.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("flights_by_week", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job(
    appliance: EmbeddedAppliance, directory: pathlib.Path, scratch: str
) -> subprocess.Popen[bytes]:
    """The example as a program of its own; its temporary files are in `scratch`, where a killed one
    leaves them.
    """
    arguments = [
        "run",
        "--bootstrap",
        appliance.address,
        "--checkpoint",
        str(directory / "checkpoint"),
        "--max-offsets",
        str(OFFSETS_MAX),
        "--drain",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": scratch}
    with open(directory / "job.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", str(EXAMPLE), *arguments],
            env=environment,
            stdout=log,
            stderr=log,
        )


@pytest.fixture
def scratch() -> Iterator[str]:
    """A directory of a short name: there are Unix sockets in it."""
    with tempfile.TemporaryDirectory(prefix="trfl-", ignore_cleanup_errors=True) as directory:
        yield directory


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """With -9, the driver, its JVM and its Python workers, which have not the time to say
    anything.
    """
    found = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait(HANG_LIMIT_S)
    psutil.wait_procs(found, 60)


@pytest.mark.timeout(600)
def test_the_flights_job_killed_and_restarted_puts_out_what_a_batch_query_does(
    spark: Any,
    appliance: EmbeddedAppliance,
    tmp_path: pathlib.Path,
    scratch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = example()
    assert module.feed(appliance.address) == 336_776
    process = job(appliance, tmp_path, scratch)
    try:
        # Weeks are open, which is state, and others have been put out.
        begun = tmp_path / "checkpoint/offsets/3"
        wait_until(
            lambda: begun.exists() or process.poll() is not None,
            "the job has begun its fourth batch",
            240,
        )
        assert process.poll() is None, (tmp_path / "job.log").read_text()
        kill_all(process)
        done = {int(path.name) for path in (tmp_path / "checkpoint/commits").glob("[0-9]*")}
        assert 0 in done
        before = tailrace.scan(module.BY_WEEK, appliance.address).read_all().num_rows
        monkeypatch.setattr(
            session, "local_session", lambda **_named: contextlib.nullcontext(spark)
        )  # the restarted one's Spark is there already
        module.run(appliance.address, str(tmp_path / "checkpoint"), OFFSETS_MAX, True)
    finally:
        if process.poll() is None:
            kill_all(process)

    batch = (
        spark.read.format("tailrace")
        .option("bootstrap", appliance.address)
        .option("subscribe", module.FLIGHTS)
        .load()
    )
    expected = module.by_week(batch.where("carrier is not null")).toArrow()
    found = tailrace.scan(module.BY_WEEK, appliance.address, columns=module.COLUMNS).read_all()
    assert 0 < before < found.num_rows
    order = [("week", "ascending"), ("carrier", "ascending")]
    assert found.sort_by(order).to_pylist() == expected.sort_by(order).to_pylist()
    assert found.column("flights").to_numpy().sum() == 336_776
