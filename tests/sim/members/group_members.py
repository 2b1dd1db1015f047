"""Programs of a schedule that are members of a consumer group, and what the group has promised
them.

They know the protocol and nothing of the SDK: heartbeats that carry what they own, commits,
leaving, joining again when they are told that they are unknown.

Owner: one `tests.sim.schedule.Schedule`.
Invariants: of a member that was given a partition, commits are taken until another one is given it,
    and none that was sent later; what was committed and answered is there at the end, or something
    that was sent behind it; at rest every partition has one owner.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_json_now
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response
from tests.sim.actors import TOPIC, Inbox
from tests.sim.machine.machine_parts import ADDRESS, MS, SECOND
from tests.sim.machine.world import World

GROUP = "g"
HEARTBEAT_NS = 500 * MS
SESSION_TIMEOUT_MS = 10_000
_LATER = (
    ErrorCode.NOT_READY,
    ErrorCode.TIMED_OUT,
    ErrorCode.STORAGE_ERROR,
    ErrorCode.DISK_FULL,
    ErrorCode.TOO_MANY_REQUESTS,
)
_ANEW = (ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER)


@dataclass(slots=True)
class Sent:
    """A commit. `is_answered`: with OK; None: not known."""

    partition: int
    text: str
    number: int
    is_kept: bool | None = None


@dataclass(slots=True)
class GroupHistory:
    """Messages that all members of the group have been told."""

    partitions: int
    commits: list[Sent] = field(default_factory=list)
    owner: dict[int, tuple[int, str, int]] = field(default_factory=dict)
    """partition -> (epoch, member, how many commits had been sent) of the last time that one was
    given it.
    """

    def given(self, partition: int, member: str, epoch: int) -> None:
        """A member has heard that it has a partition now."""
        known = self.owner.get(partition)
        if known is None or known[0] <= epoch:
            self.owner[partition] = epoch, member, len(self.commits)

    def kept(self, sent: Sent, member: str) -> None:
        """A commit was answered with OK."""
        sent.is_kept = True
        _, owner, given_at = self.owner[sent.partition]
        assert owner == member or sent.number < given_at, (
            f"{member} has committed {sent.text} for partition {sent.partition}, which {owner} "
            "had been given before"
        )

    def check(self, found: dict[int, str]) -> None:
        """`found`: partition -> the text of what the group has committed there."""
        for partition in range(self.partitions):
            sent = [commit for commit in self.commits if commit.partition == partition]
            last_kept = max(
                (number for number, commit in enumerate(sent) if commit.is_kept), default=None
            )
            allowed = {
                commit.text
                for commit in sent[0 if last_kept is None else last_kept :]
                if commit.is_kept is not False
            }
            if last_kept is None:
                assert found.get(partition) in {None, *allowed}, (
                    f"partition {partition}: {found[partition]} was refused, or never sent"
                )
            else:
                assert found.get(partition) in allowed, (
                    f"partition {partition}: {found.get(partition)} is there, and "
                    f"{sent[last_kept]} was answered"
                )


@dataclass(slots=True)
class MemberActor:
    """One member."""

    name: str
    world: World
    rng: random.Random
    history: GroupHistory
    connection: Connection
    member_id: str = ""
    epoch: int = 0
    owned: dict[str, list[int]] = field(default_factory=dict)
    is_asking: bool = False
    is_committing: bool = False
    next_heartbeat_ns: int = 0
    is_reported: bool = False
    """True if the group knows what it owns."""
    inbox: Inbox = field(default_factory=Inbox)

    def turn(self) -> None:
        self.pump()
        if self.rng.random() < 0.01 and self.epoch and not self.is_asking:
            self._heartbeat(leaves=True)
        elif self.rng.random() < 0.3 and self.partitions and not self.is_committing:
            self._commit(self.rng.choice(self.partitions))

    @property
    def partitions(self) -> list[int]:
        return [partition for partitions in self.owned.values() for partition in partitions]

    @property
    def is_settled(self) -> bool:
        """True if the group knows what the member has."""
        return self.epoch > 0 and self.is_reported and not self.is_asking

    def pump(self) -> None:
        self.connection.process()
        self.connection.tick(self.connection.now_ns())
        self.inbox.handle()
        if not self.is_asking and self.connection.now_ns() >= self.next_heartbeat_ns:
            self._heartbeat()

    def _heartbeat(self, *, leaves: bool = False) -> None:
        if not self.epoch:
            self.member_id = f"{self.rng.getrandbits(128):032x}"
        request: dict[str, Any] = {
            "group": GROUP,
            "member_id": self.member_id,
            "member_epoch": -1 if leaves else self.epoch,
        }
        if not self.is_reported:
            request["owned"] = self.owned
        if not self.epoch:
            request |= {
                "kind": "consumer", "topics": [TOPIC], "session_timeout_ms": SESSION_TIMEOUT_MS,
                "rebalance_timeout_ms": 60_000,
                "heartbeat_interval_ms": 500, "client_id": self.name,
            }  # fmt: skip
        self.is_asking = self.connection.request(
            Api.GROUP_HEARTBEAT,
            [requests.encode_json(request)],
            self.inbox.later(lambda response: self._on_heartbeat(response, leaves)),
        )
        self.next_heartbeat_ns = self.connection.now_ns() + HEARTBEAT_NS

    def _on_heartbeat(self, response: Response | None, leaves: bool) -> None:
        self.is_asking = False
        has_said, self.is_reported = not self.is_reported, False
        if leaves or (response is not None and response.code in _ANEW):
            self.epoch, self.owned = 0, {}
        elif response is not None and response.code is ErrorCode.OK:
            self._take_up(requests.decode_json(response.body[0]), has_said)
        else:
            assert response is None or response.code in _LATER, (response.code, response.detail())

    def _take_up(self, answer: dict[str, Any], has_said: bool) -> None:
        """`has_said`: whether the heartbeat told what it owned then, which is what it owns now."""
        assert answer["member_id"] == self.member_id
        assert answer["member_epoch"] >= self.epoch, "epochs do not go back"
        self.epoch = answer["member_epoch"]
        before = set(self.partitions)
        self.owned = answer.get("assignment", self.owned)
        for partition in set(self.partitions) - before:
            self.history.given(partition, self.member_id, self.epoch)
        if "assignment" not in answer or (has_said and set(self.partitions) == before):
            self.is_reported = True
        else:
            self.next_heartbeat_ns = 0

    def _commit(self, partition: int) -> None:
        number = len(self.history.commits)
        sent = Sent(partition, f"{self.name}-{number}", number)
        body = {
            "group": GROUP,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "offsets": [[TOPIC, partition, 0, -1, sent.text]],
        }
        member = self.member_id

        def on_response(response: Response | None) -> None:
            self.is_committing = False
            if response is not None and response.code is ErrorCode.OK:
                if requests.decode_json(response.body[0])["refused"]:
                    sent.is_kept = False
                else:
                    self.history.kept(sent, member)
            elif response is not None and response.code not in _LATER:
                assert response.code in _ANEW, (response.code, response.detail())
                sent.is_kept = False

        self.is_committing = self.connection.request(
            Api.COMMIT_OFFSETS, [requests.encode_json(body)], self.inbox.later(on_response)
        )
        if self.is_committing:
            self.history.commits.append(sent)

    def next_wake_ns(self, now_ns: int) -> int:
        del now_ns
        tick_ns = self.connection.next_tick_ns()
        return (
            min(self.next_heartbeat_ns, self.next_heartbeat_ns if tick_ns is None else tick_ns)
            if not self.is_asking
            else tick_ns or 1 << 62
        )

    def has_input(self) -> bool:
        socket: Any = self.connection._socket
        return socket is not None and bool(socket.link.to_client)


def members(world: World, rng: random.Random, partitions: int) -> list[MemberActor]:
    """Those of one group."""
    history = GroupHistory(partitions)
    return [
        MemberActor(
            f"m{number}", world, rng, history, Connection(ADDRESS, f"m{number}", world.runtime)
        )
        for number in range(rng.randint(1, 3))
    ]


def are_settled(actors: Sequence[MemberActor]) -> bool:
    """True if every partition has one owner, and all members know it."""
    if not all(actor.is_settled for actor in actors):
        return False
    owned = sorted(partition for actor in actors for partition in actor.partitions)
    return owned == list(range(actors[0].history.partitions))


def committed(world: World) -> dict[int, str]:
    """Partition -> the text of what the group has committed there."""
    connection = Connection(ADDRESS, "check", world.runtime)
    try:
        answer = call_json_now(
            connection,
            Api.FETCH_OFFSETS,
            {"group": GROUP, "partitions": None},
            timeout_ms=60 * SECOND // MS,
        )
    finally:
        connection.close()
    return {
        partition: text for _, partition, offset, _, text, _ in answer["offsets"] if offset >= 0
    }
