"""A prepared transaction of a real appliance: owner and all processes are killed, and it is decided
by its id.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest

from tailrace import (
    Admin,
    ConcurrentTransactionsError,
    Consumer,
    NewTopic,
    PreparedTransaction,
    Producer,
    TopicPartition,
)
from tailrace.core.errors import InvalidTransactionError
from tailrace.embedded_appliance import EmbeddedAppliance, embedded, start_embedded
from tests.kit.processes import HANG_LIMIT_S

TAG = "xid-17"


def kill_all(running: EmbeddedAppliance) -> None:
    """SIGKILL to every process of an appliance."""
    supervisor = psutil.Process(running.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    for process in processes:
        process.suspend()
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    running.stop()
    psutil.wait_procs(processes[1:], HANG_LIMIT_S)


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_a_prepared_transaction_outlives_its_owner_and_every_process(
    tmp_path: pathlib.Path, outcome: str
) -> None:
    directory = str(tmp_path / "data")
    running = start_embedded(data_dir=directory, auto_create_topics=False)
    producer = Producer(running.address, transactional_id="billing", transaction_timeout_ms=5_000)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("orders", 2)])
        producer.begin_transaction()
        for partition in range(2):
            producer.send("orders", b"prepared", partition=partition)
        producer.flush()
        prepared = producer.prepare_transaction(TAG)
        assert prepared.tag == TAG
    kill_all(running)
    producer.close(0)
    with (
        embedded(data_dir=directory, auto_create_topics=False) as again,
        Admin(again.address) as admin,
        Producer(again.address, transactional_id="billing") as successor,
    ):
        found = admin.describe_transactions("billing")["billing"]
        assert (found["state"], found["prepared"]["tag"]) == ("prepared", TAG)
        assert list(admin.list_transactions(["prepared"])) == ["billing"]
        assert (found["producer_id"], found["producer_epoch"]) == (
            prepared.producer_id,
            prepared.producer_epoch,
        )
        with pytest.raises(InvalidTransactionError, match="prepared transaction"):
            successor.init_transactions()
        if outcome == "commit":
            admin.commit_transaction("billing")
            with pytest.raises(InvalidTransactionError, match="no prepared transaction"):
                admin.commit_transaction("billing")
        else:
            admin.abort_transaction("billing")
        with successor.transaction():
            successor.send("orders", b"next", partition=0)
        expected = [b"next"] + ([b"prepared"] * 2 if outcome == "commit" else [])
        with Consumer("orders", bootstrap=again.address, auto_offset_reset="earliest") as consumer:
            records = consumer.consume(len(expected), timeout=HANG_LIMIT_S)
            records += consumer.poll(timeout_ms=200)
        assert sorted(record.value for record in records) == expected


def owner_script(address: str, data: str) -> subprocess.Popen[bytes]:
    """A process that prepares a transaction with offsets and a branch, and says so."""
    script = """
import sys
from tailrace import Producer, TopicPartition
address, data = sys.argv[1:]
owner = Producer(address, transactional_id="billing")
owner.begin_transaction()
(branch,) = owner.create_transaction_branches(1)
with Producer(address, transaction_branch=branch) as writer:
    writer.send("orders", b"branch", partition=1)
    finished = writer.finish_branch()
with Producer(address, transaction_branch=branch) as writer:
    writer.send("orders", b"not named", partition=1)
    writer.finish_branch()
owner.send("orders", b"own", partition=0)
owner.send_offsets_to_transaction({TopicPartition("input", 0): 3}, "readers")
print(owner.prepare_transaction(data, branches=[finished]).to_json(), flush=True)
sys.stdin.readline()
"""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", script, address, data],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_successor_of_a_killed_owner_completes_with_offsets_and_branches(
    tmp_path: pathlib.Path, is_committed: bool
) -> None:
    """Another member of the group reads its other partition meanwhile."""
    directory = str(tmp_path / "data")
    running = start_embedded(data_dir=directory, auto_create_topics=False)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("orders", 2), NewTopic("input", 2)])
    with Producer(running.address) as producer:
        for number in range(5):
            for partition in range(2):
                producer.send("input", b"%d" % number, partition=partition)
    process = owner_script(running.address, TAG)
    assert process.stdout is not None
    prepared = PreparedTransaction.from_json(process.stdout.readline())
    process.kill()
    process.communicate()
    kill_all(running)
    with (
        embedded(data_dir=directory, auto_create_topics=False) as again,
        Producer(again.address, transactional_id="billing") as successor,
        Consumer(
            "input", bootstrap=again.address, group_id="readers", auto_offset_reset="earliest"
        ) as reader,
    ):
        first = reader.consume(5, timeout=HANG_LIMIT_S)
        assert {record.partition for record in first} == {1}
        with pytest.raises(ConcurrentTransactionsError, match="prepared transaction of 'billing'"):
            reader.committed(TopicPartition("input", 0))
        assert successor.init_transactions(keep_prepared=True) == prepared
        decided = prepared if is_committed else None
        assert successor.complete_transaction(decided) is is_committed
        following = reader.consume(2 if is_committed else 5, timeout=HANG_LIMIT_S)
        assert {record.partition for record in following} == {0}
        assert following[0].offset == (3 if is_committed else 0)
        with successor.transaction():
            successor.send("orders", b"next", partition=0)
        expected = [b"next", *([b"branch", b"own"] if is_committed else [])]
        with Consumer("orders", bootstrap=again.address, auto_offset_reset="earliest") as consumer:
            records = consumer.consume(len(expected), timeout=HANG_LIMIT_S)
            records += consumer.poll(timeout_ms=200)
        assert sorted(record.value for record in records) == sorted(expected)
