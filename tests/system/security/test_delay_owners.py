"""Delayed records of users: their owner changes them, others need the right to alter delays."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.core.errors import NotAuthorizedError
from tests.kit.appliances.secured import Users, admin_address, secured
from tests.kit.processes import HANG_LIMIT_S, wait_until

LATER = dt.timedelta(days=1)


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    with secured(tmp_path_factory.mktemp("delays")) as found:
        found.admin.create_topics(NewTopic("alarms", configs={"delay.enabled": True}))
        yield found


def delayed(address: str) -> str:
    with Producer(address) as producer:
        handle = producer.send("alarms", b"x", deliver_after=LATER)
        token = handle.result(HANG_LIMIT_S).delay_id
    assert token is not None
    return token


def is_changed(address: str, token: str) -> bool:
    """True if the user may reschedule, then cancel the record."""
    with Admin(address) as admin:
        moved = admin.reschedule_delays({token: dt.datetime.now(dt.UTC) + 2 * LATER})[token]
        if isinstance(moved, NotAuthorizedError):
            assert isinstance(admin.cancel_delays(token)[token], NotAuthorizedError)
            return False
        assert isinstance(moved, str), moved
        return admin.cancel_delays(moved)[moved] is None


def test_a_user_changes_its_own_delayed_records_and_no_others(users: Users) -> None:
    ann = users.add("ann", "write topic alarms")
    bob = users.add("bob", "write topic alarms")
    chief = users.add("chief", "alter delay alarms", "describe topic alarms")
    of_ann, of_bob = delayed(ann), delayed(bob)
    assert not is_changed(bob, of_ann)
    assert not is_changed(ann, of_bob)
    assert is_changed(ann, of_ann)
    assert is_changed(chief, of_bob)
    users.allow("User:ann", "alter delay alarms")
    assert is_changed(ann, delayed(bob))


def test_an_aborted_change_returns_a_record_to_its_owner(users: Users) -> None:
    rights = "write topic alarms", "write transactional-id t."
    cat, dan = users.add("cat", *rights), users.add("dan", *rights)
    token = delayed(cat)
    with Producer(dan, transactional_id="t.dan") as producer:
        producer.begin_transaction()
        assert isinstance(producer.cancel_delays(token)[token], NotAuthorizedError)
        producer.abort_transaction()
    with Producer(cat, transactional_id="t.cat") as producer:
        producer.begin_transaction()
        assert producer.cancel_delays(token)[token] is None
        producer.abort_transaction()
    assert not is_changed(dan, token)
    assert is_changed(cat, token)


def test_a_record_comes_due_though_its_sender_has_lost_its_rights_and_is_gone(users: Users) -> None:
    """The appliance has taken it. Whoever may alter the delays of the topic can cancel it."""
    gone = users.add("gone", "write topic alarms")
    kept, cancelled = delayed(gone), delayed(gone)
    users.admin.remove_acls([{"principal": "User:gone"}])
    with Admin(gone) as admin, pytest.raises(NotAuthorizedError):
        admin.reschedule_delays({kept: dt.datetime.now(dt.UTC)})
    users.admin.delete_user("gone")
    assert users.admin.cancel_delays(cancelled)[cancelled] is None
    moved = users.admin.reschedule_delays({kept: dt.datetime.now(dt.UTC)})[kept]
    assert isinstance(moved, str), moved
    with Consumer(
        "alarms", bootstrap=admin_address(users.appliance), auto_offset_reset="earliest"
    ) as consumer:
        found: list[bytes | None] = []

        def is_delivered() -> bool:
            found.extend(record.value for record in consumer.poll(timeout_ms=500))
            return bool(found)

        wait_until(is_delivered, "the record is delivered")
    assert found == [b"x"]
