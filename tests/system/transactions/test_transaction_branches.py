"""One commit over many producers, against a real appliance: writers in processes of their own are
killed, repeated and late; owners and processes of the appliance are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace import (
    Admin,
    Consumer,
    FinishedBranch,
    NewTopic,
    Producer,
    ProducerFencedError,
    TopicPartition,
    TransactionAbortedError,
    TransactionBranch,
)
from tailrace.aio import AsyncProducer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.orders import kill_everything, start
from tests.kit.processes import HANG_LIMIT_S, kill_and_wait_for_successor, wait_until
from tests.kit.transactional.branch_writer import BranchWriterProcess


@pytest.fixture
def rows(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of four partitions."""
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, partitions=4)])
    return topic


@pytest.fixture(scope="module")
def writer() -> Iterator[BranchWriterProcess]:
    process = BranchWriterProcess()
    yield process
    process.close()


def committed(appliance: EmbeddedAppliance, topic: str, count: int) -> list[str]:
    """The committed values of a topic, sorted; there are no more than `count`."""
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found = consumer.consume(count, timeout=HANG_LIMIT_S) + consumer.poll(timeout_ms=200)
    return sorted((record.value or b"").decode() for record in found)


def write(
    appliance: EmbeddedAppliance, topic: str, branch: TransactionBranch, *values: str
) -> FinishedBranch:
    with Producer(appliance.address, transaction_branch=branch) as producer:
        for value in values:
            producer.send(topic, value.encode())
        return producer.finish_branch()


def is_open(appliance: EmbeddedAppliance, name: str) -> bool:
    with Admin(appliance.address) as admin:
        return bool(admin.describe_transactions(name)[name]["state"] == "ongoing")


def test_a_killed_writers_task_is_repeated_in_another_process_under_the_same_branch(
    appliance: EmbeddedAppliance, rows: str, writer: BranchWriterProcess
) -> None:
    values = [f"row {number}" for number in range(20)]
    with (
        Producer(appliance.address, transactional_id=rows) as owner,
        owner.transaction() as transaction,
    ):
        (branch,) = owner.create_transaction_branches(1)
        killed = BranchWriterProcess()
        killed.begin(appliance.address, rows, branch, values)
        killed.kill()
        writer.begin(appliance.address, rows, branch, values)
        owner.send(rows, b"own")
        transaction.branches = [writer.finish()]
        assert transaction.branches[0].record_count == 20
    assert committed(appliance, rows, 21) == sorted([*values, "own"])


def test_a_speculative_attempt_that_finishes_too_is_left_out(
    appliance: EmbeddedAppliance, rows: str, writer: BranchWriterProcess
) -> None:
    with Producer(appliance.address, transactional_id=rows) as owner:
        owner.begin_transaction()
        (branch,) = owner.create_transaction_branches(1)
        writer.begin(appliance.address, rows, branch, ["a", "b"])
        first = write(appliance, rows, branch, "a", "b")
        second = writer.finish()
        assert first.branch == second.branch
        assert first.producer_id != second.producer_id
        owner.commit_transaction(branches=[second])
    assert committed(appliance, rows, 2) == ["a", "b"]


def test_a_writer_that_outlives_the_commit_is_refused_and_touches_no_later_transaction(
    appliance: EmbeddedAppliance, rows: str, writer: BranchWriterProcess
) -> None:
    with Producer(appliance.address, transactional_id=rows) as owner:
        owner.begin_transaction()
        (branch,) = owner.create_transaction_branches(1)
        writer.begin(appliance.address, rows, branch, ["late 1", "late 2"])
        owner.commit_transaction(branches=[])
        owner.begin_transaction()
        (following,) = owner.create_transaction_branches(1)
        finished = write(appliance, rows, following, "next")
        assert writer.error().startswith("TransactionAbortedError")
        with pytest.raises(TransactionAbortedError, match="was committed at"):
            write(appliance, rows, branch, "later")
        owner.commit_transaction(branches=[finished])
    assert committed(appliance, rows, 1) == ["next"]


def test_a_second_owner_aborts_all_branches_and_fences_their_writers(
    appliance: EmbeddedAppliance, rows: str, writer: BranchWriterProcess
) -> None:
    with (
        Producer(appliance.address, transactional_id=rows) as owner,
        Producer(appliance.address, transactional_id=rows) as successor,
    ):
        owner.begin_transaction()
        (branch,) = owner.create_transaction_branches(1)
        writer.begin(appliance.address, rows, branch, ["a", "b"])
        successor.init_transactions()
        assert writer.error().startswith("ProducerFencedError")
        with pytest.raises(ProducerFencedError):
            owner.create_transaction_branches(1)
        with successor.transaction() as transaction:
            (branch,) = successor.create_transaction_branches(1)
            transaction.branches = [write(appliance, rows, branch, "next")]
    assert committed(appliance, rows, 1) == ["next"]


def test_a_timeout_aborts_what_only_branches_have_written(
    appliance: EmbeddedAppliance, rows: str, writer: BranchWriterProcess
) -> None:
    with Producer(appliance.address, transactional_id=rows, transaction_timeout_ms=5_000) as owner:
        owner.begin_transaction()
        (branch,) = owner.create_transaction_branches(1)
        writer.begin(appliance.address, rows, branch, ["a", "b"])
        wait_until(lambda: is_open(appliance, rows), "the worker has reported it")
        wait_until(lambda: not is_open(appliance, rows), "the timeout has aborted it")
        assert "longer than its timeout" in writer.error()
        with pytest.raises(TransactionAbortedError, match="longer than its timeout"):
            owner.commit_transaction(branches=[])
        owner.abort_transaction()
        with owner.transaction() as transaction:
            (branch,) = owner.create_transaction_branches(1)
            transaction.branches = [write(appliance, rows, branch, "next")]
    assert committed(appliance, rows, 1) == ["next"]


def test_async_producers_share_a_transaction_with_offsets(
    appliance: EmbeddedAppliance, rows: str
) -> None:
    async def body() -> None:
        async def task(branch: TransactionBranch) -> FinishedBranch:
            async with AsyncProducer(appliance.address, transaction_branch=branch) as producer:
                await producer.send(rows, b"row %d" % branch.number)
                return await producer.finish_branch()

        async with (
            AsyncProducer(appliance.address, transactional_id=rows) as owner,
            owner.transaction() as transaction,
        ):
            branches = await owner.create_transaction_branches(8)
            finished = await asyncio.gather(*map(task, [*branches, branches[0]]))
            await owner.send_offsets_to_transaction({TopicPartition(rows, 0): 0}, rows)
            transaction.branches = finished[1:]

    asyncio.run(body())
    assert committed(appliance, rows, 8) == [f"row {number}" for number in range(8)]
    with Admin(appliance.address) as admin:
        assert admin.list_group_offsets(rows)[TopicPartition(rows, 0)] is not None


def test_a_frame_of_columns_goes_through_a_branch(appliance: EmbeddedAppliance, rows: str) -> None:
    pa = pytest.importorskip("pyarrow")
    frame = pa.table({"value": [b"row %d" % number for number in range(100)]})
    with (
        Producer(appliance.address, transactional_id=rows) as owner,
        owner.transaction() as transaction,
    ):
        (branch,) = owner.create_transaction_branches(1)
        with Producer(appliance.address, transaction_branch=branch) as producer:
            for partition in range(4):
                producer.send_arrow(rows, frame, partition=partition)
            transaction.branches = [producer.finish_branch()]
        assert transaction.branches[0].record_count == 400
    assert len(committed(appliance, rows, 400)) == 400


KILLED = [
    "tr-groups-0",
    "tr-worker-0",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("tr-front-0", "tr-flusher-0", "everything")
    ),
]


@pytest.mark.parametrize("name", KILLED)
def test_branches_of_killed_writers_owners_and_processes_are_all_or_nothing(
    tmp_path: Path, name: str
) -> None:
    """Each of three transactions has two tasks, one of them attempted twice. A process of the
    appliance is killed while branches are open, and another time while the commit is on its way.
    """
    data_dir, topic = tmp_path / "data", "rows"
    running = start(data_dir)
    expected: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: running.stop())
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(topic, partitions=4)])
        for number in range(3):
            values = [[f"{number} {task} {row}" for row in range(10)] for task in range(2)]
            owner = Producer(running.address, transactional_id="job")
            stack.callback(owner.close, 0)
            owner.begin_transaction()
            branches = owner.create_transaction_branches(2)
            write(running, topic, branches[1], *values[1])  # an attempt that is repeated
            half = Producer(running.address, transaction_branch=branches[0])
            stack.callback(half.close, 0)
            for value in values[0][:5]:
                half.send(topic, value.encode())
            half.flush()
            if number == 1 and name == "everything":
                kill_everything(running)
                running = start(data_dir)
                continue  # its owner and writers had another address: the next init aborts it
            if number == 1:
                kill_and_wait_for_successor(running, name)
            for value in values[0][5:]:
                half.send(topic, value.encode())
            finished = [half.finish_branch(), write(running, topic, branches[1], *values[1])]
            if number == 2 and name != "everything":
                killer = threading.Thread(target=kill_and_wait_for_successor, args=(running, name))
                killer.start()
                owner.commit_transaction(branches=finished)
                killer.join()
            else:
                owner.commit_transaction(branches=finished)
            expected += values[0] + values[1]
        assert committed(running, topic, len(expected)) == sorted(expected)
        with Admin(running.address) as admin:
            assert admin.find_hanging_transactions() == []


def test_an_owner_that_is_killed_leaves_nothing_of_its_branches(
    appliance: EmbeddedAppliance, rows: str
) -> None:
    """The owner is a process of its own, its writer lives on."""
    script = (
        "import sys, tailrace\n"
        "owner = tailrace.Producer(sys.argv[1], transactional_id=sys.argv[2])\n"
        "owner.begin_transaction()\n"
        "owner.send(sys.argv[2], b'own')\n"
        "owner.flush()\n"
        "print(owner.create_transaction_branches(1)[0].to_json(), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", script, appliance.address, rows],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    branch = TransactionBranch.from_json(process.stdout.readline())
    with Producer(appliance.address, transaction_branch=branch) as producer:
        producer.send(rows, b"before")
        producer.flush()
        process.kill()
        process.communicate()
        producer.send(rows, b"behind")
        finished = producer.finish_branch()
        with (
            Producer(appliance.address, transactional_id=rows) as successor,
            successor.transaction() as transaction,
        ):
            (branch,) = successor.create_transaction_branches(1)
            transaction.branches = [write(appliance, rows, branch, "next")]
    assert finished.record_count == 2, "it was open until a successor came"
    assert committed(appliance, rows, 1) == ["next"]
