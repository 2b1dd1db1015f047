"""`make bench-spark` where Kafka, or a contender in the middle of a run, cannot be had."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from bench.peers import kafka
from bench.peers.servers import Missing
from bench.with_spark import spark
from bench.with_spark.spark_goals import KAFKA, NOOP, PARQUET, SOURCE
from bench.with_spark.spark_work import Took


def test_without_maven_the_connector_is_missing_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(kafka, "CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "mvn" else f"/usr/bin/{name}")
    with pytest.raises(Missing, match=r"mvn.*apt-get install maven"):
        kafka.fetch_jars(*kafka.SPARK_CONNECTOR)


def test_what_maven_cannot_fetch_is_missing_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(kafka, "CACHE", str(tmp_path / "cache"))
    for name, text in (
        (
            "mvn",
            (
                "echo '[ERROR] Could not find artifact x in central -> [Help 1]'; echo '[ERROR] '; "
                "exit 1"
            ),
        ),
        ("java", "exit 0"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        Missing,
        match=r"^mvn could not fetch spark-kafka-4.2.0: Could not find artifact x in central$",
    ):
        kafka.fetch_jars(*kafka.SPARK_CONNECTOR)
    assert not (tmp_path / "cache").exists()


def test_a_contender_that_ends_in_the_middle_is_left_out_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs: list[str] = []

    def once(who: str, seconds: float) -> Took:
        runs.append(who)
        if runs.count(who) == 3 and who == KAFKA:
            raise Missing("its session has ended")
        return Took(seconds, 0.0)

    measured = spark.Measured()
    calls = {
        (NOOP, who): (lambda who=who, seconds=seconds: once(who, seconds))
        for who, seconds in ((SOURCE, 2.0), (KAFKA, 4.0), (PARQUET, 1.0))
    }
    measured.take(calls)
    assert measured.left_out == [f"{NOOP}, {KAFKA} is left out: its session has ended"]
    assert {who: len(values) for (_, who, _), values in measured.values.items()} == {
        SOURCE: spark.REPETITIONS,
        PARQUET: spark.REPETITIONS,
    }
    assert runs.count(KAFKA) == 3
    assert [(figure["contender"], figure["of_parquet"]) for figure in measured.figures] == [
        (SOURCE, 0.5),
        (PARQUET, 1.0),
    ]
    assert "left out" in capsys.readouterr().out
