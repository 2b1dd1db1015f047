"""The scheduler runs once there is a topic with delays, and from the first process on where there
was one.
"""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import signal
from collections.abc import Iterator

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.core.errors import UnknownTopicError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.console import console_of, get
from tests.kit.processes import children, kill_and_wait_for_successor, stopped, wait_until

SCHEDULER = "tr-scheduler-0"


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    running = start_embedded(
        data_dir=str(tmp_path / "data"), settings={"http.listen": "127.0.0.1:0"}
    )
    yield running
    running.stop()


def create(appliance: EmbeddedAppliance, name: str = "later") -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(name, 1, {"delay.enabled": True})])


def send_later(appliance: EmbeddedAppliance, topic: str, value: bytes) -> None:
    with Producer(appliance.address, acks="all") as producer:
        producer.send(topic, value, deliver_after=dt.timedelta(milliseconds=20)).result(60)


def received(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        while len(found) < count:
            records = consumer.poll(60_000)
            assert records
            found += [record.value for record in records]
    return found


def is_shown(appliance: EmbeddedAppliance) -> bool:
    with Admin(appliance.address) as admin:
        rows = {row["name"]: row for row in admin.describe_cluster()["processes"]}
    return "scheduler-0" in rows and bool(rows["scheduler-0"]["live"])


def test_without_delays_there_is_no_scheduler_and_looking_starts_none(
    own: EmbeddedAppliance,
) -> None:
    with Admin(own.address) as admin:
        admin.create_topics([NewTopic("now", 1)])
        assert admin.describe_delays() == []
    console = console_of(own)
    status, text = get(console, "/metrics")
    assert status == 200
    assert "tailrace_up 1.0" in text
    assert 'process="scheduler-0"' not in text
    wait_until(lambda: get(console, "/health/ready")[0] == 200, "it is ready without it")
    assert SCHEDULER not in children(own)
    assert not is_shown(own)


def test_the_first_topic_with_delays_starts_it(own: EmbeddedAppliance) -> None:
    create(own)
    with Admin(own.address) as admin:
        wait_until(
            lambda: [row["topic"] for row in admin.describe_delays()] == ["later"],
            "its partition is shown: the answer is the scheduler's from the creation on",
        )
    assert SCHEDULER in children(own)
    send_later(own, "later", b"x")
    assert received(own, "later", 1) == [b"x"]
    assert is_shown(own)
    assert 'process="scheduler-0"' in get(console_of(own), "/metrics")[1]
    kill_and_wait_for_successor(own, SCHEDULER)
    send_later(own, "later", b"y")
    assert received(own, "later", 2) == [b"x", b"y"]


def test_a_question_about_pending_records_starts_it_too(own: EmbeddedAppliance) -> None:
    with Admin(own.address) as admin, pytest.raises(UnknownTopicError):
        list(admin.list_delays("nothing"))
    assert SCHEDULER in children(own)


def test_a_start_with_delays_serves_when_the_scheduler_does(own: EmbeddedAppliance) -> None:
    create(own)
    send_later(own, "later", b"x")
    assert own.stop() == 0
    again = start_embedded(data_dir=own.data_dir)
    try:
        assert SCHEDULER in children(again), "it was started before the appliance served"
        assert is_shown(again)
        assert received(again, "later", 1) == [b"x"]
    finally:
        assert again.stop() == 0


def test_a_controller_killed_with_its_decision_is_followed_by_one_that_asks_for_the_scheduler(
    own: EmbeddedAppliance,
) -> None:
    """The topic is made while the supervisor stands still: the request waits for it in memory that
    outlives the controller.
    """
    before = children(own)["tr-controller-0"]
    with stopped(own.pid):
        create(own)
        os.kill(before, signal.SIGKILL)
    wait_until(lambda: SCHEDULER in children(own), "the scheduler is started")
    send_later(own, "later", b"x")
    assert received(own, "later", 1) == [b"x"]
