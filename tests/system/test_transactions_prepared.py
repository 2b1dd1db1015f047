"""A prepared transaction of a real appliance: owner and all processes are killed, and it is decided
by its id.
"""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import psutil
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.client.connections.steps import call_json, run_on
from tailrace.core.errors import InvalidTransactionError, TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance, embedded, start_embedded
from tailrace.protocol.frame import Api
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


def prepare(admin: Admin) -> dict[str, Any]:
    """What END_TRANSACTION of the owner answers."""
    found = admin.describe_transactions("billing")["billing"]
    request = {
        "transactional_id": "billing", "owner": found["owner"],
        "producer_id": found["producer_id"], "producer_epoch": found["producer_epoch"],
        "outcome": "prepare", "tag": TAG,
    }  # fmt: skip
    connection = admin._connection
    return run_on(connection, call_json(connection, Api.END_TRANSACTION, request, 60_000))


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_a_prepared_transaction_outlives_its_owner_and_every_process(
    tmp_path: pathlib.Path, outcome: str
) -> None:
    directory = str(tmp_path / "data")
    running = start_embedded(data_dir=directory, auto_create_topics=False)
    producer = Producer(running.address, transactional_id="billing", transaction_timeout_ms=1_000)
    with Admin(running.address) as admin:
        admin.create_topics([NewTopic("orders", 2)])
        producer.begin_transaction()
        for partition in range(2):
            producer.send("orders", b"prepared", partition=partition)
        producer.flush()
        assert prepare(admin)["outcome"] == "prepare"
        late = producer.send("orders", b"late", partition=0)
        with pytest.raises(TailraceError):
            late.result(HANG_LIMIT_S)
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
