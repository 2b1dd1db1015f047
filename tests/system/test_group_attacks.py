"""Attacks on the process of groups: what one client, one stop or one file that goes may cost the others."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Iterator

import orjson
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, Record
from tailrace.private_appliance import EmbeddedAppliance
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import Api
from tests.kit.orders import create, start
from tests.kit.processes import children, wait_until
from tests.kit.raw_client import RawClient

GROUPS = "tr-groups-0"


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    running = start(tmp_path / "data")
    create(running, 4)
    yield running
    running.stop()


def test_a_process_of_groups_that_was_stopped_for_longer_than_their_sessions_removes_no_member(own: EmbeddedAppliance) -> None:
    clients = [RawClient(own.address) for _ in range(12)]
    try:
        members = [(client, f"{number:02}-{each}") for number, client in enumerate(clients) for each in range(50)]

        def beat(epochs: dict[str, int]) -> list[tuple[RawClient, str, int]]:
            sent = []
            for client, member_id in members:
                request = {
                    "group": "g",
                    "member_id": member_id,
                    "member_epoch": epochs.get(member_id, 0),
                    "owned": {},
                    "topics": ["orders"],
                }
                request |= {"session_timeout_ms": 4_000, "heartbeat_interval_ms": 500}
                sent.append((client, member_id, client.send(Api.GROUP_HEARTBEAT, orjson.dumps(request))))
            return sent

        def heard(sent: list[tuple[RawClient, str, int]]) -> dict[str, int]:
            found = {}
            for client, member_id, number in sent:
                code, body = client.answer(number)
                assert code is ErrorCode.OK, (member_id, code, body)
                found[member_id] = orjson.loads(body[0])["member_epoch"]
            return found

        epochs = heard(beat(heard(beat({}))))
        pid = children(own)[GROUPS]
        os.kill(pid, signal.SIGSTOP)
        try:
            stopped_ns = time.monotonic_ns()
            sent = beat(epochs)
            while time.monotonic_ns() - stopped_ns < 4_500_000_000:
                assert clients[0].answer(clients[0].send(Api.PING))[0] is ErrorCode.OK
        finally:
            os.kill(pid, signal.SIGCONT)
        assert set(heard(sent)) == {member_id for _, member_id in members}
        summary = clients[0].ask(Api.DESCRIBE_GROUP, {"group": "g", "part": "members", "after": None})[1]["group"]
        assert summary["members"] == 600
    finally:
        for client in clients:
            client.close()


def test_a_pattern_of_very_many_topics_with_long_names_is_read(tmp_path: pathlib.Path) -> None:
    running = start(tmp_path / "data")
    names = [f"{number:04}-{'y' * 230}" for number in range(1_150)]
    try:
        with Admin(running.address) as admin:
            for first in range(0, len(names), 100):
                admin.create_topics([NewTopic(name) for name in names[first : first + 100]])
        with Producer(running.address) as producer:
            for name in (names[0], names[-1]):
                producer.send(name, b"x").result(60)
        with Consumer(bootstrap=running.address, group_id="g", auto_offset_reset="earliest") as consumer:
            consumer.subscribe(pattern="[0-9]")
            found: list[Record] = []

            def is_read() -> bool:
                found.extend(consumer.poll(100))
                return len(found) == 2

            wait_until(is_read, "both are read")
            assert {record.topic for record in found} == {names[0], names[-1]}
            assert len(consumer.assignment()) == len(names)
    finally:
        assert running.stop() == 0
