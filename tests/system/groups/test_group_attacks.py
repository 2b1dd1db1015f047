"""Attacks on the process of groups: what one client, one stop or one file that goes may cost the
others.
"""

from __future__ import annotations

import pathlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, Record, TopicPartition
from tailrace.core.error_codes import ErrorCode
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.protocol.frame import Api
from tests.kit.appliances.orders import create, start
from tests.kit.members.groups import heartbeats, member, poll_until_shared
from tests.kit.peers.raw_client import RawClient
from tests.kit.processes import children, stopped, wait_until

GROUPS = "tr-groups-0"


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[EmbeddedAppliance]:
    running = start(tmp_path / "data")
    create(running, 4)
    yield running
    running.stop()


def test_a_process_of_groups_that_was_stopped_for_longer_than_their_sessions_removes_no_member(
    own: EmbeddedAppliance,
) -> None:
    clients = [RawClient(own.address) for _ in range(12)]
    try:
        members = [
            (client, f"{number:02}-{each}")
            for number, client in enumerate(clients)
            for each in range(50)
        ]

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
                sent.append(
                    (client, member_id, client.send(Api.GROUP_HEARTBEAT, orjson.dumps(request)))
                )
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
        with stopped(pid):
            stopped_ns = time.monotonic_ns()
            sent = beat(epochs)
            pause = threading.Event()
            while time.monotonic_ns() - stopped_ns < 4_500_000_000:
                assert clients[0].answer(clients[0].send(Api.PING))[0] is ErrorCode.OK
                pause.wait(0.05)
        assert set(heard(sent)) == {member_id for _, member_id in members}
        summary = clients[0].ask(
            Api.DESCRIBE_GROUP, {"group": "g", "part": "members", "after": None}
        )[1]["group"]
        assert summary["members"] == 600
    finally:
        for client in clients:
            client.close()


@pytest.mark.long
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
        with Consumer(
            bootstrap=running.address, group_id="g", auto_offset_reset="earliest"
        ) as consumer:
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


FLOOD_UNDER_WAY = 60


class Flood(threading.Thread):
    """A connection that keeps FLOOD_UNDER_WAY requests of the costly kinds under way, until it is
    stopped.
    """

    def __init__(self, address: str, number: int) -> None:
        super().__init__(name=f"flood-{number}")
        self._address = address
        self._number = number
        self.done = threading.Event()
        self.count = 0

    def run(self) -> None:
        with RawClient(self._address) as client:
            sent = deque(self._send(client, n) for n in range(FLOOD_UNDER_WAY))
            while not self.done.is_set():
                client.answer(sent.popleft())
                self.count += 1
                sent.append(self._send(client, FLOOD_UNDER_WAY + self.count))

    def _send(self, client: RawClient, n: int) -> int:
        joins = {
            "owned": {},
            "topics": ["orders"],
            "session_timeout_ms": 600_000,
            "heartbeat_interval_ms": 3_000,
        }
        requests: list[tuple[Api, dict[str, Any]]] = [
            (
                Api.GROUP_HEARTBEAT,
                {
                    "group": f"f{self._number}-{n % 7}",
                    "member_id": f"{self._number}-{n}",
                    "member_epoch": 0,
                    **joins,
                },
            ),
            (
                Api.GROUP_HEARTBEAT,
                {"group": "large", "member_id": f"m{n % 300}", "member_epoch": 1},
            ),
            (Api.DESCRIBE_GROUP, {"group": "large", "part": "members", "after": None}),
            (
                Api.COMMIT_OFFSETS,
                {
                    "group": f"c{self._number}",
                    "member_id": None,
                    "member_epoch": -1,
                    "offsets": [["orders", p, 0, -1, "m" * 3_000] for p in range(4)],
                },
            ),
        ]
        api, request = requests[n % len(requests)]
        return client.send(api, orjson.dumps(request))


def test_an_honest_group_keeps_its_partitions_and_commits_while_others_flood_the_process_of_groups(
    own: EmbeddedAppliance,
) -> None:
    total = 2_000
    with RawClient(own.address) as client:
        for first in range(0, 300, 50):
            joins = [
                {
                    "group": "large",
                    "member_id": f"m{first + n}",
                    "member_epoch": 0,
                    "owned": {},
                    "topics": ["orders"],
                    "session_timeout_ms": 600_000,
                }
                for n in range(50)
            ]
            for sent in [client.send(Api.GROUP_HEARTBEAT, orjson.dumps(join)) for join in joins]:
                assert client.answer(sent)[0] is ErrorCode.OK
        settings: dict[str, Any] = {
            "session_timeout_ms": 10_000,
            "heartbeat_interval_ms": 200,
            "enable_auto_commit": False,
        }
        with (
            member(own, "honest", "orders", **settings) as one,
            member(own, "honest", "orders", **settings) as other,
        ):
            poll_until_shared([one, other], 4)
            before = client.ask(
                Api.DESCRIBE_GROUP, {"group": "honest", "part": "members", "after": None}
            )[1]["group"]
            owned = [one.assignment(), other.assignment()]
            floods = [Flood(own.address, number) for number in range(4)]
            for flood in floods:
                flood.start()
            try:
                with Producer(own.address) as producer:
                    found: list[Record] = []
                    for number in range(total):
                        producer.send("orders", b"%d" % number, partition=number % 4)
                        if number % 40 == 39:
                            producer.flush()
                            for consumer in (one, other):
                                found += consumer.poll(10)
                                consumer.commit()

                beats = [heartbeats(consumer) for consumer in (one, other)]

                def is_read() -> bool:
                    return len(found) == total and all(
                        heartbeats(c) > n + 5 for c, n in zip((one, other), beats, strict=True)
                    )

                while not is_read():
                    for consumer in (one, other):
                        found += consumer.poll(10)
                        consumer.commit()
                assert all(flood.is_alive() and flood.count > FLOOD_UNDER_WAY for flood in floods)
            finally:
                for flood in floods:
                    flood.done.set()
                for flood in floods:
                    flood.join()
            assert sorted(int(record.value or b"") for record in found) == list(range(total)), (
                "nothing lost, nothing twice"
            )
            assert [one.assignment(), other.assignment()] == owned
            after = client.ask(
                Api.DESCRIBE_GROUP, {"group": "honest", "part": "members", "after": None}
            )[1]["group"]
            assert {key: after[key] for key in ("epoch", "rebalances", "members")} == {
                key: before[key] for key in ("epoch", "rebalances", "members")
            }
            keys = [TopicPartition("orders", partition) for partition in range(4)]
            assert [one.committed(key) for key in keys] == [total // 4] * 4
