"""The agent of groups: one commit for all that a step takes in, answers after it, and what it does
when the database, a request or a front fails.
"""

from __future__ import annotations

import orjson
import pytest

from appliance.groups.agent import agent as module
from appliance.groups.agent.transaction import AFTER_FAILURE_NS, REOPEN_NS
from shm.memory.layout import ProcessWord
from shm.messages.lane_messages import LaneKind
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import DiskFullError, StorageError, TailraceError
from tailrace.protocol.frame import Api
from tests.kit.stepped.group_agents import SECOND_NS, AgentWorld, broken_disk

A, B = 1 << 32 | 1, 1 << 32 | 2
"""Words of two sessions of a front of generation 1."""


@pytest.fixture
def world() -> AgentWorld:
    return AgentWorld()


def test_a_step_commits_once_for_all_requests_of_all_fronts_and_answers_behind_that() -> None:
    world = AgentWorld(fronts=3)
    for number in range(60):
        world.ask(Api.COMMIT_OFFSETS, {"n": number}, correlation_id=number, front=number % 3)
    world.step()
    assert [len(rows) for rows in world.store.committed] == [60]
    assert world.slot.load(ProcessWord.COMMIT_COUNT) == 1
    assert sum(len(world.heard(front)) for front in range(3)) == 60
    world.ask(Api.GROUP_HEARTBEAT, {})
    world.step()
    assert world.slot.load(ProcessWord.COMMIT_COUNT) == 1, "what writes nothing is not committed"
    assert len(world.heard()) == 1


def test_nothing_is_answered_when_the_process_dies_before_the_commit(
    world: AgentWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    world.ask(Api.COMMIT_OFFSETS, {})
    monkeypatch.setattr(world.store, "commit", die)
    with pytest.raises(Killed):
        world.step()
    assert not world.heard()


@pytest.mark.parametrize("error", [broken_disk(), DiskFullError("the disk is full")])
def test_a_commit_that_fails_answers_everything_that_it_was_for_and_the_next_step_goes_on(
    world: AgentWorld, error: TailraceError
) -> None:
    world.ask(Api.COMMIT_OFFSETS, {"push": 1}, correlation_id=1)
    world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=2)
    world.store.failure = error
    world.step()
    heard = world.heard()
    assert [(kind, code) for kind, _, _, code, _ in heard] == [(LaneKind.RESPONSE, error.code)] * 2
    assert orjson.loads(heard[0][4])["message"] == error.detail
    assert not world.store.committed
    world.store.failure = None
    world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=3)
    world.step(2)
    assert world.codes() == {3: ErrorCode.OK}
    assert world.opened_count == 1


def test_a_service_that_cannot_be_brought_back_to_the_disk_is_begun_anew(world: AgentWorld) -> None:
    world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=1)
    old = world.store
    old.failure = world.service.reload_failure = world.refusal = broken_disk()
    world.step()
    assert world.codes() == {1: ErrorCode.STORAGE_ERROR}
    assert old.is_closed
    world.ask(Api.GROUP_HEARTBEAT, {}, correlation_id=2)
    world.step()
    assert world.codes() == {2: ErrorCode.STORAGE_ERROR}
    world.refusal = None
    deadline_ns = world.agent.next_deadline_ns()
    assert deadline_ns is not None
    world.step((deadline_ns - world.now_ns) / 1e9)
    world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=3)
    world.step()
    assert world.codes() == {3: ErrorCode.OK}
    assert world.opened_count == 2


def test_a_committed_step_is_not_undone_though_what_follows_it_fails(world: AgentWorld) -> None:
    world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=1)
    old = world.store
    old.late_failure = RuntimeError("behind the commit")
    world.step()
    assert world.codes() == {1: ErrorCode.INTERNAL_ERROR}, "its client asks again"
    assert old.committed
    assert old.is_closed
    world.step(REOPEN_NS / 1e9)
    assert world.opened_count == 2
    world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=2)
    world.step()
    assert world.codes() == {2: ErrorCode.OK}


def test_a_database_that_cannot_be_opened_costs_the_requests_and_not_the_process() -> None:
    world = AgentWorld(is_fed=False)
    world.refusal = StorageError("groups.db is damaged: move it away")
    world.feed()
    world.step()
    assert world.is_ready
    world.ask(Api.GROUP_HEARTBEAT, {}, correlation_id=7)
    world.step()
    [(_, _, correlation_id, code, body)] = world.heard()
    assert (correlation_id, code) == (7, ErrorCode.STORAGE_ERROR)
    assert "move it away" in orjson.loads(body)["message"]
    world.refusal = None
    world.step(1)
    assert world.opened_count == 1


def test_a_request_that_fails_unexpectedly_is_answered_and_costs_no_other_of_its_step(
    world: AgentWorld,
) -> None:
    world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=1)
    world.ask(Api.COMMIT_OFFSETS, {"raise": "nobody expected this"}, correlation_id=2)
    world.ask(Api.COMMIT_OFFSETS, {"refuse": "no such group"}, correlation_id=3)
    world.put(LaneKind.REQUEST, A, 4, Api.COMMIT_OFFSETS, b"no json")
    world.step()
    assert world.codes() == {
        1: ErrorCode.OK, 2: ErrorCode.INTERNAL_ERROR, 3: ErrorCode.INVALID_GROUP,
        4: ErrorCode.MALFORMED_REQUEST
    }  # fmt: skip
    assert world.store.committed == [[{}]]
    assert world.slot.load(ProcessWord.INTERNAL_ERRORS) == 1
    world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=5)
    world.step()
    assert world.codes() == {5: ErrorCode.OK}


def test_a_request_that_the_commit_finds_invalid_costs_no_other_of_its_step(
    world: AgentWorld,
) -> None:
    for number in range(5):
        fault = {"invalid": 1} if number in (1, 3) else {}
        world.ask(Api.COMMIT_OFFSETS, {"n": number, **fault}, correlation_id=number)
    world.step()
    refused = dict.fromkeys((1, 3), ErrorCode.INVALID_REQUEST)
    assert world.codes() == {**dict.fromkeys((0, 2, 4), ErrorCode.OK), **refused}
    assert [row["n"] for rows in world.store.committed for row in rows] == [0, 2, 4]
    world.ask(Api.COMMIT_OFFSETS, {"n": 5}, correlation_id=5)
    world.ask(Api.COMMIT_OFFSETS, {"n": 6}, correlation_id=6)
    world.step()
    assert len(world.store.committed[-1]) == 2, "the next step has one commit again"


def test_timers_that_fail_are_tried_again_later_and_do_not_spin(world: AgentWorld) -> None:
    world.service.timer_failure = RuntimeError("nobody expected this")
    world.service.deadline_ns = world.now_ns
    world.step()
    steps = world.service.steps
    deadline_ns = world.agent.next_deadline_ns()
    assert deadline_ns is not None
    assert deadline_ns - world.now_ns >= AFTER_FAILURE_NS
    world.step()
    assert world.service.steps == steps
    world.service.timer_failure = None
    world.step(1)
    assert world.service.steps == steps + 1


def test_sessions_time_out_only_up_to_when_everything_was_read(world: AgentWorld) -> None:
    world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=0)
    sent_ns = world.now_ns
    for number in range(1, 2 * module.REQUESTS_AT_ONCE):
        world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=number)
    world.step(0.2)
    assert world.service.last_request_ns == sent_ns, "a part of it waits"
    world.step(0.1)
    assert world.service.last_request_ns == world.now_ns


def test_a_process_that_stood_still_lets_its_members_be_heard_before_it_looks_at_timers(
    world: AgentWorld,
) -> None:
    world.service.deadline_ns = world.now_ns + SECOND_NS
    world.step()
    steps = world.service.steps
    world.step(1.2)
    assert world.service.steps == steps + 1, "a little late"
    world.service.deadline_ns = world.now_ns + SECOND_NS
    world.step()
    world.step(60)
    assert world.service.steps == steps + 2, "not now"
    assert world.due_ns == world.now_ns + module.RESUMED_NS
    world.step(1)
    assert world.service.steps == steps + 3


def test_nothing_is_handled_before_the_whole_catalog_is_known() -> None:
    world = AgentWorld(is_fed=False)
    world.ask(Api.GROUP_HEARTBEAT, {})
    world.step()
    world.feed(generation=2)  # of another generation of this process
    world.step()
    assert not world.heard()
    assert not world.opened_count
    assert not world.is_ready
    world.feed()
    world.step()
    assert world.codes() == {1: ErrorCode.OK}
    assert world.is_ready


def test_while_logs_are_recovered_it_waits_without_a_deadline_and_opens_nothing() -> None:
    world = AgentWorld(is_fed=False)
    world.is_running = False
    world.feed()
    world.step()
    world.step(5)
    assert world.agent.next_deadline_ns() is None, "a deadline that has passed would keep it busy"
    world.ask(Api.GROUP_HEARTBEAT, {})
    world.step()
    assert not world.heard()
    world.is_running = True
    world.step()
    assert world.codes() == {1: ErrorCode.OK}


def test_requests_of_a_front_are_bounded_for_a_step_and_read_on_in_the_next(
    world: AgentWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUESTS_AT_ONCE", 10)
    for number in range(25):
        world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=number)
    for count, has_more in ((10, True), (10, True), (5, False)):
        world.step()
        assert len(world.heard()) == count
        assert world.agent.has_more() is has_more
    assert world.slot.load(ProcessWord.COMMIT_COUNT) == 3


def test_a_step_that_takes_long_commits_before_it_reads_on_and_each_front_has_its_turn() -> None:
    world = AgentWorld(fronts=2)
    for number in range(30):
        world.ask(Api.COMMIT_OFFSETS, {}, correlation_id=number, front=0)
    world.ask(Api.COMMIT_OFFSETS, {}, front=1)
    world.request_ns = module.READING_NS // 5
    world.step()
    assert 1 <= len(world.heard(0)) <= 6
    assert len(world.heard(1)) == 1
    assert world.agent.has_more()


def test_of_a_front_that_takes_no_answers_no_more_is_read_and_every_answer_comes_once_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = AgentWorld(lane_bytes=1 << 14)
    monkeypatch.setattr(module, "ANSWERS_MAX", 8)
    monkeypatch.setattr(module, "REQUESTS_AT_ONCE", 4)
    for number in range(60):
        world.ask(Api.GROUP_HEARTBEAT, {"size": 2000, "push": 1}, correlation_id=number)
    for _ in range(5):
        world.step()
    assert not world.ask_lanes[0].is_empty(), "the lane holds the rest back"
    assert not world.agent.has_more()
    assert world.agent.next_deadline_ns() is not None
    heard = []
    for _ in range(100):
        heard += [
            correlation_id
            for kind, _, correlation_id, _, _ in world.heard()
            if kind is LaneKind.RESPONSE
        ]
        world.step()
    assert heard == list(range(60))


def test_an_answer_that_no_lane_can_take_is_refused(world: AgentWorld) -> None:
    world.ask(Api.LIST_GROUPS, {"size": 1 << 16}, correlation_id=9)
    world.step()
    assert world.codes() == {9: ErrorCode.REQUEST_TOO_LARGE}


def test_sessions_that_the_front_says_have_ended_are_ended(world: AgentWorld) -> None:
    world.ask(Api.GROUP_HEARTBEAT, {}, word=A)
    world.ask(Api.GROUP_HEARTBEAT, {}, word=B)
    world.put(LaneKind.SESSION_CLOSED, A)
    world.step()
    assert world.service.closed == [(0, A)]


def test_the_sessions_of_a_killed_front_are_ended_when_its_lane_is_read() -> None:
    world = AgentWorld(fronts=2)
    world.ask(Api.GROUP_HEARTBEAT, {}, word=A)
    world.ask(Api.GROUP_HEARTBEAT, {}, word=A, front=1)
    world.step()
    world.ask(Api.GROUP_HEARTBEAT, {}, word=B)  # left in its lane
    world.front_slots[0].store(ProcessWord.READY_GENERATION, 2)
    world.step()
    assert world.service.closed == [(0, A), (0, B)]
    world.step()
    assert len(world.service.closed) == 2


def test_a_killed_front_whose_successor_has_spoken_loses_only_the_old_sessions(
    world: AgentWorld,
) -> None:
    world.ask(Api.GROUP_HEARTBEAT, {}, word=A)
    world.step()
    world.front_slots[0].store(ProcessWord.READY_GENERATION, 2)
    new = 9 << 32 | 1
    world.ask(Api.GROUP_HEARTBEAT, {}, word=B)
    world.ask(Api.GROUP_HEARTBEAT, {}, word=new)
    for _ in range(3):
        world.step()
    assert world.service.closed == [(0, A), (0, B)]
    world.put(LaneKind.SESSION_CLOSED, new)
    world.step()
    assert world.service.closed[2:] == [(0, new)]


def test_pushes_that_find_no_room_are_dropped_and_answers_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = AgentWorld(lane_bytes=1 << 14)
    monkeypatch.setattr(module, "PUSHES_MAX", 4)
    for number in range(20):
        world.ask(Api.GROUP_HEARTBEAT, {"push": 1, "size": 2000}, correlation_id=number)
    world.step()
    kinds = []
    for _ in range(30):
        kinds += [kind for kind, *_ in world.heard()]
        world.step()
    assert kinds.count(LaneKind.RESPONSE) == 20
    assert kinds.count(LaneKind.PUSH) < 20
