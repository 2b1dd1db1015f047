"""Producers, members and sessions of one user are neither used nor changed by another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.groups import classic_groups
from netfront.kafka.apis.share_groups.sessions import begin_request
from netfront.kafka.apis.shared_state import producers_of
from netfront.kafka.apis.transactions.end import end_transaction
from netfront.kafka.apis.transactions.offsets import commit_offsets
from netfront.kafka.exchange.peers import Answer
from netfront.kafka.groups.classic_group import INITIAL_DELAY_NS
from netfront.kafka.producers.transactional_producer import TransactionalProducer
from netfront.kafka.wire.errors import KafkaError
from shm.runtime.timing_wheel import TimingWheel
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

LOG_END = 1_000
MS = 1_000_000
DENIED = KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
SETTINGS = {
    "groups.max": 2, "group.members.max": 10, "group.session.timeout.min.ms": 1_000,
    "group.session.timeout.max.ms": 60_000,
}  # fmt: skip
PRODUCER = {"transactional_id": "tx", "producer_id": 7, "producer_epoch": 3}
MEMBER = {"group_id": "g", "group_instance_id": None}


class Gateway:
    """The services of a gateway with one producer, of user `a`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Api, dict[str, Any]]] = []
        self.open: list[Any] = []
        """Requests whose connections are open."""
        route = SimpleNamespace(topic_id=b"t" * 16)
        bounds = SimpleNamespace(shown_offsets=lambda _route: (0, LOG_END))
        self.services: Any = SimpleNamespace(
            state={}, now_ns=MS, settings=SETTINGS, timers=TimingWheel(0),
            routes=SimpleNamespace(find_by_name=lambda _topic, _partition: route),
            front=SimpleNamespace(log_bounds=bounds),
        )  # fmt: skip
        self.producer = TransactionalProducer(7, 3, 1, timeout_ms=1_000, user="a")
        services: Any = self.services
        producers_of(services).put("tx", self.producer)

    def ask_json(self, api: Api, value: dict[str, Any]) -> None:
        self.asked.append((api, value))

    def call(self, user: str, request: dict[str, Any], version: int = 3, *rights: str) -> Call:
        principal: Any = None
        if user:
            principal = SimpleNamespace(user=user, may=lambda what, *_: what in rights)
        peer: Any = self
        connection: Any = SimpleNamespace(address="host:1")
        return Call(self.services, connection, peer, 0, version, user, request, principal)

    def commit(self, user: str, offset: int, version: int = 3) -> Any:
        entry = {"partition_index": 0, "committed_offset": offset, "committed_metadata": ""}
        topics = [{"name": "orders", "partitions": [entry]}]
        return commit_offsets(
            self.call(user, {**PRODUCER, "group_id": "g", "topics": topics}, version)
        )

    def offsets(self) -> list[int]:
        kept = self.producer.offsets.groups_json()
        return [entry[2] for group in kept for entry in group["entries"]]


def ended(steps: Any, *answers: Answer) -> Any:
    """Result of a handler whose questions get these answers."""
    try:
        next(steps)
        for answer in answers:
            steps.send(answer)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def code_of(response: dict[str, Any]) -> KafkaError:
    code: KafkaError = response["topics"][0]["partitions"][0]["error_code"]
    return code


OK = Answer(ErrorCode.OK, [b"{}"])


def refusal(code: ErrorCode) -> Answer:
    return Answer(code, [orjson.dumps({"message": "no"})])


def test_offsets_of_another_user_are_refused_and_change_nothing() -> None:
    gateway = Gateway()
    assert code_of(ended(gateway.commit("a", 5), OK)) is KafkaError.NONE
    for user in ("b", ""):
        assert code_of(ended(gateway.commit(user, 9, version=5))) is DENIED
    assert (gateway.offsets(), gateway.producer.is_version_2) == ([5], False)
    assert len(gateway.asked) == 1


def test_a_transaction_is_not_ended_by_another_user() -> None:
    gateway = Gateway()
    with pytest.raises(RefusedError) as refused:
        ended(end_transaction(gateway.call("b", {**PRODUCER, "committed": True}, 5)))
    assert (refused.value.code, gateway.asked, gateway.producer.is_version_2) == (DENIED, [], False)


def test_who_has_an_earlier_epoch_is_fenced_and_not_denied() -> None:
    gateway = Gateway()
    request = {**PRODUCER, "producer_epoch": 2, "committed": True}
    with pytest.raises(RefusedError) as refused:
        ended(end_transaction(gateway.call("b", request)))
    assert refused.value.code is KafkaError.PRODUCER_FENCED


@pytest.mark.parametrize(
    "code",
    [ErrorCode.NOT_AUTHORIZED, ErrorCode.NOT_READY, ErrorCode.PRODUCER_FENCED,
     ErrorCode.TOO_MANY_REQUESTS, ErrorCode.STORAGE_ERROR],
)  # fmt: skip
def test_offsets_that_the_coordinator_refuses_are_not_kept(code: ErrorCode) -> None:
    gateway = Gateway()
    ended(gateway.commit("a", 5), OK)
    assert code_of(ended(gateway.commit("a", 9), refusal(code))) is not KafkaError.NONE
    assert gateway.offsets() == [5]


def test_offsets_wait_for_those_that_the_coordinator_is_asked_about() -> None:
    gateway = Gateway()
    first = gateway.commit("a", 5)
    next(first)
    assert code_of(ended(gateway.commit("a", 9))) is KafkaError.COORDINATOR_LOAD_IN_PROGRESS
    first.close()  # its connection is gone
    assert gateway.offsets() == []
    assert code_of(ended(gateway.commit("a", 9), OK)) is KafkaError.NONE
    assert gateway.offsets() == [9]


@pytest.mark.parametrize(
    ("code", "expected"),
    [(ErrorCode.NOT_AUTHORIZED, DENIED), (ErrorCode.OK, KafkaError.NONE)],
)
def test_after_a_restart_the_coordinator_says_whose_producer_it_is(
    code: ErrorCode, expected: KafkaError
) -> None:
    gateway = Gateway()
    gateway.services.state.clear()
    row = {"producer_id": 7, "producer_epoch": 3, "owner": 4, "timeout_ms": 10, "staged": "",
           "state": "empty"}  # fmt: skip
    described = Answer(ErrorCode.OK, [orjson.dumps(row)])
    answers = [described, described if code is ErrorCode.OK else refusal(code)]
    if code is ErrorCode.OK:
        answers.append(OK)
    assert code_of(ended(gateway.commit("a", 5), *answers)) is expected
    assert gateway.asked[1] == (Api.DESCRIBE_TRANSACTION, {"transactional_id": "tx", "owner": 4})
    assert (producers_of(gateway.services).get("tx") is None) == (code is not ErrorCode.OK)


def joined(gateway: Gateway, user: str, **fields: Any) -> Any:
    """The waiter of a JoinGroup request, or its refusal."""
    join = {
        **MEMBER, "session_timeout_ms": 10_000, "rebalance_timeout_ms": 60_000, "member_id": "",
        "protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b""}], **fields,
    }  # fmt: skip
    steps = classic_groups.join_group(gateway.call(user, join))
    gateway.open.append(steps)
    try:
        found = next(steps)
        return found if found is not None else steps.send(OK)
    except StopIteration as end:
        return end.value


def test_a_classic_member_is_its_users() -> None:
    gateway = Gateway()
    waiter = joined(gateway, "a", group_instance_id="i")
    gateway.services.now_ns += INITIAL_DELAY_NS + MS
    for callback in gateway.services.timers.advance(gateway.services.now_ns):
        callback()
    member_id = waiter.value["member_id"]
    request = {**MEMBER, "member_id": member_id, "generation_id": waiter.value["generation_id"],
               "assignments": []}  # fmt: skip
    of_another = KafkaError.GROUP_AUTHORIZATION_FAILED
    for handler in (classic_groups.sync_group, classic_groups.heartbeat):
        assert ended(handler(gateway.call("b", request)))["error_code"] is of_another
    for known in (member_id, ""):
        refused = joined(gateway, "b", member_id=known, group_instance_id="i")
        assert refused["error_code"] is of_another
    call = gateway.call("b", {})
    assert classic_groups.commit_error(call, "g", member_id, None, 1) is of_another
    leave = {"group_id": "g", "members": [{"member_id": member_id, "group_instance_id": None}]}
    left = ended(classic_groups.leave_group(gateway.call("b", leave)))
    assert left["members"][0]["error_code"] is of_another
    beat = ended(classic_groups.heartbeat(gateway.call("a", request)))
    assert beat["error_code"] is KafkaError.NONE
    left = ended(classic_groups.leave_group(gateway.call("b", leave, 3, "delete")), OK)
    assert left["members"][0]["error_code"] is KafkaError.NONE


def test_a_session_of_a_share_group_is_its_users() -> None:
    gateway = Gateway()
    request = {"group_id": "s", "member_id": "m", "share_session_epoch": 0}
    begin_request(gateway.call("a", request))
    begin_request(gateway.call("b", {**request, "share_session_epoch": 0}))
    begin_request(gateway.call("b", {**request, "share_session_epoch": -1}))
    begin_request(gateway.call("a", {**request, "share_session_epoch": 1}))


@pytest.mark.parametrize(
    ("version", "code"),
    [(3, KafkaError.INVALID_TXN_STATE), (5, KafkaError.TRANSACTION_ABORTABLE)],
)
def test_offsets_of_a_transaction_that_was_aborted_are_not_those_of_the_next(
    version: int, code: KafkaError
) -> None:
    """They were left with the coordinator, in the transaction that the client has not begun."""
    gateway = Gateway()
    gateway.producer.note_aborted(7, 4)
    assert code_of(ended(gateway.commit("a", 5, version))) is code
    assert (gateway.asked, gateway.offsets()) == ([], [])
