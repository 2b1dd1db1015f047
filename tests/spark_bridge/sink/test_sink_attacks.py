"""The sink under attack, without Spark: drivers in each other's way, checkpoints that are copies,
strangers in its topics, and what is then said.
"""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import pyarrow as pa
import pytest

import tailrace
from spark_bridge.sink import writer as sink
from spark_bridge.sink.commit import Committer
from spark_bridge.sink.decision_log import Manifest, Stage, Target, TopicLog
from spark_bridge.sink.options import parse_sink_options
from spark_bridge.sink.rows import default_rows
from spark_bridge.sink.staging import Stager, log_topic
from spark_bridge.sink.writer import BatchSink, commit_staged
from tailrace import Admin, Producer
from tailrace.client.topic_metadata import INTERNAL_PREFIX
from tailrace.core.errors import (
    InvalidRecordError,
    InvalidRequestError,
    NotReachableError,
    RecordTooLargeError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S
from tests.kit.sink import check_once, make, options_of, stage, values_in


def test_a_driver_whose_batch_another_finishes_while_it_looks_at_the_log_again_goes_on(
    appliance: EmbeddedAppliance, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(appliance, topic)
    options, name = options_of(appliance, topic), f"query:{topic}"
    mine, others = stage(options, 0, name, ""), stage(options, 0, name, "")
    append = TopicLog.append

    def disturbed(log: TopicLog, seen: Any, kind: str, following: Any) -> bool:
        is_mine = append(log, seen, kind, following)
        monkeypatch.setattr(TopicLog, "append", append)
        assert not commit_staged(options, others, 0)
        return is_mine

    monkeypatch.setattr(TopicLog, "append", disturbed)
    assert not commit_staged(options, mine, 0)
    check_once(appliance, topic, 1)


def test_a_limit_lowered_under_a_decided_batch_is_said_with_its_partition_and_the_batch_goes_on_when_it_is_raised(  # noqa: E501
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)
    options, name = options_of(appliance, topic), f"query:{topic}"
    tasks = stage(options, 0, name, tasks=1)
    with Admin(appliance.address) as admin:
        admin.alter_topics({topic: {"max.message.bytes": 1_500}})
        with pytest.raises(RecordTooLargeError, match=rf"{topic}-0: .*large.* max\.message\.bytes"):
            commit_staged(options, tasks, 0)
        assert values_in(appliance, topic) == []
        admin.alter_topics({topic: {"max.message.bytes": 1 << 20}})
    assert not commit_staged(options, tasks, 0)
    check_once(appliance, topic, 1)


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_query_from_an_old_copy_of_a_checkpoint_is_refused_and_the_one_that_runs_goes_on(
    appliance: EmbeddedAppliance, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was said that its batches are written, though they may have other rows: those were
    lost.
    """
    make(appliance, topic)
    options, name = options_of(appliance, topic), f"query:{topic}"
    for batch_id in (0, 1):
        assert commit_staged(options, stage(options, batch_id, name), batch_id)
    with pytest.raises(
        InvalidRequestError,
        match=r"batch 0 was to be written, and batch 1 .* Its checkpoint is an older copy",
    ):
        commit_staged(options, stage(options, 0, name, "copy"), 0)
    assert commit_staged(options, stage(options, 2, name), 2)
    check_once(appliance, topic, 3)
    assert not commit_staged(options, stage(options, 2, name, "copy")[:1], 2)
    assert "sink_batch_differs batch=2 rows=250 published_rows=500" in caplog.text


def test_versions_of_an_application_that_go_backwards_are_not_written(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)
    options, name = options_of(appliance, topic), f"app:{topic}"
    assert commit_staged(options, stage(options, 0, name, tasks=1), 7)
    assert not commit_staged(options, stage(options, 1, name, tasks=1), 3)
    check_once(appliance, topic, 1)


# ---- the sink's own topics -----------------------------------------------------------------------


def test_rows_that_a_stranger_has_written_into_the_log_are_passed_over(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)
    options, name = options_of(appliance, topic), f"query:{topic}"
    commit_staged(options, stage(options, 0, name, tasks=1), 0)
    with Producer(appliance.address) as producer:
        for value in (
            b"x",
            None,
            zlib.compress(b"[]"),
            zlib.compress(json.dumps({"on": "x"}).encode()),
        ):
            producer.send(log_topic(name), value).result(HANG_LIMIT_S)
    assert not commit_staged(options, stage(options, 0, name, tasks=1), 0)
    assert commit_staged(options, stage(options, 1, name, "new", tasks=1), 1)
    check_once(appliance, topic, 2)


def test_the_column_topic_names_no_topic_of_the_appliances_own(
    appliance: EmbeddedAppliance,
) -> None:
    stager = Stager(parse_sink_options({"bootstrap": appliance.address}), "query:x", 0)
    try:
        with pytest.raises(
            InvalidRequestError,
            match=f"topic '{INTERNAL_PREFIX}sink_x' is internal and cannot be written to",
        ):
            stager.add(
                pa.RecordBatch.from_arrays(
                    [pa.array([b"v"]), pa.array([f"{INTERNAL_PREFIX}sink_x"])], ["value", "topic"]
                )
            )
    finally:
        stager.close()


def test_a_log_that_is_deleted_under_a_commit_fails_it_and_says_what_to_look_at(
    appliance: EmbeddedAppliance, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(appliance, topic, 1)
    options, name = options_of(appliance, topic), f"query:{topic}"
    publish = Committer._publish

    def without_log(committer: Committer, *arguments: Any) -> None:
        with Admin(appliance.address) as admin:
            admin.delete_topics(log_topic(name))
        publish(committer, *arguments)

    monkeypatch.setattr(Committer, "_publish", without_log)
    with pytest.raises(
        UnknownTopicError,
        match="the log of this query's published batches, was deleted while a batch was",
    ):
        commit_staged(options, stage(options, 0, name, tasks=1), 0)


def manifest_of(tasks: int, partitions: int) -> Manifest:
    """Of a shuffle: a piece from each task for each partition, with gaps where attempts have
    failed.
    """
    rng, ends, batches = random.Random(1), [0] * 4, [[] for _ in range(4)]  # type: ignore[var-annotated]
    for task in range(tasks):
        for partition in range(partitions):
            rows, position = rng.randint(1, 50), ends[task % 4] + (rng.random() < 0.01) * 7
            batches[task % 4].append((position, rows, partition))
            ends[task % 4] = position + rows
    targets = tuple(
        Target("t", "0" * 32, p, 0, 1000 * p, 10 * tasks, identity=(7, 9) if p == 1 else None)
        for p in range(partitions)
    )
    return Manifest(
        3,
        4,
        5,
        targets,
        tuple(Stage("stage", "0" * 32, p, tuple(of)) for p, of in enumerate(batches)),
    )


def test_a_decision_about_many_pieces_fits_into_a_record() -> None:
    manifest = manifest_of(50, 400)
    text = json.dumps(manifest.to_json())
    assert Manifest.from_json(json.loads(text)) == manifest
    assert (
        len(zlib.compress(text.encode())) / (50 * 400) < 2
    )  # bytes for a piece; with each as a list of three they were 5.6


def test_a_decision_about_too_many_pieces_says_how_to_have_fewer(
    appliance: EmbeddedAppliance, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(appliance, topic, 1)
    options, name = options_of(appliance, topic), f"query:{topic}"
    whole, noise = Manifest.to_json, random.Random(1).randbytes(1_500_000).hex()
    monkeypatch.setattr(Manifest, "to_json", lambda manifest: {**whole(manifest), "noise": noise})
    with pytest.raises(
        RecordTooLargeError,
        match=r"the batch has too many pieces for a record of the sink's log.*coalesce",
    ):
        commit_staged(options, stage(options, 0, name, tasks=1), 0)
    assert values_in(appliance, topic) == []


# ---- rows and jobs -------------------------------------------------------------------------------


def test_a_task_waits_for_an_appliance_as_long_as_the_commit_does(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)
    options = parse_sink_options(
        {"bootstrap": appliance.address, "topic": topic, "publishTimeoutMs": "500000"}
    )
    stager = Stager(options, f"query:{topic}", 0)
    try:
        stager.add(pa.RecordBatch.from_arrays([pa.array([b"v"])], ["value"]))
        assert stager.finish().rows == 1
        assert stager._producer is not None
        assert stager._producer.settings.delivery_timeout_ms == 500_000
    finally:
        stager.close()


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"v"}])
def test_a_header_without_a_key_is_refused_as_a_producer_refuses_it(
    header: dict[str, Any] | None,
) -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

    def rows_with(*headers: Any) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [pa.array([b"v"] * len(headers)), pa.array(headers, kind)], ["value", "headers"]
        )

    fine = default_rows(
        rows_with([{"key": "", "value": None}, {"key": "", "value": b"2"}], None, [])
    )
    assert fine.column("headers").to_pylist() == [
        [{"key": "", "value": None}, {"key": "", "value": b"2"}],
        None,
        [],
    ]
    with pytest.raises(InvalidRecordError, match="a header without a key in the column headers"):
        default_rows(rows_with([], [header]))


def test_a_job_whose_staged_rows_cannot_be_dropped_has_not_failed(
    appliance: EmbeddedAppliance,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Spark would say that it has, and whoever runs it again writes its rows twice."""
    make(appliance, topic, 1)
    job = BatchSink(options_of(appliance, topic))
    tasks = stage(options_of(appliance, topic), 0, job._identity, tasks=1)
    forget = sink.forget

    def away(_identity: str, _bootstrap: str | None) -> None:
        raise NotReachableError("no appliance answers")

    monkeypatch.setattr(sink, "forget", away)
    job.commit(tasks)
    assert "sink_stage_left" in caplog.text
    check_once(appliance, topic, 1)
    forget(job._identity, appliance.address)
    assert tailrace.scan(topic, appliance.address).read_all().num_rows == 500
