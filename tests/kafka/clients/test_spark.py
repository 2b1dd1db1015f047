"""Spark's own Kafka connector: batches and streams in both directions, through a kill."""

from __future__ import annotations

import glob
import pathlib
import sys

import pytest

from bench.peers.kafka import SPARK_CONNECTOR, fetch_jars
from bench.peers.servers import Missing
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kafka.clients.programs import SOURCES, Program
from tests.kit.processes import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.spark,
    pytest.mark.slow_because("each stage starts a Spark session"),
]
ROWS = 2000


def test_spark_writes_copies_and_reads(
    appliance: EmbeddedAppliance, gateway: str, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    try:
        jars = ",".join(sorted(glob.glob(f"{fetch_jars(*SPARK_CONNECTOR)}/*.jar")))
    except Missing as error:
        pytest.skip(str(error))

    def run(stage: str) -> Program:
        return Program(
            [sys.executable, str(SOURCES / "python" / "spark_copy.py"), gateway, jars,
             str(tmp_path / "checkpoint"), stage],
            tmp_path, {"PYTHONPATH": str(pathlib.Path(__file__).parents[3])},
        )  # fmt: skip

    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("spark-from", 3), NewTopic("spark-to", 3)])

        def copied() -> int:
            found = admin.describe_topics("spark-to")["spark-to"]["partitions"]
            return sum(each["end_offset"] for each in found)

        with run("write") as program:
            program.result()
        with run("stream") as program:
            wait_until(lambda: copied() >= ROWS // 4, "the stream copies")
            program.kill()
        for stage in ("drain", "read"):
            with run(stage) as program:
                said = program.result()
        assert "COPIED" in said
