"""Every API by every kind of user: nobody may do it without each of its rights, and then it may."""

from __future__ import annotations

import pathlib
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from netfront.kafka.apis.table import APIS
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError
from shm.rights.passwords import fields_of
from tailrace import NewTopic, Producer
from tests.kit.appliances.secured import Users, acl, admin_address, secured
from tests.kit.peers.kafka_logins import PASSWORD, add, connect
from tests.kit.processes import wait_until

TOPIC, GROUP, CLUSTER, TRANSACTION = 29, 30, 31, 53
UNKNOWN_ID = 100
DENIAL_OF = {"topic": TOPIC, "group": GROUP, "cluster": CLUSTER, "transactional-id": TRANSACTION}
DENIALS = {*DENIAL_OF.values()}
ORDERS = "orders"


class Case(NamedTuple):
    """A request, the rights that it needs, and the error without the first of them."""

    api: int
    version: int
    request: dict[str, Any]
    needs: tuple[str, ...]
    denial: int


def topics(field: str = "name", /, **partition: Any) -> list[dict[str, Any]]:
    return [{field: ORDERS, "partitions": [{"partition_index": 0, "partition": 0, **partition}]}]


MEMBER: dict[str, Any] = {
    "group_id": "g", "member_id": "m", "generation_id": 1, "group_instance_id": None,
    "generation_id_or_member_epoch": -1, "retention_time_ms": -1,
}  # fmt: skip
OFFSET: dict[str, Any] = {
    "committed_offset": 0,
    "committed_leader_epoch": -1,
    "committed_metadata": "",
}
PRODUCER = {"transactional_id": "t", "producer_id": 7, "producer_epoch": 0, "committed": True}
BEAT = {
    "group_id": "c", "member_id": "m", "member_epoch": 0, "instance_id": None, "rack_id": None,
    "rebalance_timeout_ms": 1000, "subscribed_topic_names": [ORDERS], "server_assignor": None,
    "topic_partitions": [], "subscribed_topic_regex": None,
}  # fmt: skip
RULE = {
    "resource_type_filter": 2, "resource_name_filter": "none", "pattern_type_filter": 3,
    "principal_filter": None, "host_filter": None, "operation": 1, "permission_type": 1,
}  # fmt: skip
CONFIG = {"name": "retention.ms", "value": "1000", "config_operation": 0}
READ_GROUP, READ_TOPIC = "read group g", "read topic orders"
SHARE_START = {"group_id": "s", "topics": [
    {"topic_name": ORDERS, "partitions": [{"partition_index": 0, "start_offset": 0}]}]}  # fmt: skip
CASES = [
    Case(0, 9, {"transactional_id": None, "acks": -1, "timeout_ms": 1000, "topic_data": [
        {"name": ORDERS, "partition_data": [{"index": 0, "records": None}]}]},
        ("write topic orders",), TOPIC),
    Case(0, 9, {"transactional_id": "t", "acks": 1, "timeout_ms": 1000, "topic_data": [
        {"name": ORDERS, "partition_data": [{"index": 0, "records": None}]}]},
        ("write transactional-id t", "write topic orders"), TRANSACTION),
    Case(1, 11, {"replica_id": -1, "max_wait_ms": 0, "min_bytes": 0, "max_bytes": 1000,
        "isolation_level": 0, "session_id": 0, "session_epoch": -1, "rack_id": "",
        "forgotten_topics_data": [], "topics": topics(
            "topic", current_leader_epoch=-1, fetch_offset=0, log_start_offset=-1,
            partition_max_bytes=1000)}, (READ_TOPIC,), TOPIC),
    Case(2, 6, {"replica_id": -1, "isolation_level": 0, "topics": topics(
        current_leader_epoch=-1, timestamp=-1)}, ("describe topic orders",), TOPIC),
    Case(3, 9, {"topics": [{"name": ORDERS}]}, ("describe topic orders",), TOPIC),
    Case(8, 8, {**MEMBER, "member_id": "", "topics": topics(**OFFSET)},
        (READ_GROUP, READ_TOPIC), GROUP),
    Case(9, 1, {"group_id": "g", "topics": [{"name": ORDERS, "partition_indexes": [0]}]},
        ("describe group g", "describe topic orders"), GROUP),
    Case(9, 8, {"require_stable": False, "groups": [{"group_id": "g", "member_id": None,
        "member_epoch": -1, "topics": [{"name": ORDERS, "partition_indexes": [0]}]}]},
        ("describe group g", "describe topic orders"), GROUP),
    Case(10, 2, {"key": "g", "key_type": 0}, ("describe group g",), GROUP),
    Case(10, 4, {"key_type": 1, "coordinator_keys": ["t"]},
        ("describe transactional-id t",), TRANSACTION),
    Case(11, 5, {**MEMBER, "member_id": "", "session_timeout_ms": 10_000,
        "rebalance_timeout_ms": 1000, "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b""}]}, (READ_GROUP,), GROUP),
    Case(12, 3, MEMBER, (READ_GROUP,), GROUP),
    Case(13, 3, {**MEMBER, "members": []}, (READ_GROUP,), GROUP),
    Case(14, 3, {**MEMBER, "assignments": []}, (READ_GROUP,), GROUP),
    Case(15, 5, {"groups": ["g"], "include_authorized_operations": True},
        ("describe group g",), GROUP),
    Case(19, 5, {"timeout_ms": 1000, "validate_only": True, "topics": [{"name": "made",
        "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}]},
        ("create topic made",), TOPIC),
    Case(20, 4, {"topic_names": ["gone"], "timeout_ms": 1000}, ("delete topic gone",), TOPIC),
    Case(21, 1, {"timeout_ms": 1000, "topics": topics(offset=0)},
        ("delete topic orders",), TOPIC),
    Case(22, 3, {**PRODUCER, "transaction_timeout_ms": 10_000, "producer_id": -1,
        "producer_epoch": -1}, ("write transactional-id t",), TRANSACTION),
    Case(22, 3, {**PRODUCER, "transactional_id": None, "transaction_timeout_ms": 10_000,
        "producer_id": -1, "producer_epoch": -1}, ("idempotent-write cluster",), CLUSTER),
    Case(23, 3, {"replica_id": -1, "topics": topics("topic", current_leader_epoch=-1,
        leader_epoch=0)}, ("describe topic orders",), TOPIC),
    Case(24, 3, {"v3_and_below_transactional_id": "t", "v3_and_below_producer_id": 7,
        "v3_and_below_producer_epoch": 0,
        "v3_and_below_topics": [{"name": ORDERS, "partitions": [0]}]},
        ("write transactional-id t", "write topic orders"), TRANSACTION),
    Case(25, 3, {**PRODUCER, "group_id": "g"}, ("write transactional-id t", READ_GROUP),
        TRANSACTION),
    Case(26, 3, PRODUCER, ("write transactional-id t",), TRANSACTION),
    Case(28, 3, {**PRODUCER, **MEMBER, "topics": topics(**OFFSET)},
        ("write transactional-id t", READ_GROUP, READ_TOPIC), TRANSACTION),
    Case(27, 1, {"markers": [{"producer_id": 7, "producer_epoch": 0, "transaction_result": False,
        "coordinator_epoch": 0, "topics": [{"name": ORDERS, "partition_indexes": [0]}]}]},
        ("alter cluster",), CLUSTER),
    Case(55, 1, {"topics": [{"topic_name": "__cluster_metadata", "partitions": [
        {"partition_index": 0}]}]}, ("describe cluster",), CLUSTER),
    Case(57, 1, {"timeout_ms": 1000, "validate_only": True, "feature_updates": []},
        ("alter cluster",), CLUSTER),
    Case(61, 0, {"topics": [{"name": ORDERS, "partition_indexes": [0]}]}, (READ_TOPIC,), TOPIC),
    Case(77, 1, {"group_ids": ["g"], "include_authorized_operations": True},
        ("describe group g",), GROUP),
    Case(90, 0, {"groups": [{"group_id": "s", "topics": [
        {"topic_name": ORDERS, "partitions": [0]}]}]},
        ("describe group s", "describe topic orders"), GROUP),
    Case(91, 0, SHARE_START, ("read group s", READ_TOPIC), GROUP),
    Case(92, 0, {"group_id": "s", "topics": [{"topic_name": ORDERS}]},
        ("delete group s", "read group s", READ_TOPIC), GROUP),
    Case(29, 3, RULE, ("describe cluster",), CLUSTER),
    Case(30, 3, {"creations": [{"resource_type": 2, "resource_name": "x", "host": "*",
        "resource_pattern_type": 3, "principal": "User:x", "operation": 3, "permission_type": 3}]},
        ("alter cluster",), CLUSTER),
    Case(31, 3, {"filters": [RULE]}, ("alter cluster",), CLUSTER),
    Case(48, 1, {"components": [], "strict": False}, ("describe-configs cluster",), CLUSTER),
    Case(49, 1, {"validate_only": True, "entries": [{
        "entity": [{"entity_type": "user", "entity_name": "x"}],
        "ops": [{"key": "request_rate", "value": 9.0, "remove": False}]}]},
        ("alter-configs cluster",), CLUSTER),
    Case(50, 0, {"users": None}, ("describe cluster",), CLUSTER),
    Case(51, 0, {"deletions": [{"name": "x", "mechanism": 1}], "upsertions": []},
        ("alter cluster",), CLUSTER),
    Case(32, 4, {"include_synonyms": False, "include_documentation": False, "resources": [
        {"resource_type": 2, "resource_name": ORDERS, "configuration_keys": None}]},
        ("describe-configs topic orders",), TOPIC),
    Case(32, 4, {"include_synonyms": False, "include_documentation": False, "resources": [
        {"resource_type": 4, "resource_name": "0", "configuration_keys": None}]},
        ("describe-configs cluster",), CLUSTER),
    Case(33, 2, {"validate_only": True, "resources": [
        {"resource_type": 2, "resource_name": ORDERS, "configs": [CONFIG]}]},
        ("alter-configs topic orders",), TOPIC),
    Case(34, 2, {"dirs": [{"path": "/x", "topics": [{"name": ORDERS, "partitions": [0]}]}]},
        ("alter cluster",), CLUSTER),
    Case(35, 3, {"topics": None}, ("describe cluster",), CLUSTER),
    Case(37, 3, {"timeout_ms": 1000, "validate_only": True, "topics": [
        {"name": ORDERS, "count": 3, "assignments": None}]}, ("alter topic orders",), TOPIC),
    Case(42, 2, {"groups_names": ["g"]}, ("delete group g",), GROUP),
    Case(43, 2, {"election_type": 0, "timeout_ms": 1000, "topic_partitions": [
        {"topic": ORDERS, "partitions": [0]}]}, ("alter cluster",), CLUSTER),
    Case(44, 1, {"validate_only": True, "resources": [
        {"resource_type": 2, "resource_name": ORDERS, "configs": [CONFIG]}]},
        ("alter-configs topic orders",), TOPIC),
    Case(44, 1, {"validate_only": True, "resources": [
        {"resource_type": 4, "resource_name": "", "configs": [
            {"name": "log_level", "value": "info", "config_operation": 0}]}]},
        ("alter-configs cluster",), CLUSTER),
    Case(45, 0, {"timeout_ms": 1000, "topics": [{"name": ORDERS, "partitions": [
        {"partition_index": 0, "replicas": [0]}]}]}, ("alter cluster",), CLUSTER),
    Case(46, 0, {"timeout_ms": 1000, "topics": None}, ("describe cluster",), CLUSTER),
    Case(47, 0, {"group_id": "g", "topics": topics()},
        ("delete group g", READ_GROUP, READ_TOPIC), GROUP),
    Case(65, 0, {"transactional_ids": ["t"]}, ("describe transactional-id t",), TRANSACTION),
    Case(68, 1, BEAT, ("read group c", READ_TOPIC), GROUP),
    Case(69, 1, {"group_ids": ["g"], "include_authorized_operations": False},
        ("describe group g",), GROUP),
    Case(74, 1, {"resource_types": []}, ("describe-configs cluster",), CLUSTER),
    Case(75, 0, {"topics": [{"name": ORDERS}], "response_partition_limit": 10, "cursor": None},
        ("describe topic orders",), TOPIC),
    Case(76, 1, {**BEAT, "group_id": "s"},
        ("read group s", READ_TOPIC), GROUP),
    Case(78, 1, {"group_id": "s", "member_id": "m", "share_session_epoch": 0, "max_wait_ms": 0,
        "min_bytes": 0, "max_bytes": 1000, "max_records": 1, "batch_size": 1, "topics": [],
        "forgotten_topics_data": []}, ("read group s",), GROUP),
    Case(79, 1, {"group_id": "s", "member_id": "m", "share_session_epoch": 1, "topics": []},
        ("read group s",), GROUP),
]  # fmt: skip
LISTS = {16, 66}
"""APIs that need nothing, and list what the user may describe."""
OPEN = {17, 18, 36, 60}


def test_every_api_has_a_case() -> None:
    assert {case.api for case in CASES} | LISTS | OPEN == set(APIS)


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    settings = {"kafka.listen": "127.0.0.1:0", "kafka.sasl.plain_without_tls": "true"}
    with secured(tmp_path_factory.mktemp("rights"), **settings) as found:
        found.admin.create_topics([NewTopic(ORDERS), NewTopic("hidden")])
        fields = fields_of(PASSWORD)
        found.admin.add_user("nobody", **fields)
        found.admin.add_user("root", admin=True, **fields)
        rules = []
        for number, case in enumerate(CASES):
            for left_out in range(-1, len(case.needs)):
                name = f"u{number}.{left_out}"
                found.admin.add_user(name, **fields)
                rules += [
                    acl(f"User:{name}", need)
                    for at, need in enumerate(case.needs)
                    if at != left_out
                ]
        found.admin.add_acls(rules)
        with connect(found, "root") as client:  # the share group of cases is there
            client.ask(91, 0, SHARE_START)
        yield found


def codes(value: Any) -> set[int]:
    """All error codes of a response."""
    if isinstance(value, dict):
        own = {code for name, code in value.items() if name.endswith("error_code") and code}
        return own.union(*(codes(each) for each in value.values()))
    return set().union(*(codes(each) for each in value)) if isinstance(value, list) else set()


def asked(users: Users, user: str, case: Case) -> set[int]:
    request = dict(case.request)
    if case.api in (68, 76):  # a member of a group belongs to the user who has joined it
        request["member_id"] = str(uuid.uuid4())
    with connect(users, user) as client:
        return codes(client.ask(case.api, case.version, request))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c.api}" for c in CASES])
def test_an_api_needs_each_of_its_rights_and_no_other(users: Users, number: int) -> None:
    case = CASES[number]
    assert asked(users, "nobody", case) == {case.denial}
    assert not asked(users, f"u{number}.-1", case) & DENIALS
    assert not asked(users, "root", case) & DENIALS
    for left_out, need in enumerate(case.needs):
        found = asked(users, f"u{number}.{left_out}", case)
        assert found & DENIALS == {DENIAL_OF[need.split()[1]]}, f"without {need}"


def test_a_member_that_may_see_a_topic_and_not_read_it_is_refused_for_the_topic(
    users: Users,
) -> None:
    """It was refused for the group (68), or told to join again, for ever (76)."""
    add(users, "seeing", "read group c", "read group s", "describe topic orders")
    with connect(users, "seeing") as client:
        for api, group in ((68, "c"), (76, "s")):
            beat = {**BEAT, "group_id": group, "member_id": str(uuid.uuid4())}
            assert codes(client.ask(api, 1, beat)) == {TOPIC}


def test_a_member_whose_topic_may_not_be_read_any_more_is_refused_for_the_topic(
    users: Users,
) -> None:
    """It was refused for the group, which ends Java's consumers. It goes on with the right."""
    add(users, "withdrawn", "read group c", READ_TOPIC)
    beat = {**BEAT, "group_id": "c", "member_id": str(uuid.uuid4())}
    with connect(users, "withdrawn") as client:
        beat["member_epoch"] = client.ask(68, 1, beat)["member_epoch"]
        beat |= {"subscribed_topic_names": None, "topic_partitions": None}
        assert not codes(client.ask(68, 1, beat))
        users.admin.remove_acls([{"principal": "User:withdrawn", "resource_type": "topic"}])
        wait_until(lambda: codes(client.ask(68, 1, beat)) == {TOPIC}, "the rule is gone")
        users.allow("User:withdrawn", READ_TOPIC)
        wait_until(lambda: not codes(client.ask(68, 1, beat)), "the rule is back")


def test_a_pattern_takes_the_topics_that_its_user_may_read_at_the_time(users: Users) -> None:
    """The member was refused, for the group, until it had timed out."""
    for name in ("seen-first", "seen-next"):
        users.admin.create_topics([NewTopic(name, 1)])
    add(users, "matching", "read group c", "read topic seen-first", "describe topic seen-next")
    beat = {
        **BEAT, "group_id": "c", "member_id": str(uuid.uuid4()), "subscribed_topic_names": None,
        "subscribed_topic_regex": "seen-.*",
    }  # fmt: skip
    with connect(users, "matching") as client:

        def assigned() -> set[str]:
            response = client.ask(68, 1, beat)
            assert not codes(response)
            beat.update(
                member_epoch=response["member_epoch"], subscribed_topic_regex=None,
                topic_partitions=None,
            )  # fmt: skip
            if response["assignment"] is not None:
                beat["topic_partitions"] = response["assignment"]["topic_partitions"]
                found.clear()
                given = response["assignment"]["topic_partitions"]
                found.update(names[bytes(each["topic_id"])] for each in given)
            return found

        found: set[str] = set()
        described = users.admin.describe_topics(["seen-first", "seen-next"])
        names = {bytes.fromhex(str(each["topic_id"])): name for name, each in described.items()}
        wait_until(lambda: assigned() == {"seen-first"}, "what it may read")
        users.allow("User:matching", "read topic seen-next")
        wait_until(lambda: assigned() == {"seen-first", "seen-next"}, "a right that came later")
        users.admin.remove_acls(
            [{"principal": "User:matching", "resource_type": "topic", "name": "seen-first"}]
        )
        wait_until(lambda: assigned() == {"seen-next"}, "a right that was withdrawn")
    users.admin.delete_topics(["seen-first", "seen-next"])


def test_a_share_session_whose_topic_may_not_be_read_any_more_is_told_so(users: Users) -> None:
    """It was told to join again, which it did at once, for ever."""
    topic_id = bytes.fromhex(str(users.admin.describe_topics(ORDERS)[ORDERS]["topic_id"]))
    add(users, "leaving", "read group queue-of-leaving", READ_TOPIC)
    asked: dict[str, Any] = {
        "group_id": "queue-of-leaving", "member_id": "m", "share_session_epoch": 0,
        "max_wait_ms": 0, "min_bytes": 0, "max_bytes": 1000, "max_records": 1, "batch_size": 1,
        "topics": [{"topic_id": topic_id, "partitions": [
            {"partition_index": 0, "acknowledgement_batches": []}]}],
        "forgotten_topics_data": [],
    }  # fmt: skip
    with connect(users, "leaving") as client:
        assert not codes(client.ask(76, 1, {**BEAT, "group_id": "queue-of-leaving"}))
        assert not codes(client.ask(78, 1, asked))
        asked["topics"] = []
        users.admin.remove_acls([{"principal": "User:leaving", "resource_type": "topic"}])

        answers: list[dict[str, Any]] = []

        def is_refused() -> bool:
            asked["share_session_epoch"] += 1
            answers.append(client.ask(78, 1, asked))
            return bool(codes(answers[-1]))

        wait_until(is_refused, "the rule is gone")
        assert answers[-1]["error_code"] == 0
        (entry,) = answers[-1]["responses"][0]["partitions"]
        assert (entry["partition_index"], entry["error_code"]) == (0, TOPIC)


def test_lists_have_what_their_reader_may_describe(users: Users, tmp_path: pathlib.Path) -> None:
    fields = fields_of(PASSWORD)
    users.admin.add_user("reader", **fields)
    users.allow("User:reader", "read topic orders", "describe group g")
    with connect(users, "root") as root:
        for group in ("g", "h"):
            case = next(case for case in CASES if case.api == 8)
            assert not codes(root.ask(8, 8, {**case.request, "group_id": group}))
        every = root.ask(16, 4, {"states_filter": []})["groups"]
        assert {"g", "h"} <= {group["group_id"] for group in every}
        assert len(root.ask(3, 9, {"topics": None})["topics"]) == 2
    with connect(users, "reader") as reader:
        groups = reader.ask(16, 4, {"states_filter": []})["groups"]
        assert [group["group_id"] for group in groups] == ["g"]
        found = reader.ask(
            3, 8,
            {"topics": None, "allow_auto_topic_creation": False,
             "include_cluster_authorized_operations": True,
             "include_topic_authorized_operations": True},
        )  # fmt: skip
        assert [topic["name"] for topic in found["topics"]] == [ORDERS]
        assert found["topics"][0]["topic_authorized_operations"] == 1 << 3 | 1 << 8
        assert found["cluster_authorized_operations"] == 0
        page = reader.ask(75, 0, {"topics": [], "response_partition_limit": 10, "cursor": None})
        assert [topic["name"] for topic in page["topics"]] == [ORDERS]
        directories = reader.ask(35, 3, {"topics": None})
        assert directories["results"] == []
        assert reader.ask(66, 0, {"state_filters": [], "producer_id_filters": []})[
            "transaction_states"
        ] == []  # fmt: skip


def test_what_is_hidden_looks_like_what_is_not_there(users: Users) -> None:
    with connect(users, "root") as root:
        found = root.ask(3, 12, {"topics": [{"name": "hidden", "topic_id": ZERO_UUID}]})
        hidden = found["topics"][0]["topic_id"]
    with connect(users, "nobody") as client:
        for name in ("hidden", "missing"):
            [topic] = client.ask(3, 9, {"topics": [{"name": name}]})["topics"]
            assert (topic["error_code"], topic["name"], topic["partitions"]) == (TOPIC, name, [])
        missing = uuid.UUID(int=5).bytes
        for topic_id in (hidden, missing):
            asked = {"topics": [{"name": None, "topic_id": topic_id}]}
            [topic] = client.ask(3, 12, asked)["topics"]
            assert (topic["error_code"], topic["topic_id"]) == (UNKNOWN_ID, topic_id)
            fetch = next(case for case in CASES if case.api == 1)
            partitions = fetch.request["topics"][0]["partitions"]
            request = {
                **fetch.request, "topics": [{"topic_id": topic_id, "partitions": partitions}]
            }  # fmt: skip
            assert codes(client.ask(1, 13, request)) == {UNKNOWN_ID}
            answer = client.ask(
                20, 6, {"topics": [{"name": None, "topic_id": topic_id}], "timeout_ms": 1}
            )
            assert codes(answer) == {UNKNOWN_ID}


def test_a_denied_coordinator_says_which_right_is_missing(users: Users) -> None:
    add(users, "seeking", "describe group mine")
    with connect(users, "seeking") as client:
        old = client.ask(10, 3, {"key": "theirs", "key_type": 0})
        assert old["error_code"] == GROUP
        asked = {"key_type": 0, "coordinator_keys": ["theirs", "mine"]}
        found = {each["key"]: each for each in client.ask(10, 4, asked)["coordinators"]}
        assert (found["mine"]["error_code"], found["mine"]["node_id"]) == (0, 0)
        assert (found["theirs"]["error_code"], found["theirs"]["node_id"]) == (GROUP, -1)
        for answer in (old, found["theirs"]):
            assert "seeking" in answer["error_message"]
            assert "describe" in answer["error_message"]
            assert "theirs" in answer["error_message"]
        other = client.ask(10, 6, {"key_type": 2, "coordinator_keys": ["g:t:0"]})["coordinators"]
        assert other[0]["error_code"] == CLUSTER
        assert "of groups and transactional ids alone" in other[0]["error_message"]


def test_one_topic_of_a_request_is_denied_and_the_other_is_served(users: Users) -> None:
    users.admin.add_user("half", **fields_of(PASSWORD))
    users.allow("User:half", "describe topic orders")
    with connect(users, "half") as client:
        partition = {"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}
        answer = client.ask(
            2, 6,
            {"replica_id": -1, "isolation_level": 0,
             "topics": [{"name": name, "partitions": [partition]} for name in ("hidden", ORDERS)]},
        )  # fmt: skip
        found = {topic["name"]: topic["partitions"][0]["error_code"] for topic in answer["topics"]}
        assert found == {"hidden": TOPIC, ORDERS: 0}


def test_a_producer_without_acknowledgements_learns_of_its_denial_by_the_end(users: Users) -> None:
    case = CASES[0]
    with connect(users, "nobody") as client:
        client.send(0, 9, {**case.request, "acks": 0})
        assert client.receive_bytes() is None


def test_a_rule_is_for_its_host_alone(users: Users) -> None:
    users.admin.add_user("near", **fields_of(PASSWORD))
    users.admin.add_acls(
        [{**acl("User:near", "describe topic orders"), "host": host} for host in ("10.9.8.7",)]
    )
    case = next(case for case in CASES if case.api == 3)
    assert asked(users, "near", case) == {TOPIC}
    users.admin.add_acls([{**acl("User:near", "describe topic orders"), "host": "127.0.0.1"}])
    assert asked(users, "near", case) == set()
    users.admin.add_acls(
        [{**acl("User:near", "describe topic orders", "deny"), "host": "127.0.0.1"}]
    )
    assert asked(users, "near", case) == {TOPIC}


def test_offsets_in_the_transaction_of_another_user_are_refused(users: Users) -> None:
    for name in ("ann", "bob"):
        rights = ("write transactional-id of-ann", READ_GROUP, READ_TOPIC)
        users.add(name, *rights, **fields_of(PASSWORD))
    with connect(users, "ann") as ann, connect(users, "bob") as bob:
        begun = ann.ask(22, 4, {"transactional_id": "of-ann", "transaction_timeout_ms": 60_000,
                                "producer_id": -1, "producer_epoch": -1})  # fmt: skip
        producer = {"transactional_id": "of-ann", "producer_id": begun["producer_id"],
                    "producer_epoch": begun["producer_epoch"]}  # fmt: skip
        found = []
        for client, offset in ((ann, 0), (bob, 9)):
            of = topics(**{**OFFSET, "committed_offset": offset})
            found.append(codes(client.ask(28, 3, {**MEMBER, **producer, "generation_id": -1,
                                                  "member_id": "", "topics": of})))  # fmt: skip
        assert found == [set(), {TRANSACTION}]
        assert codes(ann.ask(26, 3, {**producer, "committed": True})) == set()
    (committed,) = users.admin.list_group_offsets("g").values()
    assert committed is not None
    assert committed.offset == 0


def test_a_member_id_of_another_user_is_no_member(users: Users) -> None:
    topic_id = bytes.fromhex(str(users.admin.describe_topics(ORDERS)[ORDERS]["topic_id"]))
    for name in ("owner", "stranger"):
        users.admin.add_user(name, **fields_of(PASSWORD))
        users.allow(f"User:{name}", "read group theirs", "read topic orders")
    beat = {**BEAT, "group_id": "theirs", "member_id": "mine"}
    place = {"topic_id": topic_id, "partitions": [{"partition_index": 0,
             "acknowledgement_batches": []}]}  # fmt: skip
    batch = {"first_offset": 0, "last_offset": 0, "acknowledge_types": [1]}
    fetch = {"group_id": "theirs", "member_id": "mine", "share_session_epoch": 0,
             "max_wait_ms": 0, "min_bytes": 0, "max_bytes": 1000, "max_records": 1,
             "batch_size": 1, "topics": [place], "forgotten_topics_data": []}  # fmt: skip
    acknowledged = {**place, "partitions": [{"partition_index": 0,
                    "acknowledgement_batches": [batch]}]}  # fmt: skip
    with connect(users, "owner") as owner, connect(users, "stranger") as stranger:
        joined = owner.ask(76, 1, beat)
        assert not joined["error_code"]
        for epoch in (0, joined["member_epoch"], -1):
            found = stranger.ask(76, 1, {**beat, "member_epoch": epoch})
            assert found["error_code"] == KafkaError.UNKNOWN_MEMBER_ID, epoch
        assert codes(stranger.ask(78, 1, fetch)) == {KafkaError.UNKNOWN_MEMBER_ID}
        asked = {"group_id": "theirs", "member_id": "mine", "share_session_epoch": 1,
                 "topics": [acknowledged]}  # fmt: skip
        assert codes(stranger.ask(79, 1, asked)) == {KafkaError.UNKNOWN_MEMBER_ID}
        assert not codes(owner.ask(78, 1, fetch)), "the owner's goes on"


def test_who_may_read_a_topic_sees_the_open_transactions_of_others_in_it(users: Users) -> None:
    users.add("watcher", READ_TOPIC, **fields_of(PASSWORD))
    address = admin_address(users.appliance)
    with Producer(address, transactional_id="not-the-watchers") as producer:
        producer.begin_transaction()
        offset = producer.send(ORDERS, b"x", partition=0).result().offset
        with connect(users, "watcher") as watcher:
            asked = {"topics": [{"name": name, "partition_indexes": [0]}
                                for name in (ORDERS, "hidden")]}  # fmt: skip

            def start_offset() -> int:
                shown, _ = watcher.ask(61, 0, asked)["topics"]
                (one,) = shown["partitions"][0]["active_producers"]
                return int(one["current_txn_start_offset"])

            # The coordinator hears of an open transaction a moment after its first batch.
            wait_until(lambda: start_offset() == offset, "the transaction is shown as open")
            _, denied = watcher.ask(61, 0, asked)["topics"]
            listed = watcher.ask(66, 0, {"state_filters": [], "producer_id_filters": []})
        producer.abort_transaction()
    assert (codes(denied), listed["transaction_states"]) == ({TOPIC}, [])
