"""Requests that name very many things: each is decided once, others are served meanwhile, and a
request that names more than its API takes is refused as it is read.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from netfront.kafka.apis.admin.topics import create_topics
from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.pause import SLICE
from netfront.kafka.apis.security.client_quotas import describe_quotas
from netfront.kafka.apis.security.scram_users import describe_credentials
from netfront.kafka.apis.share_groups.start_offsets import delete_offsets
from netfront.kafka.apis.table import APIS
from netfront.kafka.exchange.peers import Answer
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.rights import groups, records, topics
from netfront.kafka.rights.checks import AnsweredError
from netfront.kafka.wire.decoding import (
    ENTRIES_MAX,
    OF_PARTITIONS,
    PARTITION_ENTRIES_MAX,
    MalformedError,
    Reader,
    decode,
    entries_max,
    request_reader,
)
from netfront.kafka.wire.errors import KafkaError
from shm.runtime.timing_wheel import TimingWheel
from tailrace.core.error_codes import ErrorCode

COUNT = 3 * SLICE
COMPARISONS_EACH = 40
DENIED_MAX_BYTES = 64 << 20


class Name(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


class Gateway:
    """The services of a gateway whose user may do nothing, or what `decide` allows."""

    def __init__(self) -> None:
        self.decided = self.pauses = 0
        self.decide: Callable[[str, str], bool] = lambda _kind, _name: False
        self.asked: list[dict[str, Any]] = []
        self.services: Any = SimpleNamespace(
            state={}, now_ns=0, timers=TimingWheel(0), gate=None,
            routes=SimpleNamespace(find_by_name=lambda *_: None, partition_count=lambda _: 0),
            settings={"kafka.num.partitions": 1}, front=SimpleNamespace(is_audited=False),
        )  # fmt: skip

    def may(self, _operation: str, kind: str, name: str) -> bool:
        self.decided += 1
        return self.decide(kind, name)

    def ask_json(self, _api: Any, value: dict[str, Any]) -> None:
        self.asked.append(value)

    def call(self, request: dict[str, Any], version: int = 9) -> Call:
        principal: Any = SimpleNamespace(names=["User:x"], user="x", may=self.may)
        peer: Any = self
        connection: Any = SimpleNamespace()
        return Call(self.services, connection, peer, 0, version, "", request, principal)

    def run(self, steps: Steps, *answers: Answer) -> Any:
        """Run a rule or handler to its result. Its pauses pass, and its questions get these
        answers.
        """
        left, value = list(answers), None
        while True:
            try:
                waiter = steps.send(value)
            except StopIteration as end:
                return end.value
            value = left.pop(0) if waiter is None else None
            self.pauses += waiter is not None


def named(count: int = COUNT) -> list[Any]:
    return [Name(f"n{number}") for number in range(count)]


RULES: dict[str, tuple[Callable[[Call], Any], Callable[[str], Any], str, str]] = {
    "DescribeGroups": (groups.described("groups"), lambda name: name, "groups", "groups"),
    "DeleteGroups": (groups.delete_groups, lambda name: name, "groups_names", "results"),
    "OffsetFetch": (
        groups.offset_fetch, lambda name: {"group_id": name, "topics": None}, "groups", "groups",
    ),
    "DescribeShareGroupOffsets": (
        groups.share_offsets, lambda name: {"group_id": name, "topics": None}, "groups", "groups",
    ),
    "DescribeTransactions": (
        records.describe_transactions, lambda name: name, "transactional_ids", "transaction_states",
    ),
    "CreateTopics": (
        topics.create_topics, lambda name: {"name": name, "configs": []}, "topics", "topics",
    ),
}  # fmt: skip


@pytest.mark.parametrize("api", RULES)
def test_denied_names_are_decided_once_and_others_are_served_between(api: str) -> None:
    rule, entry, asked, answered = RULES[api]
    gateway, names = Gateway(), named()
    request = {asked: [entry(name) for name in names]}
    Name.compared = 0
    merge = gateway.run(rule(gateway.call(request)))
    response: dict[str, Any] = {answered: []}
    merge(response)
    assert (request[asked], len(response[answered])) == ([], COUNT)
    assert gateway.decided <= COUNT + 1
    assert Name.compared <= COUNT * COMPARISONS_EACH
    assert gateway.pauses == COUNT // SLICE


def test_denied_topics_of_a_group_that_is_named_often_are_answered_once_each() -> None:
    gateway = Gateway()
    gateway.decide = lambda kind, _name: kind == "group"
    asked = [{"group_id": "g", "topics": [{"name": f"t{at}", "partition_indexes": [0]}]}
             for at in range(50)]  # fmt: skip
    merge = gateway.run(groups.offset_fetch(gateway.call({"groups": asked})))
    response = {"groups": [{"group_id": "g", "topics": []} for _ in asked]}
    merge(response)
    assert [len(group["topics"]) for group in response["groups"]] == [1] * 50


def test_partitions_with_a_denied_topic_are_separated_in_one_pass() -> None:
    gateway = Gateway()
    gateway.decide = lambda kind, name: kind != "topic" or name != "n7"
    asked = [{"name": name, "partitions": [0]} for name in named()]
    Name.compared = 0
    call = gateway.call({"v3_and_below_topics": asked, "v3_and_below_transactional_id": "t"})
    with pytest.raises(AnsweredError) as answered:
        records.add_partitions(call)
    results = answered.value.response["results_by_topic_v3_and_below"]
    codes = [each["results_by_partition"][0]["partition_error_code"] for each in results]
    assert codes.count(KafkaError.TOPIC_AUTHORIZATION_FAILED) == 1
    assert Name.compared <= COUNT * COMPARISONS_EACH


def test_topics_that_fail_without_the_controller_are_found_by_their_names() -> None:
    gateway = Gateway()
    asked = [{"name": name, "num_partitions": 0, "replication_factor": 1, "assignments": [],
              "configs": []} for name in named()]  # fmt: skip
    Name.compared = 0
    response = gateway.run(create_topics(gateway.call({"topics": asked})))
    assert {each["error_code"] for each in response["topics"]} == {KafkaError.INVALID_PARTITIONS}
    assert Name.compared <= COUNT * COMPARISONS_EACH
    assert gateway.pauses == COUNT // SLICE


def test_users_that_are_named_twice_are_counted_in_one_pass() -> None:
    gateway, names = Gateway(), [*named(), *named()]
    Name.compared = 0
    call = gateway.call({"users": [{"name": name} for name in names]})
    response = gateway.run(describe_credentials(call))
    assert {each["error_code"] for each in response["results"]} == {KafkaError.DUPLICATE_RESOURCE}
    assert Name.compared <= 2 * COUNT * COMPARISONS_EACH


def test_topics_of_a_share_group_are_deleted_in_one_pass() -> None:
    gateway, names = Gateway(), named()
    partitions = [{"topic": f"n{at}", "partition": 0} for at in range(900)]
    page = {"group": {"kind": "share"}, "partitions": partitions, "next": None}
    refused = {"refused": [["n1", 0, int(ErrorCode.UNKNOWN_TOPIC), "it is gone"]]}
    call = gateway.call({"group_id": "s", "topics": [{"topic_name": name} for name in names]})
    Name.compared = 0
    answers = [Answer(ErrorCode.OK, [orjson.dumps(each)]) for each in (page, refused)]
    response = gateway.run(delete_offsets(call), *answers)
    codes = [each["error_code"] for each in response["responses"]]
    assert codes[0] is KafkaError.NONE
    assert codes[1:].count(KafkaError.UNKNOWN_TOPIC_OR_PARTITION) == COUNT - 900 + 1
    assert Name.compared <= COUNT * COMPARISONS_EACH


def test_quotas_are_not_filtered_by_the_same_type_twice() -> None:
    part = {"entity_type": "user", "match_type": 2, "match": None}
    gateway = Gateway()
    with pytest.raises(RefusedError, match="name each once"):
        gateway.run(describe_quotas(gateway.call({"components": [part, part], "strict": False})))


# ---- bounds --------------------------------------------------------------------------------------


def body_of_groups(count: int) -> bytes:
    """The body of DeleteGroups 1."""
    return count.to_bytes(4, "big") + b"\0\1g" * count


def test_a_request_that_names_more_than_its_api_takes_is_refused_as_it_is_read() -> None:
    read = request_reader(42, 1)
    assert len(decode(read, Reader(body_of_groups(ENTRIES_MAX)))["groups_names"]) == ENTRIES_MAX
    with pytest.raises(MalformedError, match=f"more than {ENTRIES_MAX} .*: ask for fewer at once"):
        decode(read, Reader(body_of_groups(ENTRIES_MAX + 1)))


def test_every_api_has_a_bound_and_programs_may_name_more_partitions() -> None:
    assert {entries_max(api) for api in APIS} == {ENTRIES_MAX, PARTITION_ENTRIES_MAX}
    assert set(APIS) >= OF_PARTITIONS


def test_the_largest_request_of_denied_names_takes_bounded_memory() -> None:
    gateway, rule = Gateway(), groups.described("groups")
    request = {"groups": [f"a-group-of-orders-{at}" for at in range(ENTRIES_MAX)]}
    tracemalloc.start()
    try:
        merge = gateway.run(rule(gateway.call(request)))  # type: ignore[arg-type]
        response: dict[str, Any] = {"groups": []}
        merge(response)
        assert len(response["groups"]) == ENTRIES_MAX
        assert tracemalloc.get_traced_memory()[1] < DENIED_MAX_BYTES
    finally:
        tracemalloc.stop()
