"""The scheduler's boundaries: what goes wrong in one partition or request costs no other, and a
message is not read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

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
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneMessage, LaneReader, LaneWriter
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.control import Control
from shm.tables.partition_table import PartitionState, PartitionTable
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api
from tests.kit import memory
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from tests.kit.stepped.delays import BEGIN_US, DelayWorld
from workers.delays import scheduler as module
from workers.delays.scheduler import FrontLink, Scheduler, WorkerLink

SECOND_NS = 1_000_000_000


def lane() -> Region:
    return memory.simulated(RegionKind.LANE, LaneLayout(1 << 17).size, 1 << 17)


class Running:
    """A scheduler of several delay logs without files, over simulated memory."""

    def __init__(self, names: list[str], *, are_logs_made: bool = True) -> None:
        regions = {name: lane() for name in ("controller", "worker", "requests", "answers")}
        self.slot = Control(memory.simulated(RegionKind.CONTROL, ControlLayout().size, 0)).process(
            Role.SCHEDULER, 0
        )
        self.bell = Doorbell.create()
        self.ask_lane, self.answers = (
            LaneWriter(regions["requests"]),
            LaneReader(regions["answers"]),
        )
        self.feed = LaneWriter(regions["controller"])
        files = self.files = SimFiles(SimDisk())
        self.logs: list[Assignment] = []
        self.table = PartitionTable(memory.simulated(RegionKind.TABLE, TableLayout(16).size, 16))
        for name in names:
            self._assign(name)
        assert self.feed.try_write(LaneKind.FED, 0, 0, 0, 1, 0, (b"",))
        self.feed.commit()
        self.now_ns = SECOND_NS
        self.scheduler = Scheduler(
            files=files, data_dirs=["/data"],
            tables=[self.table],
            from_controller=LaneReader(regions["controller"]), generation=1, workers={},
            connect_worker=lambda _: WorkerLink(LaneWriter(regions["worker"]), self.bell),
            fronts=[FrontLink(LaneReader(regions["requests"]), LaneWriter(regions["answers"]),
            self.bell)], is_running=lambda: True,
            wall_us=lambda: BEGIN_US, on_ready=lambda: None, incarnations=itertools.count(1),
            error_handler=CountedErrorHandler(self.slot),
            start_ns=self.now_ns,
        )  # fmt: skip

        if are_logs_made:
            self.make_logs()

    def _assign(self, name: str) -> None:
        number, world = len(self.logs), DelayWorld(0)
        topic_id, log_id = bytes([number]) * 16, bytes([number + 100]) * 16
        self.files.make_directory(f"/data/{name}@delay-0")
        topic = replace(
            world.topic, topic=name, topic_id=topic_id, slot=2 * number, delay_log=log_id.hex()
        )
        log = replace(
            world.log,
            topic=f"{name}@delay",
            topic_id=log_id,
            slot=2 * number + 1,
            delay_of=topic_id.hex(),
        )
        self.logs.append(log)
        for item in (topic, log):
            assert self.feed.try_write(LaneKind.ASSIGN, 0, 0, 0, 0, 0, (item.encode(),))

    def add_topic(self, name: str) -> None:
        """A topic is created, and the scheduler is sent it."""
        self._assign(name)
        self.feed.commit()
        self.make_logs()

    def make_logs(self) -> None:
        """Publish the delay logs, as their flusher does once they exist."""
        for log in self.logs:
            state = PartitionState.empty(log.topic_id, log.partition, SlotState.ONLINE, log.version)
            self.table.write(log.slot, state)

    def step(self, seconds: float = 0) -> None:
        self.now_ns += int(seconds * SECOND_NS)
        self.scheduler.step(self.now_ns)

    def ask(self, api: int, body: Any) -> None:
        assert self.ask_lane.try_write(
            LaneKind.REQUEST,
            int(api),
            0,
            5,
            7,
            0,
            (body if isinstance(body, bytes) else orjson.dumps(body),),
        )
        self.ask_lane.commit()

    def answered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        while (message := self.answers.peek()) is not None:
            yield message.flags, orjson.loads(bytes(message.payload))
            self.answers.advance(message)
            self.answers.consume()

    def open_topics(self) -> set[str]:
        return {partition.topic.topic for partition in self.scheduler._open.values()}


def test_a_log_that_its_flusher_has_yet_to_make_is_awaited_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = Running(["orders"], are_logs_made=False)
    waits = []
    for _ in range(10):
        running.step(1)
        deadline_ns = running.scheduler.next_deadline_ns()
        assert deadline_ns is not None
        waits.append(deadline_ns - running.now_ns)
    assert waits[:2] == [module.OPENING_NS, 2 * module.OPENING_NS]
    assert waits[-1] == module.REOPEN_NS, "a log that is never made costs a look each second"
    assert not running.open_topics()
    running.make_logs()
    running.step(1)
    assert running.open_topics() == {"orders"}
    assert not caplog.records


@pytest.mark.parametrize("was_open", [True, False])
def test_a_log_that_its_flusher_is_just_removing_is_no_trouble(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, was_open: bool
) -> None:
    """Its directory is in the bin, and the table does not show it as deleted yet."""
    running = Running(["orders"], are_logs_made=was_open)
    running.step()
    assert running.open_topics() == ({"orders"} if was_open else set())
    running.make_logs()
    running.files.rename("/data/orders@delay-0", "/data/.bin")
    if was_open:
        missing = "/data/orders@delay-0/00000000000000000000.arrows"
        reader = running.scheduler._open[running.logs[0].topic_id.hex(), 0]._follower
        monkeypatch.setattr(reader, "read", lambda *_: running.files.open_for_read(missing))
        log = running.logs[0]
        state = running.table.read(log.slot)
        running.table.write(log.slot, state._replace(high_watermark=1, log_end_offset=1))
    for _ in range(4):
        running.step(0.02)
    assert not running.open_topics()
    assert not caplog.records
    log = running.logs[0]
    gone = PartitionState.empty(log.topic_id, log.partition, SlotState.DELETED, log.version)
    running.table.write(log.slot, gone)
    running.step(2)
    assert not caplog.records


def test_a_log_whose_directory_stays_away_is_said(caplog: pytest.LogCaptureFixture) -> None:
    running = Running(["orders"])
    running.files.rename("/data/orders@delay-0", "/data/elsewhere")
    for _ in range(10):
        running.step(1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "delays_not_opened" in said
    assert "No such file" in said
    running.files.rename("/data/elsewhere", "/data/orders@delay-0")
    running.step(2)
    assert running.open_topics() == {"orders"}


def test_a_partition_that_fails_is_closed_said_and_tried_again_later_each_time_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = Running(["good", "bad"])
    running.step()
    assert running.open_topics() == {"good", "bad"}
    stepped: list[str] = []

    def step(self: Any, *_: object) -> int:
        stepped.append(self.topic.topic)
        if self.topic.topic == "bad":
            raise RuntimeError("nobody expected this")
        return 0

    from workers.delays.delay_partition import DelayPartition

    with monkeypatch.context() as patch:
        patch.setattr(DelayPartition, "step", step)
        for _ in range(600):
            running.step(0.1)
    assert stepped.count("good") == 600
    assert stepped.count("bad") == 6, "after 1, 2, 4, 8, 16 and 32 seconds"
    assert running.slot.load(ProcessWord.INTERNAL_ERRORS) == 6
    running.step(61)
    assert running.open_topics() == {"good", "bad"}


def _unknown_type(_: bytes) -> None:
    raise KeyError("as pyarrow does for a type that it does not know")


def test_a_delay_log_that_cannot_be_opened_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = Running(["bad", "good"])
    with monkeypatch.context() as patch:
        patch.setattr("workers.delays.store.log_versions.from_message", _unknown_type)
        running.step()
        assert running.open_topics() == set()
    running.step(1.1)
    assert running.open_topics() == {"bad", "good"}


def test_a_topic_whose_creator_is_answered_is_known_to_requests_that_are_read_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes while the scheduler is within a step."""
    running = Running(["old"])
    running.step()
    peek = running.scheduler._fronts[0].requests.peek
    arrivals = [(running.add_topic, "new")]

    def peek_behind_the_creation() -> LaneMessage | None:
        while arrivals:
            add, name = arrivals.pop()
            add(name)
        return peek()

    monkeypatch.setattr(running.scheduler._fronts[0].requests, "peek", peek_behind_the_creation)
    running.ask(Api.LIST_DELAYS, {"topic": "new"})
    running.step()
    ((code, answer),) = running.answered()
    assert (code, answer["delays"]) == (ErrorCode.OK, [])


def test_a_request_that_fails_is_answered_and_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = Running(["t"])
    running.step()

    def fail(*_: object) -> None:
        raise KeyError("nobody expected this")

    with monkeypatch.context() as patch:
        patch.setattr(running.scheduler._requests, "_describe", fail)
        running.ask(Api.DESCRIBE_DELAYS, {})
        running.step()
    ((code, answer),) = running.answered()
    assert code == ErrorCode.INTERNAL_ERROR
    assert "id=scheduler-0" in answer["message"]
    running.ask(Api.DESCRIBE_DELAYS, {})
    running.step()
    assert [code for code, _ in running.answered()] == [ErrorCode.OK]


def test_answers_that_nobody_takes_hold_back_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWERS_MAX", 3)
    running = Running(["t"])
    running.step()
    sent = 0
    for _ in range(200):
        sent += 1
        running.ask(Api.LIST_DELAYS, {"topic": "x" * 200, "limit": sent})
        running.step()
        if len(running.scheduler._fronts[0].outbox.waiting) >= 3:
            break
    answered = 0
    for _ in range(600):
        if running.ask_lane.try_write(LaneKind.REQUEST, int(Api.LIST_DELAYS), 0, 5, 7, 0, (b"{}",)):
            running.ask_lane.commit()
            sent += 1
        running.step()
        assert len(running.scheduler._fronts[0].outbox.waiting) <= 3 + module.REQUESTS_AT_ONCE
    for _ in range(400):
        answered += len(list(running.answered()))
        running.step()
    assert answered == sent
