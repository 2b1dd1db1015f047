"""The sink's staging and commit against a real appliance, without Spark: what is killed where, who
repeats what, and what is in the topic afterwards.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pytest

import tailrace
from spark_bridge.sink import commit as sink_commit
from spark_bridge.sink import staging as sink_stage
from spark_bridge.sink.commit import CRASH_VARIABLE, Committer, Fenced
from spark_bridge.sink.decision_log import Manifest
from spark_bridge.sink.options import SinkOptions
from spark_bridge.sink.staging import Stager, log_topic, stage_prefix
from spark_bridge.sink.writer import StagedTask, commit_staged, forget, forget_query
from tailrace import Admin, NewTopic, Producer
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core.errors import SchemaMismatchError, TailraceError, UnknownTopicError
from tailrace.core.topic_partition import TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import HANG_LIMIT_S
from tests.kit.sink import ROWS, check_once, make, options_of, stage, values_in

COMMIT = """
import pickle, sys
from spark_bridge.sink.writer import commit_staged
with open(sys.argv[1], "rb") as file:
    commit_staged(*pickle.load(file))
"""


def commit_and_die(
    options: SinkOptions, tasks: list[StagedTask], batch_id: int, place: str, path: Path
) -> None:
    """A driver that is killed at a place of its commit."""
    path.write_bytes(pickle.dumps((options, tasks, batch_id)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMIT, str(path)],
        env={**os.environ, CRASH_VARIABLE: place},
        timeout=HANG_LIMIT_S,
        check=False,
        capture_output=True,
    )
    assert done.returncode == -9, done.stderr.decode()


# ---- what a commit does --------------------------------------------------------------------------


def test_nothing_is_visible_before_the_commit_and_all_is_after_it(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    tasks = stage(options, 0, sink)
    assert values_in(appliance, topic) == []
    assert commit_staged(options, tasks, 0)
    check_once(appliance, topic, 1)


def test_rows_are_published_once_and_in_order_however_they_are_cut_into_pieces(
    appliance: EmbeddedAppliance, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few rows, some without a key, and one partition that gets so few that the limit
    on held batches sends them.
    """
    monkeypatch.setattr(sink_stage, "PIECE_BYTES", 300)
    monkeypatch.setattr(sink_stage, "BUFFERED_MAX_BYTES", 4_000)
    make(appliance, topic, 3)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    stager = Stager(options, sink, 0)
    partitions = [2 if n == 7 else None if n % 3 else n % 2 for n in range(ROWS)]
    for first in range(0, ROWS, 100):
        chosen = range(first, first + 100)
        columns = [
            [b"0/%d" % n for n in chosen],
            pa.array([partitions[n] for n in chosen], pa.int32()),
        ]
        stager.add(pa.record_batch(columns, ["value", "partition"]))
    tasks = [StagedTask(sink, "run-1", stager.finish())]
    stager.close()
    few = [
        rows
        for batches in tasks[0].staged.batches.values()
        for _, rows, target in batches
        if tasks[0].staged.targets[target][2] == 2
    ]
    assert commit_staged(options, tasks, 0)
    check_once(appliance, topic, 1)
    assert len(few) > 1, "rows without a key were spread, and what waited for long was sent"
    read = (
        tailrace.scan(topic, appliance.address, columns=["partition", "value"])
        .read_all()
        .to_pylist()
    )
    for partition in (0, 1):
        own = [
            int(row["value"][2:])
            for row in read
            if row["partition"] == partition and partitions[int(row["value"][2:])] == partition
        ]
        assert own == [n for n in range(ROWS) if partitions[n] == partition]


def test_a_batch_that_is_committed_again_is_recognised_with_other_staged_rows_too(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    for batch_id in (0, 1):
        tasks = stage(options, batch_id, sink)
        assert commit_staged(options, tasks, batch_id)
        assert not commit_staged(options, tasks, batch_id)
        assert not commit_staged(options, stage(options, batch_id, sink), batch_id)
    check_once(appliance, topic, 2)


def test_keys_lie_where_a_producer_puts_them_and_in_order(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 4)
    options = options_of(appliance, topic)
    commit_staged(options, stage(options, 0, f"query:{topic}", tasks=1), 0)
    with Producer(appliance.address) as producer:
        requested = {
            n: producer.send(topic, b"produced", b"%d" % n).result(HANG_LIMIT_S).partition
            for n in range(ROWS)
        }
    rows = (
        tailrace.scan(topic, appliance.address, columns=["key", "value", "partition", "offset"])
        .read_all()
        .to_pylist()
    )
    assert {
        int(row["key"]): row["partition"] for row in rows if row["value"] != b"produced"
    } == requested
    for partition in range(4):
        numbers = [
            int(row["key"])
            for row in rows
            if row["partition"] == partition and row["value"] != b"produced"
        ]
        assert numbers
        assert numbers == sorted(numbers)


def test_hash_slots_are_obeyed(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 4, partitioner="hash_slots")
    options = options_of(appliance, topic)
    commit_staged(options, stage(options, 0, f"query:{topic}"), 0)
    with Producer(appliance.address) as producer:
        requested = {
            n: producer.send(topic, b"produced", b"%d" % n).result(HANG_LIMIT_S).partition
            for n in range(ROWS)
        }
    rows = (
        tailrace.scan(topic, appliance.address, columns=["key", "value", "partition"])
        .read_all()
        .to_pylist()
    )
    assert {
        int(row["key"]): row["partition"] for row in rows if row["value"] != b"produced"
    } == requested


def test_a_batch_staged_before_hash_slots_moved_is_refused_as_a_whole_and_taken_when_it_is_staged_again(  # noqa: E501
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 2, partitioner="hash_slots")
    options, sink = options_of(appliance, topic), f"query:{topic}"
    tasks = stage(options, 0, sink)
    with Admin(appliance.address) as admin:
        admin.create_partitions({topic: 3})
    with pytest.raises(
        TailraceError, match="partitions were added to a topic while the batch was staged"
    ):
        commit_staged(options, tasks, 0)
    assert values_in(appliance, topic) == []
    assert commit_staged(options, stage(options, 0, sink), 0)
    check_once(appliance, topic, 1)


def test_topics_of_the_sink_are_in_no_list_and_go_with_forget(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    commit_staged(options, stage(options, 0, sink), 0)
    with Admin(appliance.address) as admin:
        assert [name for name in admin.list_topics() if name.startswith("__")] == []
        assert topic in admin.describe_topics()
        assert log_topic(sink) in admin.list_topics(internal=True)
        forget_query(topic, appliance.address)
        assert not [
            name
            for name in admin.list_topics(internal=True)
            if name == log_topic(sink) or name.startswith(stage_prefix(sink))
        ]


def test_what_was_staged_is_deleted_and_the_log_stays_short(
    appliance: EmbeddedAppliance, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_commit, "TIDY_BATCHES", 1)
    make(appliance, topic, 1)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    for batch_id in range(60):
        assert commit_staged(options, stage(options, batch_id, sink, tasks=1), batch_id)
    with Admin(appliance.address) as admin:
        stages = [
            name for name in admin.list_topics(internal=True) if name.startswith(stage_prefix(sink))
        ]
        left = admin.offsets(
            {TopicPartition(stages[0], 0): "latest", TopicPartition(log_topic(sink), 0): "latest"}
        )
    assert [
        found["beginning"] == found["end"] for key, found in left.items() if key.topic == stages[0]
    ] == [True]
    assert [
        0 < found["end"] - found["beginning"] < 120
        for key, found in left.items()
        if key.topic != stages[0]
    ] == [True]
    assert not commit_staged(options, stage(options, 59, sink, tasks=1), 59)
    assert commit_staged(options, stage(options, 60, sink, tasks=1), 60)
    check_once(appliance, topic, 61)


def test_tasks_that_begin_at_once_make_the_staging_topic_together(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    staged: list[StagedTask] = []
    begin = threading.Barrier(8)

    def work(task: int) -> None:
        stager = Stager(options, sink, task)
        try:
            begin.wait(HANG_LIMIT_S)
            stager.add(
                pa.RecordBatch.from_arrays(
                    [pa.array([b"0/%d" % n for n in range(task, ROWS, 8)])], ["value"]
                )
            )
            staged.append(StagedTask(sink, "run", stager.finish()))
        finally:
            stager.close()

    tasks = [threading.Thread(target=work, args=(task,)) for task in range(8)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(HANG_LIMIT_S)
    commit_staged(options, staged, 0)
    check_once(appliance, topic, 1)


# ---- drivers that are killed ---------------------------------------------------------------------


@pytest.mark.parametrize("place", ["after_manifest", "in_publish", "before_done", "after_done"])
def test_a_driver_killed_at_each_place_publishes_each_row_once(
    appliance: EmbeddedAppliance, topic: str, place: str, tmp_path: Path
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    assert commit_staged(options, stage(options, 0, sink), 0)
    commit_and_die(options, stage(options, 1, sink), 1, place, tmp_path / "commit")
    commit_and_die(
        options, stage(options, 1, sink, "run-2"), 1, "in_publish", tmp_path / "again"
    ) if place == "after_manifest" else None
    commit_staged(options, stage(options, 1, sink, "run-3"), 1)
    assert commit_staged(options, stage(options, 2, sink, "run-3"), 2)
    check_once(appliance, topic, 3)


def test_a_batch_of_which_a_part_was_published_goes_on_after_its_producer_was_forgotten(
    topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    ask = Committer._is_forgotten

    def note(committer: Committer, manifest: Manifest, infos: Mapping[str, TopicInfo]) -> bool:
        asked.append(ask(committer, manifest, infos))
        return asked[-1]

    monkeypatch.setattr(Committer, "_is_forgotten", note)
    running = start_embedded(auto_create_topics=False, settings={"producer.id.expiration.ms": 1})
    try:
        make(running, topic, 3)  # those that know the producer yet keep what they have
        options, sink = options_of(running, topic), f"query:{topic}"
        commit_and_die(options, stage(options, 0, sink), 0, "in_publish", tmp_path / "commit")
        assert 0 < len(values_in(running, topic)) < ROWS
        commit_staged(options, stage(options, 0, sink, "run-2"), 0)
        assert True in asked
        check_once(running, topic, 1)
    finally:
        running.stop()


def test_two_drivers_that_finish_the_same_batch_at_once_publish_it_once(
    appliance: EmbeddedAppliance, topic: str, tmp_path: Path
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    for batch_id in range(5):
        commit_and_die(
            options,
            stage(options, batch_id, sink, f"run-{batch_id}"),
            batch_id,
            "in_publish",
            tmp_path / "commit",
        )
        errors: list[BaseException] = []

        def finish(
            run: str, batch_id: int = batch_id, errors: list[BaseException] = errors
        ) -> None:
            try:
                commit_staged(options, stage(options, batch_id, sink, run), batch_id)
            except Fenced:
                pass  # the other one took over
            except BaseException as error:
                errors.append(error)

        drivers = [threading.Thread(target=finish, args=(f"{name}-{batch_id}",)) for name in "ab"]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join(HANG_LIMIT_S)
        assert errors == []
    check_once(appliance, topic, 5)


def test_a_run_that_another_has_taken_over_from_is_refused(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    commit_staged(options, stage(options, 0, sink, "old"), 0)
    assert not commit_staged(options, stage(options, 0, sink, "new"), 0)
    with pytest.raises(Fenced, match="another run of this query has taken over at batch 1"):
        commit_staged(options, stage(options, 1, sink, "old"), 1)
    assert commit_staged(options, stage(options, 1, sink, "new"), 1)
    check_once(appliance, topic, 2)


# ---- what cannot be finished ---------------------------------------------------------------------


def deleted_topic(admin: Admin, topic: str, _sink: str) -> None:
    admin.delete_topics(topic)
    admin.create_topics(NewTopic(topic, 3))


def deleted_stage(admin: Admin, _topic: str, sink: str) -> None:
    admin.delete_topics(
        [name for name in admin.list_topics(internal=True) if name.startswith(stage_prefix(sink))]
    )


def deleted_staged_rows(admin: Admin, _topic: str, sink: str) -> None:
    stages = [
        name for name in admin.list_topics(internal=True) if name.startswith(stage_prefix(sink))
    ]
    admin.delete_records({TopicPartition(stages[0], partition): -1 for partition in range(4)})


@pytest.mark.parametrize("loss", [deleted_topic, deleted_stage, deleted_staged_rows])
def test_a_decided_batch_that_is_nowhere_and_cannot_be_finished_is_written_from_the_new_rows(
    appliance: EmbeddedAppliance,
    topic: str,
    loss: Callable[[Admin, str, str], None],
    tmp_path: Path,
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    commit_and_die(options, stage(options, 0, sink), 0, "after_manifest", tmp_path / "commit")
    with Admin(appliance.address) as admin:
        loss(admin, topic, sink)
    assert commit_staged(options, stage(options, 0, sink, "run-2"), 0)
    check_once(appliance, topic, 1)


def test_a_batch_that_is_there_in_part_and_cannot_be_finished_says_what_is_there(
    appliance: EmbeddedAppliance, topic: str, tmp_path: Path
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    commit_and_die(options, stage(options, 0, sink), 0, "in_publish", tmp_path / "commit")
    with Admin(appliance.address) as admin:
        deleted_stage(admin, topic, sink)
    with pytest.raises(
        TailraceError,
        match=r"batch 0 is published in part and cannot be finished .* of \d+ rows in",
    ):
        commit_staged(options, stage(options, 0, sink, "run-2"), 0)


# ---- without a query -----------------------------------------------------------------------------


def test_a_job_without_a_name_leaves_no_topic_behind(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"job:{topic}"
    commit_staged(options, stage(options, 0, sink), 0)
    forget(sink, appliance.address)
    check_once(appliance, topic, 1)
    with Admin(appliance.address) as admin:
        assert not [
            name for name in admin.list_topics(internal=True) if name.startswith(stage_prefix(sink))
        ]


def test_a_topic_that_is_not_there_and_columns_that_do_not_fit_are_said_by_the_task(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with pytest.raises(UnknownTopicError, match="to write to"):
        stage(options_of(appliance, f"no-{topic}"), 0, "job:x")
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, schema=pa.schema([("n", pa.int64())])))
    with pytest.raises(SchemaMismatchError, match="do not fit the typed topic"):
        stage(options_of(appliance, topic), 0, "job:x")


def test_an_appliance_killed_and_restarted_while_a_batch_is_decided_publishes_each_row_once(
    topic: str, tmp_path: Path
) -> None:
    """See tests/crash/spark_sink.py for kills at random."""
    data_dir, listen = str(tmp_path / "data"), f"ipc://{tmp_path}/socket"
    running = start_embedded(auto_create_topics=False, data_dir=data_dir, listen=listen)
    try:
        make(running, topic)
        options, sink = options_of(running, topic), f"query:{topic}"
        commit_and_die(options, stage(options, 0, sink), 0, "in_publish", tmp_path / "commit")
        os.kill(running.pid, signal.SIGKILL)
        running.stop()
        running = start_embedded(auto_create_topics=False, data_dir=data_dir, listen=listen)
        commit_staged(options, stage(options, 0, sink, "run-2"), 0)
        check_once(running, topic, 1)
    finally:
        running.stop()
