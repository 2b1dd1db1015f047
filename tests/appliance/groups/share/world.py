"""Share groups without processes: a catalog that tests write, a store in a file, requests that are
committed or rolled back.
"""

from __future__ import annotations

import pathlib
from typing import Any

import orjson

from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.messages import Push, Requester, SessionKey, TopicView
from appliance.groups.share.share_service import ShareService
from appliance.groups.store.group_store import GroupStore
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import StorageError, TailraceError, error_for
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import FakeTopicImage, settings_of

S = 1_000_000_000
MS = 1_000_000


class Topics(FakeTopicImage):
    """Topics with ends and beginnings of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.start_offsets: dict[tuple[str, int], int | None] = {}

    def make(
        self, name: str, partitions: int = 1, topic_id: str = "", end: int = 0, **settings: Any
    ) -> str:
        """Make a topic, or change it; returns its id."""
        topic_id = topic_id or name.encode().hex().ljust(32, "0")[:32]
        self.views[name] = TopicView(name, topic_id, partitions, settings_of(settings))
        for number in range(partitions):
            self.ends.setdefault((topic_id, number), end)
            self.start_offsets.setdefault((topic_id, number), 0)
        return topic_id

    def beginning_offset(self, topic_id: str, partition: int) -> int | None:
        return self.start_offsets.get((topic_id, partition))


class World:
    """Share groups in a step of their own for each request."""

    def __init__(
        self, directory: pathlib.Path, limits: GroupLimits | None = None, answer_max: int = 1 << 20
    ) -> None:
        self.path = str(directory / "groups.db")
        self.topics = Topics()
        self.limits = limits or GroupLimits()
        self.answer_max = answer_max
        self.now_ns = 1_000 * S
        self.pushes: list[Push] = []
        self.store: GroupStore
        self.groups: ShareService
        self.start()

    def start(self) -> None:
        """The process begins anew, with what is on the disk."""
        self.store = GroupStore(self.path)
        self.groups = ShareService(
            self.store,
            self.topics,
            self.limits,
            self.answer_max,
            self.now_ns,
            lambda: self.now_ns // 1_000,
        )
        self.store.before_commit.append(self.groups.settle)

    def restart(self) -> None:
        """The process is killed: what was not committed is gone."""
        self.store.close()
        self.start()

    def close(self) -> None:
        self.store.close()

    def request(
        self, api: Api, request: dict[str, Any], session: int = 1, *, is_killed: bool = False
    ) -> dict[str, Any]:
        """A request, its commit, its answer. `is_killed`: before the answer goes out. Raises what
        the answer says.
        """
        self.groups.handle(Requester(0, session, 1), api, request, self.now_ns)
        return self.commit(is_killed=is_killed)

    def commit(self, *, is_killed: bool = False) -> dict[str, Any]:
        """The end of a step; returns the answer of the last request in it."""
        try:
            self.store.commit()
        except TailraceError as error:
            self.store.rollback()
            self.groups.rolled_back(self.now_ns, error)
        if is_killed:
            self.restart()
            raise error_for(ErrorCode.NOT_READY, "killed")
        answers = self.groups.drain_answers()
        self.pushes += self.groups.drain_pushes()
        if not answers:
            return {}
        body: dict[str, Any] = orjson.loads(answers[-1].body)
        if answers[-1].code:
            raise error_for(code_of(answers[-1].code), body["message"])
        return body

    def failing_commit(self, api: Api, request: dict[str, Any], session: int = 1) -> None:
        """A request whose commit fails: it must be answered so."""

        def fail() -> None:
            raise StorageError("the disk is gone")

        self.store.before_commit.append(fail)
        try:
            self.request(api, request, session)
        except StorageError:
            return
        finally:
            self.store.before_commit.remove(fail)
        raise AssertionError("a request was answered whose commit had failed")

    def advance(self, duration_ns: int) -> None:
        """Time passes."""
        self.now_ns += duration_ns
        self.groups.step(self.now_ns)
        self.commit()

    def join(self, group: str, member: str, *topics: str, session: int = 1, **more: Any) -> Member:
        return Member(self, group, member, topics, session, more)

    def close_session(self, session: int) -> None:
        self.groups.session_closed(SessionKey(0, session), self.now_ns)
        self.commit()

    def change_topics(self) -> None:
        self.groups.topics_changed(self.now_ns)
        self.commit()


class Member:
    """A member, as its client sees it."""

    def __init__(
        self,
        world: World,
        group: str,
        member_id: str,
        topics: tuple[str, ...],
        session: int,
        more: dict[str, Any],
    ) -> None:
        self.world, self.group, self.member_id, self.session = world, group, member_id, session
        request = {
            "group": group,
            "kind": "share",
            "member_id": member_id,
            "member_epoch": 0,
            "topics": list(topics),
            **more,
        }
        answer = world.request(Api.GROUP_HEARTBEAT, request, session)
        self.epoch: int = answer["member_epoch"]
        self.topic_names: dict[str, str] = answer["topic_names"]
        self.sequence = 0

    def named(self, **fields: Any) -> dict[str, Any]:
        return {
            "group": self.group,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            **fields,
        }

    def heartbeat(self, epoch: int | None = None) -> dict[str, Any]:
        return self.world.request(
            Api.GROUP_HEARTBEAT,
            self.named(kind="share", **({} if epoch is None else {"member_epoch": epoch})),
            self.session,
        )

    def acquire_request(
        self, count: int, *acknowledge: tuple[str, int, int, int, str]
    ) -> dict[str, Any]:
        self.sequence += 1
        return self.named(
            max_records=count,
            acknowledge=[list(each) for each in acknowledge],
            sequence=self.sequence,
        )

    def acquire(self, count: int, *acknowledge: tuple[str, int, int, int, str]) -> dict[str, Any]:
        return self.world.request(
            Api.SHARE_ACQUIRE, self.acquire_request(count, *acknowledge), self.session
        )

    def acknowledge(self, *given: tuple[str, int, int, int, str]) -> list[list[Any]]:
        self.sequence += 1
        request = self.named(acknowledge=[list(each) for each in given], sequence=self.sequence)
        refused: list[list[Any]] = self.world.request(Api.SHARE_ACKNOWLEDGE, request, self.session)[
            "refused"
        ]
        return refused
