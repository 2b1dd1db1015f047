"""Programs of a schedule that take records from a queue: members of a share group.

They know the protocol and nothing of the SDK: heartbeats, numbered requests that acquire and
acknowledge and are sent again until they are answered, members that leave or die. A dead letter is
a note in the history, made before its record is accepted.

Owner: one `tests.sim.schedule.Schedule`.
Invariants: those of `tests.sim.members.share_history`; of each member one request that acquires or
    acknowledges is under way.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_json_now
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import UnknownGroupError
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response
from tests.sim.actors import TOPIC, Inbox
from tests.sim.machine.machine_parts import ADDRESS, MS, SECOND
from tests.sim.machine.world import World
from tests.sim.members.share_history import Delivery, Place, QueueHistory

GROUP = "queue"
HEARTBEAT_NS = 500 * MS
SESSION_TIMEOUT_MS = 10_000
RETRY_INTERVAL_NS = 50 * MS
_UNKNOWN = (ErrorCode.NOT_READY, ErrorCode.TIMED_OUT, ErrorCode.TOO_MANY_REQUESTS)
"""Perhaps carried out."""
_UNDONE = (ErrorCode.STORAGE_ERROR, ErrorCode.DISK_FULL)
_ANEW = (ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER)


def settings(rng: random.Random) -> dict[str, Any]:
    """Settings of a topic that is a queue: locks that pass within a schedule, limits that are
    reached.
    """
    return {
        "group.share.record.lock.duration.ms": rng.choice((100, 1_000, 5_000)),
        "group.share.delivery.count.limit": rng.choice((1, 2, 3, 5)),
        "group.share.partition.max.record.locks": rng.choice((10, 12, 2_000)),
    }


@dataclass(slots=True)
class Under:
    """A request under way, or to be sent again."""

    api: Api
    body: dict[str, Any]
    said: list[tuple[Delivery, str]]
    asked_ns: int
    is_clear: bool = True
    """True if no try of it went without an answer."""


@dataclass(slots=True)
class ShareActor:
    """One member, and its successors."""

    name: str
    world: World
    rng: random.Random
    history: QueueHistory
    connection: Connection
    patience: float
    """Rate at which it says nothing of a record that it has."""
    member_id: str = ""
    epoch: int = 0
    topic_id: str = ""
    sequence: int = 0
    held: dict[Place, Delivery] = field(default_factory=dict)
    under: Under | None = None
    is_sent: bool = False
    is_asking: bool = False
    is_calm: bool = False
    """True if it only accepts now: the schedule comes to its end."""
    last_request_ns: int = 0
    """Time of the last heartbeat that was answered with OK."""
    next_heartbeat_ns: int = 0
    next_request_ns: int = 0
    life: int = 0
    """Grows with each member that it has been: answers to earlier ones are not its own."""
    inbox: Inbox = field(default_factory=Inbox)

    def turn(self) -> None:
        chance = self.rng.random()
        if chance < 0.01:
            self._die()
        elif chance < 0.02 and self.epoch and not self.is_asking:
            self._heartbeat(leaves=True)
        self.next_request_ns = min(self.next_request_ns, self.connection.now_ns())
        self.pump()

    def pump(self) -> None:
        self.connection.process()
        now_ns = self.connection.now_ns()
        self.connection.tick(now_ns)
        self.inbox.handle()
        if not self.is_asking and now_ns >= self.next_heartbeat_ns:
            self._heartbeat()
        if self.epoch and not self.is_sent and now_ns >= self.next_request_ns:
            self._request()

    # ---- being a member --------------------------------------------------------------------------

    def _die(self) -> None:
        """SIGKILL: what it had sent may still arrive, what it had is to be given to others."""
        self.connection.close()
        self.connection = Connection(ADDRESS, self.name, self.world.runtime)
        self._begin_anew()

    def _begin_anew(self) -> None:
        now_ns = self.connection.now_ns()
        for delivery in self.held.values():
            delivery.spoken_ns = delivery.spoken_ns or now_ns
        self.held = {}
        self.epoch = self.sequence = 0
        self.under = None
        self.is_sent = self.is_asking = False
        self.life += 1
        self.next_heartbeat_ns = now_ns

    def _heartbeat(self, *, leaves: bool = False) -> None:
        now_ns = self.connection.now_ns()
        if leaves:
            for delivery in self.held.values():
                delivery.spoken_ns = delivery.spoken_ns or now_ns
        if not self.epoch:
            self.member_id = f"{self.rng.getrandbits(128):032x}"
        request: dict[str, Any] = {
            "group": GROUP, "kind": "share", "member_id": self.member_id,
            "member_epoch": -1 if leaves else self.epoch,
        }  # fmt: skip
        if not self.epoch:
            request |= {
                "topics": [TOPIC], "session_timeout_ms": SESSION_TIMEOUT_MS,
                "heartbeat_interval_ms": 500, "client_id": self.name,
                "offset_reset": "earliest",
            }  # fmt: skip
        life = self.life

        def on_response(response: Response | None) -> None:
            if life == self.life:
                self._on_heartbeat(response, now_ns, leaves=leaves)

        self.is_asking = self.connection.request(
            Api.GROUP_HEARTBEAT, [requests.encode_json(request)], self.inbox.later(on_response)
        )
        self.next_heartbeat_ns = now_ns + HEARTBEAT_NS

    def _on_heartbeat(self, response: Response | None, asked_ns: int, *, leaves: bool) -> None:
        self.is_asking = False
        if leaves or (response is not None and response.code in _ANEW):
            self._begin_anew()
        elif response is not None and response.code is ErrorCode.OK:
            answer = requests.decode_json(response.body[0])
            assert answer["member_id"] == self.member_id
            if self.epoch:
                assert answer["member_epoch"] == self.epoch, (
                    "a share member's epoch does not change"
                )
                self.history.still_member(self.member_id, asked_ns)
            else:
                (self.topic_id,) = answer["topic_names"]
                self.next_request_ns = self.connection.now_ns()
            self.epoch = answer["member_epoch"]
            self.last_request_ns = asked_ns
        else:
            assert response is None or response.code in (*_UNKNOWN, *_UNDONE), (
                response.code,
                response.detail(),
            )

    # ---- records ---------------------------------------------------------------------------------

    def _request(self) -> None:
        """Send the request that waits for its answer again, or the next one."""
        if self.under is None:
            self.under = self._next_request()
        under, life = self.under, self.life

        def on_response(response: Response | None) -> None:
            if life == self.life:
                self.is_sent = False
                self._on_answer(under, response)

        self.is_sent = self.connection.request(
            under.api, [requests.encode_json(under.body)], self.inbox.later(on_response)
        )
        self.next_request_ns = self.connection.now_ns() + RETRY_INTERVAL_NS

    def _next_request(self) -> Under:
        now_ns = self.connection.now_ns()
        said = [
            (delivery, outcome)
            for delivery in self.held.values()
            if (outcome := self._outcome(delivery))
        ]
        for delivery, outcome in said:
            if outcome != "renew":
                delivery.spoken_ns = now_ns
            if outcome in ("accept", "reject"):
                self.history.handled[delivery.place] = now_ns
        self.sequence += 1
        body: dict[str, Any] = {
            "group": GROUP, "member_id": self.member_id, "member_epoch": self.epoch,
            "sequence": self.sequence,
            "acknowledge": [[self.topic_id, *run] for run in _runs(said)],
        }  # fmt: skip
        if said and self.rng.random() < 0.3:
            return Under(Api.SHARE_ACKNOWLEDGE, body, said, now_ns)
        body["max_records"] = self.rng.choice((0, 1, 3, 20, 200))
        return Under(Api.SHARE_ACQUIRE, body, said, now_ns)

    def _outcome(self, delivery: Delivery) -> str:
        """Outcome that the member reports of a record now; "": nothing yet, perhaps never."""
        if self.is_calm or delivery.is_dead:
            return "accept"
        if self.rng.random() < self.patience:
            return ""
        return self.rng.choices(("accept", "release", "reject", "renew"), (12, 5, 2, 2))[0]

    def _on_answer(self, under: Under, response: Response | None) -> None:
        now_ns = self.connection.now_ns()
        if response is None or response.code in _UNKNOWN:
            under.is_clear = False
        elif response.code in _UNDONE:
            if (
                under.is_clear and self.rng.random() < 0.5
            ):  # said to be undone: the next request is another one
                self.under = None
        elif response.code in _ANEW:
            self._begin_anew()
        else:
            assert response.code is ErrorCode.OK, (response.code, response.detail())
            self.under = None
            self._take_up(under, requests.decode_json(response.body[0]), now_ns)

    def _take_up(self, under: Under, answer: dict[str, Any], now_ns: int) -> None:
        refused = {
            Place(partition, offset)
            for _, partition, first, last, *_ in answer["refused"]
            for offset in range(first, last + 1)
        }
        for delivery, outcome in under.said:
            if delivery.place in refused:
                self.history.refused(delivery, now_ns)
            elif outcome == "renew":
                continue
            elif outcome != "release":
                self.history.kept(delivery, under.asked_ns, now_ns)
            if self.held.get(delivery.place) is delivery:
                del self.held[delivery.place]
        lock_ns = answer.get("lock_ms", 0) * MS
        for is_dead, runs in ((False, "acquired"), (True, "dead")):
            for topic_id, partition, first, last, count in answer.get(runs, ()):
                assert topic_id == self.topic_id
                for offset in range(first, last + 1):
                    place = Place(partition, offset)
                    delivery = Delivery(
                        place,
                        self.member_id,
                        count,
                        is_dead,
                        under.asked_ns,
                        now_ns,
                        under.asked_ns + lock_ns,
                    )
                    self.history.given(delivery)
                    self.held[place] = delivery

    # ---- when it has something to do -------------------------------------------------------------

    def next_wake_ns(self, now_ns: int) -> int:
        del now_ns
        times = [self.connection.next_tick_ns()]
        if not self.is_asking:
            times.append(self.next_heartbeat_ns)
        if self.epoch and not self.is_sent:
            times.append(self.next_request_ns)
        return min((time_ns for time_ns in times if time_ns is not None), default=1 << 62)

    def has_input(self) -> bool:
        socket: Any = self.connection._socket
        return socket is not None and bool(socket.link.to_client)


def _runs(said: Iterable[tuple[Delivery, str]]) -> list[list[Any]]:
    """[partition, first, last, outcome], neighbours together."""
    runs: list[list[Any]] = []
    for delivery, outcome in sorted(said, key=lambda each: each[0].place):
        partition, offset = delivery.place
        if (
            runs
            and runs[-1][0] == partition
            and runs[-1][2] == offset - 1
            and runs[-1][3] == outcome
        ):
            runs[-1][2] = offset
        else:
            runs.append([partition, offset, offset, outcome])
    return runs


def share_members(world: World, rng: random.Random, history: QueueHistory) -> list[ShareActor]:
    """Those of one group."""
    return [
        ShareActor(
            f"s{number}",
            world,
            rng,
            history,
            Connection(ADDRESS, f"s{number}", world.runtime),
            rng.choice((0.2, 0.6, 0.9)),
        )
        for number in range(rng.choice((1, 2, 3, 3)))
    ]


def partitions_of_queue(world: World) -> dict[int, dict[str, Any]]:
    """Partition -> what the group says of it."""
    connection = Connection(ADDRESS, "check", world.runtime)
    try:
        request = {"group": GROUP, "part": "partitions", "after": None}
        answer = call_json_now(
            connection, Api.DESCRIBE_GROUP, request, timeout_ms=60 * SECOND // MS
        )
    except UnknownGroupError:  # nobody has joined yet
        return {}
    finally:
        connection.close()
    return {row["partition"]: row for row in answer["partitions"]}
