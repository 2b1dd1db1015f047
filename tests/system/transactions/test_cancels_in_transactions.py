"""Cancels and reschedules of delayed records within transactions, through the real processes: they
take effect with the commit, and an abort leaves the records as they were.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, Recurrence
from tailrace.aio import AsyncProducer
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidTransactionError,
    ProducerFencedError,
    TailraceError,
    UnknownDelayError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S, children, kill_and_wait_for_successor

SOON = dt.timedelta(milliseconds=30)
LATER = dt.timedelta(hours=2)


@pytest.fixture
def delayed(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, partitions=1, configs={"delay.enabled": True})])
    return topic


@pytest.fixture
def waiting(appliance: EmbeddedAppliance, delayed: str) -> list[str]:
    """The ids of three records that are due in two hours, and of one that recurs."""
    with Producer(appliance.address) as producer:
        sent = [producer.send(delayed, b"w%d" % number, deliver_after=LATER) for number in range(3)]
        sent.append(producer.send(delayed, b"again", repeat=Recurrence.every(LATER)))
        return [str(each.result(HANG_LIMIT_S).delay_id) for each in sent]


def pending(appliance: EmbeddedAppliance, topic: str) -> list[str]:
    with Admin(appliance.address) as admin:
        return sorted(delay.delay_id for delay in admin.list_delays(topic))


def first_values(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes]:
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found = [record.value for record in consumer.consume(count, timeout=HANG_LIMIT_S)]
        return found + [record.value for record in consumer.poll(timeout_ms=200)]


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def moved(producer: Producer, delay_id: str, after: dt.timedelta) -> str:
    """The new id of a record that was rescheduled."""
    found = producer.reschedule_delays({delay_id: now() + after})[delay_id]
    assert isinstance(found, str)
    return found


def test_cancels_take_effect_with_the_commit(
    appliance: EmbeddedAppliance, delayed: str, waiting: list[str]
) -> None:
    before = pending(appliance, delayed)
    assert len(before) == 4
    with Producer(appliance.address, transactional_id=delayed) as producer:
        producer.begin_transaction()
        assert producer.cancel_delays(waiting[1:]) == dict.fromkeys(waiting[1:])
        assert pending(appliance, delayed) == before
        producer.commit_transaction()
        assert pending(appliance, delayed) == waiting[:1]


def test_an_abort_leaves_the_records_as_they_were_under_their_ids(
    appliance: EmbeddedAppliance, delayed: str, waiting: list[str]
) -> None:
    before = pending(appliance, delayed)
    with Producer(appliance.address, transactional_id=delayed) as producer:
        for _ in range(2):
            producer.begin_transaction()
            assert not any(producer.cancel_delays(waiting).values())
            moved(producer, waiting[0], SOON)
            producer.abort_transaction()
            assert pending(appliance, delayed) == before
        with producer.transaction():  # the ids are valid still
            assert producer.cancel_delays(waiting) == dict.fromkeys(waiting)
    assert pending(appliance, delayed) == []


def test_a_rescheduled_record_comes_at_its_new_time_behind_the_commit(
    appliance: EmbeddedAppliance, delayed: str, waiting: list[str]
) -> None:
    with Producer(appliance.address, transactional_id=delayed) as producer:
        with producer.transaction():
            first = moved(producer, waiting[0], 3 * LATER)
            assert moved(producer, waiting[0], SOON) != first
            kept = moved(producer, waiting[1], 3 * LATER)
        assert first_values(appliance, delayed, 1)[:1] == [b"w0"]
        assert set(pending(appliance, delayed)) >= {kept, waiting[2]}
        assert len(pending(appliance, delayed)) == 3
    with Admin(appliance.address) as admin:
        assert isinstance(admin.cancel_delays([first])[first], UnknownDelayError)
        assert admin.cancel_delays([kept]) == {kept: None}


def test_a_record_that_falls_due_while_it_is_reserved_comes_after_an_abort_and_never_after_a_commit(
    appliance: EmbeddedAppliance, delayed: str
) -> None:
    with (
        Producer(appliance.address, transactional_id=delayed) as producer,
        Producer(appliance.address) as plain,
    ):
        ids = [
            str(plain.send(delayed, value, deliver_after=20 * SOON).result(HANG_LIMIT_S).delay_id)
            for value in (b"aborted", b"committed")
        ]
        marker = plain.send(delayed, b"marker", deliver_after=25 * SOON)
        producer.begin_transaction()
        assert producer.cancel_delays(ids) == dict.fromkeys(ids)
        marker.result(HANG_LIMIT_S)
        assert first_values(appliance, delayed, 1) == [b"marker"]
        producer.abort_transaction()
        found = first_values(appliance, delayed, 3)
        assert found == [b"marker", b"aborted", b"committed"]
        again = str(
            plain.send(delayed, b"gone", deliver_after=20 * SOON).result(HANG_LIMIT_S).delay_id
        )
        producer.begin_transaction()
        assert producer.cancel_delays([again]) == {again: None}
        plain.send(delayed, b"second marker", deliver_after=25 * SOON)
        assert first_values(appliance, delayed, 4)[3:] == [b"second marker"]
        producer.commit_transaction()
        plain.send(delayed, b"last", deliver_after=SOON)
        assert first_values(appliance, delayed, 5)[3:] == [b"second marker", b"last"]


def test_one_open_transaction_at_a_time_changes_a_record(
    appliance: EmbeddedAppliance, delayed: str, waiting: list[str]
) -> None:
    def is_reserved(error: TailraceError | str | None) -> bool:
        return isinstance(error, TailraceError) and (
            error.code is ErrorCode.CONCURRENT_TRANSACTIONS
        )

    with (
        Producer(appliance.address, transactional_id=delayed) as producer,
        Producer(appliance.address, transactional_id=delayed + "-2") as other,
        Admin(appliance.address) as admin,
    ):
        one = waiting[0]
        producer.begin_transaction()
        assert producer.cancel_delays(one) == {one: None}
        other.begin_transaction()
        assert is_reserved(other.cancel_delays(one)[one])
        assert is_reserved(other.reschedule_delays({one: now() + SOON})[one])
        assert is_reserved(admin.cancel_delays(one)[one])
        assert is_reserved(admin.reschedule_delays({one: now() + SOON})[one])
        sent = producer.send(delayed, b"new", deliver_after=LATER).result(HANG_LIMIT_S)
        assert is_reserved(admin.cancel_delays(str(sent.delay_id))[str(sent.delay_id)])
        producer.abort_transaction()
        assert other.cancel_delays(one) == {one: None}
        other.commit_transaction()
        assert isinstance(admin.cancel_delays(one)[one], UnknownDelayError)


def test_lists_and_cancels_right_behind_a_commit_miss_nothing(
    appliance: EmbeddedAppliance, delayed: str
) -> None:
    with (
        Producer(appliance.address, transactional_id=delayed) as producer,
        Admin(appliance.address) as admin,
    ):
        for _ in range(20):
            with producer.transaction():
                sent = producer.send(delayed, b"new", deliver_after=LATER)
            delay_id = str(sent.result(HANG_LIMIT_S).delay_id)
            assert [each.delay_id for each in admin.list_delays(delayed)] == [delay_id]
            with producer.transaction():
                assert producer.cancel_delays(delay_id) == {delay_id: None}
            assert list(admin.list_delays(delayed)) == []
            with producer.transaction():
                sent = producer.send(delayed, b"new", deliver_after=LATER)
            delay_id = str(sent.result(HANG_LIMIT_S).delay_id)
            assert admin.cancel_delays(delay_id) == {delay_id: None}


@pytest.mark.parametrize(
    "process",
    [
        "tr-sched",
        pytest.param("tr-worker", marks=pytest.mark.long),
        pytest.param("tr-flush", marks=pytest.mark.long),
        pytest.param("tr-groups", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("is_committed", [True, False])
def test_killed_processes_keep_what_is_reserved(
    appliance: EmbeddedAppliance,
    delayed: str,
    waiting: list[str],
    process: str,
    is_committed: bool,
) -> None:
    def kill() -> None:
        names = [name for name in children(appliance) if name.startswith(process)]
        assert names
        for name in names:
            kill_and_wait_for_successor(appliance, name)

    with Producer(appliance.address, transactional_id=delayed) as producer:
        producer.begin_transaction()
        assert not any(producer.cancel_delays(waiting[1:]).values())
        new_id = moved(producer, waiting[0], 3 * LATER)
        kill()
        end: Callable[[], object] = (
            producer.commit_transaction if is_committed else producer.abort_transaction
        )
        end()
        kill()
        expected = [new_id] if is_committed else sorted(waiting)
        found = pending(appliance, delayed)
        if not is_committed:  # the next occurrence of what recurs is part of its id
            found, expected = [each[:37] for each in found], [str(each)[:37] for each in expected]
        assert found == sorted(map(str, expected))


def test_a_fenced_owner_cancels_nothing(
    appliance: EmbeddedAppliance, delayed: str, waiting: list[str]
) -> None:
    before = pending(appliance, delayed)
    with Producer(appliance.address, transactional_id=delayed, max_block_ms=5_000) as old:
        old.begin_transaction()
        with Producer(appliance.address, transactional_id=delayed) as producer:
            producer.init_transactions()
            with pytest.raises(TailraceError):
                old.cancel_delays(waiting)
            with pytest.raises((ProducerFencedError, TailraceError)):
                old.commit_transaction()
            assert pending(appliance, delayed) == before


def test_calls_that_do_not_fit_are_refused_and_leave_the_transaction_usable(
    appliance: EmbeddedAppliance, delayed: str, waiting: list[str]
) -> None:
    with Producer(appliance.address) as plain, pytest.raises(InvalidTransactionError):
        plain.cancel_delays(waiting)
    with Producer(appliance.address, transactional_id=delayed) as producer:
        with pytest.raises(InvalidTransactionError, match="does not fit"):
            producer.cancel_delays(waiting)
        producer.begin_transaction()
        for wrong in ([3], "no id"):
            try:
                found = producer.cancel_delays(wrong)  # type: ignore[arg-type]
            except InvalidRequestError:
                continue
            assert all(isinstance(each, InvalidRequestError) for each in found.values())
        with pytest.raises(InvalidRequestError):
            producer.reschedule_delays({waiting[0]: dt.datetime(2030, 1, 1)})
        found = producer.cancel_delays(waiting[:1], topic="another")
        assert isinstance(found[waiting[0]], UnknownDelayError)
        assert producer.cancel_delays([]) == {}
        assert producer.cancel_delays(waiting[:1]) == {waiting[0]: None}
        producer.commit_transaction()
    assert len(pending(appliance, delayed)) == 3


def test_coroutines_cancel_within_their_transactions(
    appliance: EmbeddedAppliance, delayed: str, waiting: list[str]
) -> None:
    async def cancel() -> None:
        async with AsyncProducer(appliance.address, transactional_id=delayed) as producer:
            await producer.begin_transaction()
            assert await producer.cancel_delays(waiting[0]) == {waiting[0]: None}
            found = await producer.reschedule_delays({waiting[1]: now() + 3 * LATER})
            assert isinstance(found[waiting[1]], str)
            await producer.commit_transaction()

    asyncio.run(cancel())
    assert len(pending(appliance, delayed)) == 3
