"""The sink's transaction and commit against a real appliance, without Spark: what is killed where,
who repeats what, who takes over, and what is in the topic afterwards.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from appliance.cli.main import tailrace as tailrace_command
from spark_bridge.sink.commit import abort_tasks, commit_tasks
from spark_bridge.sink.crash_points import AFTER_DECISION, BEFORE_DECISION, CRASH_VARIABLE
from spark_bridge.sink.messages import WrittenTask
from spark_bridge.sink.options import SinkOptions
from spark_bridge.sink.task_writer import TaskWriter
from spark_bridge.sink.transaction import FencedRunError, transaction_client, transactional_id_of
from spark_bridge.sink.writer import BatchSink, forget_query
from tailrace import Admin, Consumer, Producer, TopicPartition
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidSettingError,
    RecordTooLargeError,
    TailraceError,
    TransactionAbortedError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.lakes.sink import (
    ROWS,
    check_once,
    make,
    options_of,
    rows_of_task,
    values_in,
    write,
)
from tests.kit.processes import HANG_LIMIT_S, wait_until

COMMIT = """
import pickle, sys
from spark_bridge.sink.commit import commit_tasks
with open(sys.argv[1], "rb") as file:
    commit_tasks(*pickle.load(file))
assert not {"pyarrow", "numpy"} & set(sys.modules), "a commit imports what it does not need"
"""


def commit_elsewhere(
    options: SinkOptions, tasks: list[WrittenTask], batch_id: int, path: Path, place: str = ""
) -> None:
    """A commit in a driver's process, which is killed at a place of it if that is named."""
    path.write_bytes(pickle.dumps((options, tasks, batch_id)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMIT, str(path)],
        env={**os.environ, CRASH_VARIABLE: place},
        timeout=HANG_LIMIT_S,
        check=False,
        capture_output=True,
    )
    assert done.returncode == (-signal.SIGKILL if place else 0), done.stderr.decode()


def lag_of_stable_offset(appliance: EmbeddedAppliance, topic: str, partitions: int) -> int:
    """Offsets that readers of committed records have to wait for."""
    keys = [TopicPartition(topic, number) for number in range(partitions)]
    ends = []
    for level in ("read_uncommitted", "read_committed"):
        with Consumer(bootstrap=appliance.address, isolation_level=level) as consumer:
            ends.append(sum(consumer.end_offsets(keys).values()))
    return ends[0] - ends[1]


# ---- what a commit does --------------------------------------------------------------------------


def test_nothing_is_visible_before_the_commit_and_all_is_after_it(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    tasks = write(options, 0, sink)
    assert values_in(appliance, topic) == []
    assert commit_tasks(options, tasks, 0)
    check_once(appliance, topic, 1)


def test_all_partitions_and_topics_of_a_batch_become_visible_at_once(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """The decision is one. So whoever finds a row of the last partition finds all, later."""
    make(appliance, topic, 8)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    for batch_id in range(5):
        commit_tasks(options, write(options, batch_id, sink), batch_id)
        check_once(appliance, topic, batch_id + 1)


def test_only_the_attempts_whose_results_spark_took_are_read(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """A speculative attempt that ended second, one that failed, and one that is writing still."""
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    tasks = write(options, 0, sink)
    write(options, 0, sink)
    writing = TaskWriter(options, sink, "run-1", 0, 0)
    try:
        writing.add(rows_of_task(0, 0, 2))
        writing._send_all()
        assert writing._producer is not None
        writing._producer.flush()
        assert commit_tasks(options, tasks, 0)
        check_once(appliance, topic, 1)
        writing.add(rows_of_task(0, 1, 2))
        with pytest.raises(TransactionAbortedError):
            writing.finish()
    finally:
        writing.close()
    assert commit_tasks(options, write(options, 1, sink), 1)
    check_once(appliance, topic, 2)


@pytest.mark.parametrize("known_as", [-1, None])
def test_a_batch_that_comes_again_is_recognised_also_where_spark_says_no_number_to_tasks(
    appliance: EmbeddedAppliance, topic: str, known_as: int | None
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    for batch_id in (0, 1):
        run = f"run-{batch_id}"
        tasks = write(options, batch_id, sink, run, known_as=known_as)
        assert commit_tasks(options, tasks, batch_id)
        for repeated_by in (run, f"run-{batch_id + 1}"):
            again = write(options, batch_id, sink, repeated_by, known_as=known_as)
            assert not commit_tasks(options, again, batch_id)
    check_once(appliance, topic, 2)


def test_a_commit_imports_neither_pyarrow_nor_numpy(
    appliance: EmbeddedAppliance, topic: str, tmp_path: Path
) -> None:
    """It has a process of its own. This one also looks for a former log."""
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    commit_elsewhere(options, write(options, 0, sink), 0, tmp_path / "commit")
    check_once(appliance, topic, 1)


def test_the_process_that_plans_a_batch_imports_no_client() -> None:
    code = (
        "import sys, spark_bridge.datasource, spark_bridge.sink.entry\n"
        "unwished = {'zmq', 'pyarrow', 'numpy', 'tailrace.client'} & set(sys.modules)\n"
        "assert not unwished, unwished"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=HANG_LIMIT_S)


def test_tasks_that_begin_at_once_join_one_transaction(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    written: list[WrittenTask] = []
    begin = threading.Barrier(8)

    def work(task: int) -> None:
        writer = TaskWriter(options, sink, "run", task, 0)
        try:
            begin.wait(HANG_LIMIT_S)
            writer.add(rows_of_task(0, task, 8))
            written.append(writer.finish())
        finally:
            writer.close()

    tasks = [threading.Thread(target=work, args=(task,)) for task in range(8)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(HANG_LIMIT_S)
    assert commit_tasks(options, written, 0)
    check_once(appliance, topic, 1)


# ---- drivers that are killed ---------------------------------------------------------------------


@pytest.mark.parametrize("place", [BEFORE_DECISION, AFTER_DECISION])
def test_a_driver_killed_at_each_place_commits_each_row_once(
    appliance: EmbeddedAppliance, topic: str, place: str, tmp_path: Path
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    assert commit_tasks(options, write(options, 0, sink), 0)
    commit_elsewhere(options, write(options, 1, sink), 1, tmp_path / "commit", place)
    is_decided = place == AFTER_DECISION
    assert commit_tasks(options, write(options, 1, sink, "run-2"), 1) is not is_decided
    assert commit_tasks(options, write(options, 2, sink, "run-2"), 2)
    check_once(appliance, topic, 3)


def test_a_late_commit_of_a_run_that_was_replaced_commits_nothing(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    assert commit_tasks(options, write(options, 0, sink, "old"), 0)
    late = write(options, 1, sink, "old")
    tasks = write(options, 1, sink, "new")
    with pytest.raises(FencedRunError, match="another run of this query has taken over"):
        commit_tasks(options, late, 1)
    assert commit_tasks(options, tasks, 1)
    with pytest.raises(FencedRunError):
        commit_tasks(options, late, 1)
    check_once(appliance, topic, 2)


def test_a_run_that_another_has_taken_over_from_is_refused_for_good(
    appliance: EmbeddedAppliance, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a task of it in a Python process that has never seen it, and long after."""
    from spark_bridge.sink import task_writer

    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    assert commit_tasks(options, write(options, 0, sink, "old"), 0)
    for batch_id in range(1, 6):
        assert commit_tasks(options, write(options, batch_id, sink, f"new-{batch_id}"), batch_id)
    for run in ("old", "new-3"):
        monkeypatch.setattr(task_writer, "_runs", {})
        with pytest.raises(FencedRunError, match="another run of this query has taken over"):
            write(options, 6, sink, run)
    assert commit_tasks(options, write(options, 6, sink, "new-5"), 6)
    check_once(appliance, topic, 7)


def test_two_drivers_that_commit_the_same_batch_at_once_commit_it_once(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    for batch_id in range(5):
        errors: list[BaseException] = []
        begin = threading.Barrier(2)

        def drive(
            run: str,
            batch_id: int = batch_id,
            errors: list[BaseException] = errors,
            begin: threading.Barrier = begin,
        ) -> None:
            try:
                begin.wait(HANG_LIMIT_S)
                commit_tasks(options, write(options, batch_id, sink, run), batch_id)
            except (FencedRunError, TransactionAbortedError):
                pass  # the other one took over
            except BaseException as error:
                errors.append(error)

        drivers = [
            threading.Thread(target=drive, args=(f"{name}-{batch_id}",)) for name in ("a", "b")
        ]
        for driver in drivers:
            driver.start()
        for driver in drivers:
            driver.join(HANG_LIMIT_S)
        assert errors == []
        commit_tasks(options, write(options, batch_id, sink, f"c-{batch_id}"), batch_id)
        check_once(appliance, topic, batch_id + 1)


def test_an_appliance_killed_between_tasks_and_commit_loses_no_row(
    topic: str, tmp_path: Path
) -> None:
    """See tests/crash/spark_sink.py for kills at random."""
    data_dir, listen = str(tmp_path / "data"), f"ipc://{tmp_path}/socket"

    def start() -> EmbeddedAppliance:
        return start_embedded(auto_create_topics=False, data_dir=data_dir, listen=listen)

    running = start()
    try:
        make(running, topic)
        options, sink = options_of(running, topic), f"query:{topic}"
        tasks = write(options, 0, sink)
        os.kill(running.pid, signal.SIGKILL)
        running.stop()
        running = start()
        assert commit_tasks(options, tasks, 0)
        os.kill(running.pid, signal.SIGKILL)
        running.stop()
        running = start()
        assert not commit_tasks(options, write(options, 0, sink, "run-2"), 0)
        check_once(running, topic, 1)
    finally:
        running.stop()


# ---- what is aborted -----------------------------------------------------------------------------


def test_an_aborted_batch_holds_no_reader_back(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 2)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    tasks = write(options, 0, sink)
    assert lag_of_stable_offset(appliance, topic, 2) > 0
    abort_tasks(options, tasks)
    wait_until(lambda: lag_of_stable_offset(appliance, topic, 2) == 0, "readers pass it")
    assert values_in(appliance, topic) == []
    with pytest.raises(TransactionAbortedError, match="aborted before its commit"):
        commit_tasks(options, tasks, 0)
    abort_tasks(options, tasks)  # which is over
    assert commit_tasks(options, write(options, 0, sink), 0)
    abort_tasks(options, tasks)
    check_once(appliance, topic, 1)


def test_a_job_that_fails_before_a_task_has_ended_holds_no_reader_back(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 2)
    options = options_of(appliance, topic)
    job = BatchSink(options)
    job.abort([None])  # of which nothing is known
    writer = TaskWriter(options, job._identity, job._run, 0, None)
    writer.add(rows_of_task(0, 0, 1))
    writer._send_all()
    assert writer._producer is not None
    writer._producer.flush()
    writer.close()
    assert lag_of_stable_offset(appliance, topic, 2) > 0
    job.abort([None])
    wait_until(lambda: lag_of_stable_offset(appliance, topic, 2) == 0, "readers pass it")


def test_a_batch_that_takes_longer_than_its_timeout_is_not_written_and_the_option_is_named(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    sink = f"query:{topic}"
    short = options_of(appliance, topic, transactionTimeoutMs="50")
    tasks = write(short, 0, sink, tasks=1)
    identity = transactional_id_of(sink)

    def is_aborted() -> bool:
        with Admin(appliance.address) as admin:
            last = admin.describe_transactions(identity)[identity]["last"]
        return last is not None and bool(last["by"] == "timeout")

    wait_until(is_aborted, "the transaction is aborted")
    with pytest.raises(TransactionAbortedError, match="than the option transactionTimeoutMs"):
        commit_tasks(short, tasks, 0)
    assert values_in(appliance, topic) == []
    options = options_of(appliance, topic)
    assert commit_tasks(options, write(options, 0, sink, "run-2"), 0)
    check_once(appliance, topic, 1)


def test_tasks_of_two_transactions_are_not_committed(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """The first was aborted by its timeout while the second was running."""
    make(appliance, topic)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    first, _ = write(options, 0, sink)
    abort_tasks(options, [first])
    _, second = write(options, 0, sink)
    with pytest.raises(TransactionAbortedError, match="has tasks of 2 transactions"):
        commit_tasks(options, [first, second], 0)
    assert values_in(appliance, topic) == []


def test_a_timeout_that_the_appliance_does_not_allow_says_which_setting_bounds_it(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic)
    options = options_of(appliance, topic, transactionTimeoutMs="900001")
    with pytest.raises(
        InvalidSettingError,
        match=r"transactionTimeoutMs is 900001.*up to its transaction\.max\.timeout\.ms",
    ):
        write(options, 0, f"query:{topic}")


def test_a_row_that_is_too_large_fails_its_task_with_its_partition(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)
    options, sink = options_of(appliance, topic), f"query:{topic}"
    with Admin(appliance.address) as admin:
        admin.alter_topics({topic: {"max.message.bytes": 1_100}})
        big = TaskWriter(options, sink, "run-1", 0, 0)
        rows = rows_of_task(0, 0, 1).slice(0, 1)
        big.add(rows.set_column(1, "value", pa.array([b"x" * 5_000])))
        with pytest.raises(RecordTooLargeError, match=topic):
            big.finish()
        big.close()
        admin.alter_topics({topic: {"max.message.bytes": 1 << 20}})
    assert commit_tasks(options, write(options, 0, sink, "run-2"), 0)
    check_once(appliance, topic, 1)


# ---- checkpoints and versions --------------------------------------------------------------------


@pytest.mark.parametrize("known_as", [-1, None])
def test_a_query_from_an_old_copy_of_a_checkpoint_is_refused(
    appliance: EmbeddedAppliance, topic: str, known_as: int | None
) -> None:
    make(appliance, topic)
    options, name = options_of(appliance, topic), f"query:{topic}"
    for batch_id in (0, 1):
        assert commit_tasks(options, write(options, batch_id, name), batch_id)
    with pytest.raises(
        InvalidRequestError,
        match=r"batch 0 was to be written, and batch 1 .* Its checkpoint is an older copy",
    ):
        commit_tasks(options, write(options, 0, name, "copy", known_as=known_as), 0)
    check_once(appliance, topic, 2)


def test_a_query_whose_checkpoint_was_copied_goes_on_beside_the_old_copy(
    appliance: EmbeddedAppliance, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(appliance, topic)
    options, name = options_of(appliance, topic), f"query:{topic}"
    for batch_id in (0, 1):
        assert commit_tasks(options, write(options, batch_id, name), batch_id)
    tasks = write(options, 2, name)
    with pytest.raises(InvalidRequestError, match="an older copy"):
        write(options, 0, name, "copy")
    assert commit_tasks(options, tasks, 2)
    check_once(appliance, topic, 3)
    assert not commit_tasks(options, write(options, 2, name, "copy")[:1], 2)
    assert "sink_batch_differs batch=2 rows=250 committed_rows=500" in caplog.text


def test_versions_of_an_application_that_go_backwards_are_not_written(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)
    options, name = options_of(appliance, topic), f"app:{topic}"
    assert commit_tasks(options, write(options, 0, name, tasks=1, known_as=7), 7)
    for version in (3, 7):
        again = write(options, 1, name, "run-2", tasks=1, known_as=version)
        assert not commit_tasks(options, again, version)
    check_once(appliance, topic, 1)


def test_a_forgotten_query_begins_anew(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 1)
    options, name = options_of(appliance, topic), f"query:{topic}"
    assert commit_tasks(options, write(options, 0, name), 0)
    forget_query(topic, appliance.address)
    with transaction_client(appliance.address, name, 10_000) as client:
        assert client.mark() is None
    assert commit_tasks(options, write(options, 0, name, "run-2"), 0)
    assert len(values_in(appliance, topic)) == 2 * ROWS
    forget_query(f"{topic}-never", appliance.address)


def test_a_batch_of_a_query_that_the_appliance_does_not_know_is_noted(
    appliance: EmbeddedAppliance, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another data directory, or one whose groups.db was lost: a repeated batch is not known."""
    make(appliance, topic, 1)
    options = options_of(appliance, topic)
    assert commit_tasks(options, write(options, 4, f"query:{topic}"), 4)
    assert "sink_batch_unknown batch=4" in caplog.text


def test_a_transactional_id_of_another_program_is_not_written_over(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)
    options, name = options_of(appliance, topic), f"query:{topic}"
    with transaction_client(appliance.address, name, 10_000) as client:
        client.commit(client.join("other", 1_000).transaction, (), "other")
    with pytest.raises(InvalidRequestError, match="belongs to another program"):
        write(options, 0, name)


def test_the_last_batch_of_a_query_is_shown_with_its_transactional_id(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)
    options, name = options_of(appliance, topic), f"query:{topic}"
    assert commit_tasks(options, write(options, 7, name), 7)
    command = ["transaction", "describe", transactional_id_of(name), "--bootstrap"]
    shown = CliRunner().invoke(tailrace_command, [*command, appliance.address])
    assert '"batch": 7' in shown.stdout, shown.output


def test_names_of_sinks_are_transactional_ids() -> None:
    assert transactional_id_of("query:1-2") == "spark-query:1-2"
    for name in ("x" * 300, "a\nb"):
        assert len(transactional_id_of(f"app:{name}")) < 100
        assert transactional_id_of(f"app:{name}").startswith("spark-app:")


def test_a_producer_without_branches_leaves_the_mark_of_a_sink(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """An operator's abort, and a producer that took the id by mistake."""
    make(appliance, topic, 1)
    options, name = options_of(appliance, topic), f"query:{topic}"
    assert commit_tasks(options, write(options, 0, name), 0)
    identity = transactional_id_of(name)
    with Admin(appliance.address) as admin:
        admin.abort_transaction(identity)
    with (
        Producer(appliance.address, transactional_id=identity) as producer,
        producer.transaction(),
    ):
        producer.send(topic, b"other")
    assert not commit_tasks(options, write(options, 0, name, "run-2"), 0)
    wait_until(lambda: len(values_in(appliance, topic)) == ROWS + 1, "readers see both commits")
    with pytest.raises(TailraceError):
        commit_tasks(options, write(options, 1, name, "run-1"), 1)
