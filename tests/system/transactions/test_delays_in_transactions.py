"""Delayed records of transactions through the real processes: they exist from the commit on."""

from __future__ import annotations

import datetime as dt
import pathlib
from collections.abc import Callable

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, Recurrence
from tailrace.core.errors import UnknownDelayError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.format.directory.delay_files import PENDING_FILE, Manifest
from tests.kit.processes import HANG_LIMIT_S, children, kill_and_wait_for_successor, wait_until

SOON = dt.timedelta(milliseconds=20)
LATER = dt.timedelta(hours=2)


@pytest.fixture
def delayed(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, partitions=1, configs={"delay.enabled": True})])
    return topic


def pending(appliance: EmbeddedAppliance, topic: str) -> int:
    with Admin(appliance.address) as admin:
        return len(list(admin.list_delays(topic)))


def first_values(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes]:
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found = [record.value for record in consumer.consume(count, timeout=HANG_LIMIT_S)]
        return found + [record.value for record in consumer.poll(timeout_ms=200)]


def test_due_records_of_an_open_transaction_come_at_its_commit_and_hold_up_no_other(
    appliance: EmbeddedAppliance, delayed: str
) -> None:
    with (
        Producer(appliance.address, transactional_id=delayed) as producer,
        Producer(appliance.address) as plain,
    ):
        producer.begin_transaction()
        producer.send(delayed, b"committed", deliver_after=SOON).result(HANG_LIMIT_S)
        plain.send(delayed, b"plain", deliver_after=2 * SOON).result(HANG_LIMIT_S)
        assert first_values(appliance, delayed, 1) == [b"plain"]
        assert pending(appliance, delayed) == 0
        producer.commit_transaction()
        assert first_values(appliance, delayed, 2) == [b"plain", b"committed"]


def test_records_of_an_aborted_transaction_are_never_delivered_or_listed(
    appliance: EmbeddedAppliance, delayed: str
) -> None:
    with Producer(appliance.address, transactional_id=delayed) as producer:
        producer.begin_transaction()
        sent = producer.send(delayed, b"soon", deliver_after=SOON).result(HANG_LIMIT_S)
        producer.send(delayed, b"later", deliver_after=LATER)
        producer.send(delayed, b"often", repeat=Recurrence.every(SOON))
        producer.flush()
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send(delayed, b"next", deliver_after=SOON)
        producer.commit_transaction()
    assert first_values(appliance, delayed, 1) == [b"next"]
    assert pending(appliance, delayed) == 0
    with Admin(appliance.address) as admin:
        delay_id = str(sent.delay_id)
        assert isinstance(admin.cancel_delays([delay_id])[delay_id], UnknownDelayError)


def test_recurring_and_later_records_are_listed_and_cancelled_from_the_commit_on(
    appliance: EmbeddedAppliance, delayed: str
) -> None:
    with Producer(appliance.address, transactional_id=delayed) as producer:
        producer.begin_transaction()
        later = producer.send(delayed, b"later", deliver_after=LATER).result(HANG_LIMIT_S)
        often = producer.send(delayed, b"often", repeat=Recurrence.every(SOON)).result(HANG_LIMIT_S)
        assert pending(appliance, delayed) == 0
        producer.commit_transaction()
    assert first_values(appliance, delayed, 2)[:2] == [b"often", b"often"]
    with Admin(appliance.address) as admin:
        ids = [str(later.delay_id), str(often.delay_id)]
        assert admin.cancel_delays(ids) == dict.fromkeys(ids)
    assert pending(appliance, delayed) == 0


@pytest.mark.parametrize("process", ["tr-sched", "tr-worker", "tr-flush"])
@pytest.mark.parametrize("is_committed", [True, False])
def test_killed_processes_keep_open_transactions_and_their_delayed_records(
    appliance: EmbeddedAppliance, delayed: str, process: str, is_committed: bool
) -> None:
    def kill() -> None:
        names = [name for name in children(appliance) if name.startswith(process)]
        assert names
        for name in names:
            kill_and_wait_for_successor(appliance, name)

    with Producer(appliance.address, transactional_id=delayed) as producer:
        producer.begin_transaction()
        for number in range(5):
            producer.send(delayed, b"%d" % number, deliver_after=SOON).result(HANG_LIMIT_S)
        kill()
        end: Callable[[], object] = (
            producer.commit_transaction if is_committed else producer.abort_transaction
        )
        end()
        kill()
        producer.begin_transaction()
        producer.send(delayed, b"last", deliver_after=dt.timedelta(milliseconds=300))
        producer.commit_transaction()
    expected = [b"%d" % number for number in range(5)] if is_committed else []
    assert first_values(appliance, delayed, len(expected) + 1) == [*expected, b"last"]


@pytest.mark.slow_because("the scheduler saves what is new every ten seconds")
def test_a_scheduler_killed_behind_its_manifest_knows_what_was_open_there(
    appliance: EmbeddedAppliance, delayed: str
) -> None:
    with (
        Producer(appliance.address, transactional_id=delayed) as producer,
        Producer(appliance.address) as plain,
    ):
        producer.begin_transaction()
        for number in range(3):
            producer.send(delayed, b"%d" % number, deliver_after=SOON).result(HANG_LIMIT_S)
        plain.send(delayed, b"later", deliver_after=LATER).result(HANG_LIMIT_S)
        path = pathlib.Path(appliance.data_dir) / f"{delayed}@delay-0" / PENDING_FILE

        def open_batches() -> int:
            return len(Manifest.decode(path.read_bytes()).open_batches) if path.exists() else 0

        wait_until(lambda: open_batches() == 1, "the manifest names the open transaction")
        kill_and_wait_for_successor(appliance, "tr-scheduler-0")
        producer.commit_transaction()
    assert first_values(appliance, delayed, 3) == [b"0", b"1", b"2"]
    assert pending(appliance, delayed) == 1
