"""The agent of the process of groups without processes and files around it: lanes in memory, and a
service that does as it is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from appliance.groups.agent.agent import GroupsAgent
from appliance.groups.agent.front_link import FrontLink
from appliance.groups.agent.transaction import Opened
from appliance.groups.base.messages import Answer, Push, Requester, SessionKey
from appliance.groups.base.topic_image import CatalogTopicImage
from shm.memory.layout import (
    ControlLayout,
    LaneLayout,
    ProcessWord,
    RegionKind,
    Role,
    SlotState,
    TableLayout,
)
from shm.memory.region import Region
from shm.messages.lane_messages import Assignment, LaneKind
from shm.queues.lane import LaneReader, LaneWriter
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.control import Control
from shm.tables.partition_table import PartitionState, PartitionTable
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import InvalidRequestError, StorageError, TailraceError
from tailrace.protocol.frame import Api
from tests.kit.memory import simulated
from tests.kit.stepped.fronts import SilentBell

SECOND_NS = 1_000_000_000
SLOTS = 16


class ToldStore:
    """A store whose disk refuses when it is told to."""

    def __init__(self) -> None:
        self.before_commit: list[Callable[[], None]] = []
        self.written: list[Any] = []
        self.committed: list[list[Any]] = []
        self.failure: TailraceError | None = None
        self.late_failure: Exception | None = None
        """Error of what follows a commit."""
        self.is_ahead = False
        self.is_closed = False

    @property
    def is_in_transaction(self) -> bool:
        return bool(self.written)

    def commit(self) -> None:
        for write in self.before_commit:
            write()
        if self.written and self.failure is not None:
            raise self.failure
        if any("invalid" in row for row in self.written):
            raise InvalidRequestError("a number that cannot be")
        if self.written:
            self.committed.append(self.written)
            self.written = []
            if self.late_failure is not None:
                self.is_ahead = True
                raise self.late_failure

    def rollback(self) -> None:
        self.written = []

    def close(self) -> None:
        self.is_closed = True


class ToldService:
    """COMMIT_OFFSETS writes its body; a request with "raise" fails, one with "push" pushes, one
    with "size" has an answer of so many bytes, one with "invalid" cannot be committed.
    """

    def __init__(self, store: ToldStore) -> None:
        self.store = store
        self.answers: list[Answer] = []
        self.pushes: list[Push] = []
        self.closed: list[SessionKey] = []
        self.topics_changes = 0
        self.timer_failure: Exception | None = None
        self.reload_failure: Exception | None = None
        self.deadline_ns: int | None = None
        self.steps = 0
        self.last_request_ns = 0

    def handle(self, requester: Requester, api: int, request: dict[str, Any], now_ns: int) -> None:
        if "raise" in request:
            raise RuntimeError(request["raise"])
        if "refuse" in request:
            raise TailraceError(request["refuse"], ErrorCode.INVALID_GROUP)
        if api == Api.COMMIT_OFFSETS:
            self.store.written.append(request)
        if "push" in request:
            self.pushes.append(
                Push(requester.front, requester.session, Api.GROUP_HEARTBEAT, b'{"group":"g"}')
            )
        self.answers.append(
            Answer(
                requester,
                0,
                b"x" * request["size"] if "size" in request else orjson.dumps({"done": request}),
            )
        )

    def session_closed(self, session: SessionKey, now_ns: int, *, with_front: bool = False) -> None:
        self.closed.append(session)

    def limits_changed(self) -> None: ...

    def topics_changed(self, now_ns: int) -> None:
        self.topics_changes += 1

    def step(self, now_ns: int, last_request_ns: int) -> None:
        self.steps += 1
        self.last_request_ns = last_request_ns
        if self.timer_failure is not None:
            raise self.timer_failure

    def next_deadline_ns(self) -> int | None:
        return self.deadline_ns

    def drain_answers(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        return answers

    def drain_pushes(self) -> list[Push]:
        pushes, self.pushes = self.pushes, []
        return pushes

    def rolled_back(self, now_ns: int, error: TailraceError, group: str | None = None) -> None:
        if self.reload_failure is not None:
            raise self.reload_failure
        for answer in self.answers:
            answer.code, answer.body, answer.is_undone = (
                int(error.code),
                orjson.dumps({"message": error.detail}),
                True,
            )
        self.pushes = []


class AgentWorld:
    """The agent, with both ends of its lanes."""

    def __init__(self, fronts: int = 1, lane_bytes: int = 1 << 16, *, is_fed: bool = True) -> None:
        def lane() -> Region:
            return simulated(RegionKind.LANE, LaneLayout(lane_bytes).size, lane_bytes)

        control = Control(simulated(RegionKind.CONTROL, ControlLayout().size, 0))
        self.slot = control.process(Role.GROUPS, 0)
        self.slot.store(ProcessWord.GENERATION, 1)
        self.front_slots = [control.process(Role.FRONT, f) for f in range(fronts)]
        controller, to_it, from_it = (
            lane(),
            [lane() for _ in range(fronts)],
            [lane() for _ in range(fronts)],
        )
        self.controller = LaneWriter(controller)
        self.ask_lanes, self.answer_lanes = (
            [LaneWriter(region) for region in to_it],
            [LaneReader(region) for region in from_it],
        )
        self.table = PartitionTable(simulated(RegionKind.TABLE, TableLayout(SLOTS).size, SLOTS))
        self.store, self.service = ToldStore(), ToldService(ToldStore())
        self.refusal: TailraceError | None = None
        self.opened_count = 0
        self.is_ready = False
        self.on_clock: Callable[[], None] = lambda: None
        """Called at each look at the clock: between the controller's lane and the fronts'."""
        self.request_ns = 0
        """Time that each look at the clock takes."""
        self.is_running = True
        """True if the logs are recovered."""
        self.now_ns = SECOND_NS
        self.due_ns: int | None = None
        """Time at which the agent wants its next step."""
        links = [
            FrontLink(f, LaneReader(to_it[f]), LaneWriter(from_it[f]), SilentBell(),
            lambda f=f: self.front_slots[f].load(ProcessWord.READY_GENERATION))  # type: ignore[misc]
            for f in range(fronts)
        ]  # fmt: skip
        self.agent = GroupsAgent(
            open_service=self._open, topics=CatalogTopicImage([self.table]),
            from_controller=LaneReader(controller), fronts=links, generation=1,
            slot=self.slot, error_handler=CountedErrorHandler(self.slot),
            is_running=lambda: self.is_running, on_ready=self._ready,
            monotonic_ns=self._monotonic_ns, start_ns=self.now_ns,
        )  # fmt: skip
        if is_fed:
            self.feed()
            self.step()

    def _monotonic_ns(self) -> int:
        self.on_clock()
        self.now_ns += self.request_ns
        return self.now_ns

    def _ready(self) -> None:
        self.is_ready = True

    def _open(self, _topics: CatalogTopicImage, _now_ns: int) -> Opened:
        if self.refusal is not None:
            raise self.refusal
        self.opened_count += 1
        self.store = ToldStore()
        self.service = ToldService(self.store)
        return self.store, self.service

    def feed(self, generation: int = 1) -> None:
        assert self.controller.try_write(LaneKind.FED, 0, 0, 0, generation, 0, ())
        self.controller.commit()

    def tell(self, assignment: Assignment) -> None:
        assert self.controller.try_write(LaneKind.ASSIGN, 0, 0, 0, 0, 0, (assignment.encode(),))
        self.controller.commit()

    def set_log(
        self,
        assignment: Assignment,
        start: int,
        high_watermark: int,
        state: SlotState = SlotState.ONLINE,
    ) -> None:
        """Set the partition table's words about a partition."""
        empty = PartitionState.empty(
            assignment.topic_id, assignment.partition, state, assignment.version
        )
        self.table.write(
            assignment.slot,
            empty._replace(
                log_start_offset=start,
                high_watermark=high_watermark,
                log_end_offset=high_watermark,
                last_stable_offset=high_watermark,
            ),
        )

    def put(
        self,
        kind: LaneKind,
        word: int,
        correlation_id: int = 0,
        api: int = 0,
        body: bytes = b"",
        front: int = 0,
    ) -> None:
        lane = self.ask_lanes[front]
        assert lane.try_write(
            kind, api, 0, word, correlation_id, self.now_ns, (body,) if body else ()
        )
        lane.commit()

    def ask(
        self,
        api: int,
        value: dict[str, Any],
        *,
        word: int = 1 << 32,
        correlation_id: int = 1,
        front: int = 0,
    ) -> None:
        self.put(LaneKind.REQUEST, word, correlation_id, api, orjson.dumps(value), front)

    def step(self, seconds: float = 0) -> int:
        """Step as the runner does, then sleep until the agent wants the next step; `seconds` is how
        long the sleep before was.
        """
        self.now_ns += int(seconds * SECOND_NS)
        work = self.agent.step(self.now_ns)
        if not work or not self.agent.has_more():
            self.due_ns = self.agent.next_deadline_ns()
        return work

    def heard(self, front: int = 0) -> list[tuple[LaneKind, int, int, ErrorCode, bytes]]:
        """(kind, session word, correlation id, code, body) of what a front was sent since."""
        lane = self.answer_lanes[front]
        found = []
        while (message := lane.peek()) is not None:
            code = code_of(message.flags)
            found.append(
                (
                    LaneKind(message.kind),
                    message.session,
                    message.correlation_id,
                    code,
                    bytes(message.payload),
                )
            )
            lane.advance(message)
            lane.consume()
        return found

    def codes(self) -> dict[int, ErrorCode]:
        """Correlation id -> code of the answers that came since."""
        return {
            correlation_id: code
            for kind, _, correlation_id, code, _ in self.heard()
            if kind is LaneKind.RESPONSE
        }


def broken_disk() -> StorageError:
    return StorageError("the disk refuses")
