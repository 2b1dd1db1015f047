"""A group service on a real database with a fake clock, and members as a client library would
behave.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from appliance.groups.agent.service import GroupService
from appliance.groups.base.assignor_plugins import Assignors
from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.messages import (
    GroupFailure,
    LogExtent,
    Partition,
    Push,
    Requester,
    SessionKey,
    TopicView,
)
from appliance.groups.share.share_service import ShareService
from appliance.groups.store.group_store import GroupStore
from tailrace.core.errors import TailraceError
from tailrace.protocol.frame import Api

SECOND_NS = 1_000_000_000
START_US = 1_700_000_000_000_000
SOMEBODY = SessionKey(0, 1)


class FakeTopicImage:
    """A TopicImage of the topics and ends that a test sets."""

    def __init__(self) -> None:
        self.views: dict[str, TopicView] = {}
        self.ends: dict[Partition, int | None] = {}
        self.high_watermarks: dict[Partition, int] = {}

    def by_name(self, name: str) -> TopicView | None:
        return self.views.get(name)

    def by_id(self, topic_id: str) -> TopicView | None:
        return next((view for view in self.views.values() if view.topic_id == topic_id), None)

    def topics(self) -> Iterable[TopicView]:
        return self.views.values()

    def end_offset(self, topic_id: str, partition: int) -> int | None:
        return self.ends.get((topic_id, partition))

    def beginning_offset(self, topic_id: str, partition: int) -> int | None:
        return 0

    def kept(self) -> tuple[str, ...]:
        return ()

    def high_watermark(self, topic_id: str, partition: int) -> int | None:
        return self.high_watermarks.get((topic_id, partition), self.end_offset(topic_id, partition))

    def extent(self, topic_id: str, partition: int) -> LogExtent | None:
        beginning, end, high_watermark = (
            self.beginning_offset(topic_id, partition),
            self.end_offset(topic_id, partition),
            self.high_watermark(topic_id, partition),
        )
        return (
            None
            if beginning is None or end is None or high_watermark is None
            else LogExtent(beginning, end, high_watermark)
        )


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """Settings by their names, of keywords."""
    return {key.replace("_", "."): value for key, value in given.items()}


class FakeTopics(FakeTopicImage):
    """Topics that a test makes, grows and deletes."""

    def __init__(self, **counts: int) -> None:
        super().__init__()
        self._made = itertools.count(1)
        self.default_end: int | None = 1_000
        for name, count in counts.items():
            self.create(name, count)

    def create(self, name: str, count: int, **settings: Any) -> str:
        topic_id = f"{next(self._made):032x}"
        self.views[name] = TopicView(name, topic_id, count, settings_of(settings))
        return topic_id

    def grow(self, name: str, count: int) -> None:
        self.views[name] = replace(self.views[name], partition_count=count)

    def set(self, name: str, **settings: Any) -> None:
        self.views[name] = replace(self.views[name], settings=settings_of(settings))

    def delete(self, name: str) -> None:
        del self.views[name]

    def id_of(self, name: str) -> str:
        return self.views[name].topic_id

    def end_offset(self, topic_id: str, partition: int) -> int | None:
        return self.ends.get((topic_id, partition), self.default_end)


class Refused(Exception):
    """An answer with an error code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message


class Bench:
    """The service with its clock: what the process around it does, without the process."""

    def __init__(
        self, path: Path, topics: FakeTopics | None = None, limits: GroupLimits | None = None, *,
        answer_max: int = 1 << 18,
        assignors: Assignors | None = None, with_share: bool = False,
    ) -> None:  # fmt: skip
        self.with_share = with_share
        self.path = path / "groups.db"
        self.topics = FakeTopics(orders=4) if topics is None else topics
        self.limits = GroupLimits() if limits is None else limits
        self.answer_max = answer_max
        self.now_ns = 50 * SECOND_NS
        self.clock_ahead_us = 0
        """Time by which an operator, or NTP, has set the wall clock forward."""
        self.pushes: list[Push] = []
        self.failures = 0
        self._assignors = Assignors(()) if assignors is None else assignors
        self._correlation = itertools.count(1)
        self._open()

    def _open(self) -> None:
        self.store = GroupStore(str(self.path))
        made = self.store, self.topics, self.limits, self.answer_max, self.now_ns, self.wall_us
        self.service = GroupService(
            *made, share=ShareService(*made) if self.with_share else None, assignors=self._assignors
        )
        self.finish_step()

    def wall_us(self) -> int:
        return START_US + self.now_ns // 1_000 + self.clock_ahead_us

    def restart(self) -> None:
        """As after SIGKILL: what was not committed is gone."""
        self.store.close()
        self._open()

    def close(self) -> None:
        self.store.close()

    def finish_step(self) -> dict[int, Any]:
        """Commit, and take what is to be sent: correlation id -> answer, or Refused."""
        try:
            self.service.step(self.now_ns)
            self.store.commit()
        except (TailraceError, GroupFailure) as error:
            self.failures += 1
            self.store.rollback()
            if isinstance(error, GroupFailure):
                self.service.rolled_back(self.now_ns, TailraceError(repr(error.error)), error.group)
            else:
                self.service.rolled_back(self.now_ns, error)
        found: dict[int, Any] = {}
        for answer in self.service.drain_answers():
            assert len(answer.body) <= self.answer_max
            assert answer.requester.correlation_id not in found, "a request has one answer"
            body = orjson.loads(answer.body)
            found[answer.requester.correlation_id] = (
                body if answer.code == 0 else Refused(answer.code, body["message"])
            )
        self.pushes += self.service.drain_pushes()
        return found

    def send(self, api: int, request: dict[str, Any], session: SessionKey = SOMEBODY) -> int:
        """Give a request to the service; the step goes on. Raises TailraceError."""
        correlation_id = next(self._correlation)
        request = orjson.loads(orjson.dumps(request))
        self.service.handle(Requester(*session, correlation_id), api, request, self.now_ns)
        return correlation_id

    def ask(self, api: int, session: SessionKey = SOMEBODY, **request: Any) -> Any:
        """One request in a step of its own. Raises TailraceError, Refused."""
        try:
            correlation_id = self.send(api, request, session)
        except TailraceError:
            self.finish_step()
            raise
        answer = self.finish_step()[correlation_id]
        if isinstance(answer, Refused):
            raise answer
        return answer

    def wait(self, seconds: float) -> None:
        """Let time pass, in steps as long as the service wants to sleep."""
        end_ns = self.now_ns + int(seconds * SECOND_NS)
        while self.now_ns < end_ns:
            deadline_ns = self.service.next_deadline_ns()
            self.now_ns = (
                end_ns
                if deadline_ns is None
                else min(end_ns, max(deadline_ns, self.now_ns + 1_000_000))
            )
            self.finish_step()

    def offset(self, group: str, topic: str, partition: int) -> int:
        found = self.ask(Api.FETCH_OFFSETS, group=group, partitions=[[topic, partition]])
        return int(found["offsets"][0][2])

    def summary(self, group: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(Api.DESCRIBE_GROUP, group=group, part="members")["group"]
        return found


class Client:
    """A member: what it knows is what answers told it."""

    def __init__(
        self, bench: Bench, group: str = "billing", member_id: str = "m1",
        topics: Iterable[str] = ("orders",), *, session: int | None = None, **more: Any
    ) -> None:  # fmt: skip
        self.bench = bench
        self.group = group
        self.member_id = member_id
        self.topics = list(topics)
        self.more = more
        self.session = SessionKey(0, abs(hash(member_id)) if session is None else session)
        self.epoch = 0
        self.owned: set[Partition] = set()
        self.is_to_report = True
        self.reported = False
        self.names: dict[str, str] = {}
        self.last: dict[str, Any] = {}

    def request(self) -> dict[str, Any]:
        request: dict[str, Any] = {
            "group": self.group,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            **self.more,
        }
        if self.epoch == 0:
            self.owned = set()
            request["topics"] = self.topics
        request["owned"] = self.owned_by_topic() if self.is_to_report or self.epoch == 0 else None
        self.reported = request["owned"] is not None
        self.is_to_report = False
        return request

    def owned_by_topic(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for topic_id, partition in sorted(self.owned):
            found.setdefault(topic_id, []).append(partition)
        return found

    def heartbeat(self, **more: Any) -> dict[str, Any]:
        """One heartbeat in a step of its own, and what it brings. Raises TailraceError, Refused."""
        try:
            answer = self.bench.ask(Api.GROUP_HEARTBEAT, self.session, **{**self.request(), **more})
        except (TailraceError, Refused):
            self.is_to_report = True
            raise
        self.take(answer)
        found: dict[str, Any] = answer
        return found

    def take(self, answer: dict[str, Any]) -> None:
        self.last = answer
        self.epoch = answer["member_epoch"]
        if "assignment" in answer:
            before, was_said = self.owned, self.reported
            self.owned = {
                (topic_id, partition)
                for topic_id, partitions in answer["assignment"].items()
                for partition in partitions
            }
            self.names.update(answer.get("topic_names", {}))
            self.is_to_report = not was_said or self.owned != before

    def leave(self, epoch: int = -1) -> None:
        self.bench.ask(
            Api.GROUP_HEARTBEAT,
            self.session,
            group=self.group,
            member_id=self.member_id,
            member_epoch=epoch,
        )

    def commit(self, *offsets: list[Any]) -> list[Any]:
        """Returns what was refused. Raises TailraceError, Refused."""
        found: list[Any] = self.bench.ask(
            Api.COMMIT_OFFSETS,
            self.session,
            group=self.group,
            member_id=self.member_id,
            member_epoch=self.epoch,
            offsets=list(offsets),
        )["refused"]
        return found

    @property
    def partitions(self) -> list[tuple[str, int]]:
        return sorted((self.names[topic_id], partition) for topic_id, partition in self.owned)


def settle(*clients: Client) -> None:
    """Heartbeats until all have what they are to have."""
    for _ in range(20):
        before = [(one.epoch, frozenset(one.owned), one.is_to_report) for one in clients]
        for one in clients:
            one.heartbeat()
        if before == [(one.epoch, frozenset(one.owned), one.is_to_report) for one in clients]:
            return
    raise AssertionError("the members do not come to rest")
