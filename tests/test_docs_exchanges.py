"""The exchanges of docs/protocol.md, recorded from a running appliance."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from tailrace import Admin, NewTopic, Producer, embedded
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.protocol import credit_messages, fetch_messages, produce_messages
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import (
    API_VERSIONS,
    PUSH_CORRELATION_ID,
    Api,
    decode_response_header,
    encode_request,
)
from tests.kit.batches import make_batch
from tests.kit.runs.documents import ROOT, check_part

MEMBERS = [f"7c1d9a52-0000-4000-8000-00000000000{number}" for number in (1, 2)]


def dump(
    title: str, frames: Sequence[bytes], masks: Sequence[Sequence[tuple[int, int]]], shown: int = 3
) -> str:
    """Frames as hexadecimal, 16 bytes a line; masked ranges as dots."""
    lines = [f"{title}\n"]
    for number, frame in enumerate(frames):
        lines.append(
            f"  frame {number + 1}, {len(frame)} bytes\n"
            if number < shown
            else f"  frame {number + 1}: the batch\n"
        )
        if number >= shown:
            continue
        hidden = {
            index
            for start, end in (masks[number] if number < len(masks) else ())
            for index in range(start, end)
        }
        for at in range(0, len(frame), 16):
            cells = [
                ".." if at + i in hidden else f"{byte:02x}"
                for i, byte in enumerate(frame[at : at + 16])
            ]
            lines.append(f"    {at:04x}  {' '.join(cells)}\n")
    return "".join(lines)


GENERATION = (32, 36)
TOPIC_ID = (0, 16)


class Raw:
    """A client that speaks in frames."""

    def __init__(self, address: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.connect(address)
        self._correlation_id = 0
        self.answer: dict[str, Any] = {}
        """The body of the newest response to `ask`."""

    def exchange(
        self, api: int, body: Sequence[bytes], version: int | None = None
    ) -> tuple[list[bytes], list[bytes]]:
        """(request, response), in frames; pushes are passed over."""
        self._correlation_id += 1
        if version is None:
            version = API_VERSIONS[Api(api)][1] if api in API_VERSIONS else 1
        request = [
            bytes(frame) for frame in encode_request(api, version, self._correlation_id, body)
        ]
        self.socket.send_multipart(request)
        response = self.socket.recv_multipart()
        while (
            api != Api.CREDIT
            and decode_response_header(response[0]).correlation_id == PUSH_CORRELATION_ID
        ):
            response = self.socket.recv_multipart()
        return request, response

    def ask(self, api: Api, value: dict[str, Any]) -> str:
        """An exchange in JSON, as text; what differs from run to run is left out. It must have
        succeeded.
        """
        _, response = self.exchange(api, [requests.encode_json(value)])
        header = decode_response_header(response[0])
        assert not header.error, response[1]
        self.answer = requests.decode_json(response[1])
        answer = _without_what_varies(self.answer)
        return _TOPIC_ID.sub(
            '"<topic id>"',
            f"{api.name} {json.dumps(_without_what_varies(value))}\n  {json.dumps(answer)}\n",
        )

    def push(self) -> list[bytes]:
        """The next push about a group, in frames."""
        while True:
            frames = self.socket.recv_multipart()
            header = decode_response_header(frames[0])
            assert header.correlation_id == PUSH_CORRELATION_ID
            if header.api == Api.GROUP_HEARTBEAT:
                return frames


_VARIES = {
    "topic_id", "schema", "settings", "generation", "cluster_id", "delay_id", "due_us",
    "next_due_us", "max_timestamp_us", "size_bytes", "producer_id",
    "processes", "data_dirs", "bytes", "cursor", "saved_cursor", "is_settled", "files",
    "memory_bytes", "schema_id", "session", "delay_log", "port",
    "lateness_us", "created_us", "last_append_us", "catalog_version", "created_ms",
    "empty_since_ms", "last_heartbeat_ms_ago", "committed_ms", "owner", "owned_ms", "wall_ms",
    "workers_pending", "unsettled", "time_us", "decision_seconds",
}  # fmt: skip
_TOPIC_ID = re.compile(r'"[0-9a-f]{32}"')
_WALL_MS_MIN = 1_600_000_000_000


def _without_what_varies(value: Any, name: str = "") -> Any:
    if name in _VARIES:
        return "..."
    if isinstance(value, dict):
        return {key: _without_what_varies(item, key) for key, item in value.items()}
    if (
        isinstance(value, int) and _WALL_MS_MIN < value < 100 * _WALL_MS_MIN
    ):  # the time in a row of FETCH_OFFSETS
        return "..."
    return [_without_what_varies(item) for item in value] if isinstance(value, list) else value


def handshake(client: Raw) -> Iterator[str]:
    versions = {str(int(api)): list(span) for api, span in API_VERSIONS.items()}
    request, response = client.exchange(
        Api.HANDSHAKE, [requests.encode_json({"versions": versions, "client_id": "dump"})]
    )
    yield dump("HANDSHAKE request", request, [])
    # The answer's JSON holds numbers of varying length: it is shown as text, behind its header.
    answer = json.dumps(_without_what_varies(requests.decode_json(response[1])))
    shown = dump("HANDSHAKE response", response[:1], [[(20, 24), (24, 32), GENERATION]])
    yield f"{shown}  frame 2: {answer}\n"
    request, response = client.exchange(Api.PING, [])
    yield dump("PING request", request, [])
    yield dump("PING response", response, [[(24, 32), GENERATION]])


def topic_of_orders(client: Raw) -> Iterator[str]:
    yield client.ask(
        Api.CREATE_TOPICS,
        {
            "topics": [
                {
                    "name": "orders",
                    "partitions": 2,
                    "configs": {"delay.enabled": True},
                    "schema": None,
                }
            ]
        },
    )
    yield client.ask(Api.METADATA, {"topics": ["orders"]})
    yield client.ask(Api.INIT_PRODUCER_ID, {})


def produce(client: Raw, info: TopicInfo) -> Iterator[str]:
    """Two versions of PRODUCE."""
    batch = bytes(make_batch(2, seed=info.seeds[0], schema_id=info.schema_id))
    other_batch = bytes(make_batch(3, seed=info.seeds[1], schema_id=info.schema_id))
    entries = [
        produce_messages.ProduceEntry(info.topic_id, p, 0, len(made))
        for p, made in ((0, batch), (1, other_batch), (2, batch))
    ]
    head = produce_messages.encode_produce_batches(
        produce_messages.ProduceBatches(produce_messages.ACKS_ALL, 30_000, entries)
    )
    request, response = client.exchange(Api.PRODUCE, [head, batch + other_batch, batch])
    ids = [(at, at + 16) for at in range(16, len(head), 32)]
    yield dump(
        "PRODUCE request, acks=all: two batches in one frame, a third for a partition "
        "that is not there",
        request,
        [[], ids],
        shown=2,
    )
    times = [(at + 16, at + 24) for at in range(8, 56, 24)]
    yield dump("PRODUCE response", response, [[(24, 32), GENERATION], times])
    body = [
        produce_messages.encode_produce(
            produce_messages.ProduceRequest(info.topic_id, 0, produce_messages.ACKS_ALL, 30_000)
        ),
        batch,
    ]
    request, response = client.exchange(Api.PRODUCE, body, 1)
    yield dump("PRODUCE request of version 1, acks=all", request, [[], [TOPIC_ID]], shown=2)
    yield dump("its response", response, [[(24, 32), GENERATION], [(8, 16)]])


def fetch_and_credit(client: Raw, info: TopicInfo) -> Iterator[str]:
    fetch = fetch_messages.FetchRequest(
        500, 1, 1 << 20, 0, [fetch_messages.FetchEntry(info.topic_id, 0, -1, 0, 1 << 20)]
    )
    request, response = client.exchange(Api.FETCH, [fetch_messages.encode_fetch(fetch)])
    assert not decode_response_header(response[0]).error
    assert len(response) == 3
    yield dump("FETCH request", request, [[], [(24, 40)]])
    yield dump("FETCH response", response, [[(24, 32), GENERATION], [(8, 24)]], shown=2)
    request, response = client.exchange(Api.CREDIT, [credit_messages.encode_credit(1 << 20)])
    yield dump("CREDIT request", request, [])
    yield dump("the push that answers it", response, [[(24, 32), GENERATION]])


def offsets(client: Raw) -> Iterator[str]:
    yield client.ask(
        Api.LIST_OFFSETS,
        {"partitions": [{"topic": "orders", "partition": 0, "at": "latest"}]},
    )
    yield client.ask(
        Api.LIST_OFFSETS,
        {"partitions": [{"topic": "orders", "partition": 0, "at": 1_700_000_000_000_001}]},
    )
    yield client.ask(
        Api.LEASE_OFFSETS,
        {
            "lease": "reader",
            "topic": "orders",
            "partition": 0,
            "offset": 0,
            "ttl_ms": 60_000,
        },
    )


def delays(client: Raw, address: str) -> Iterator[str]:
    with Producer(address) as producer:
        delay = producer.send("orders", b"later", b"u1", deliver_after=dt.timedelta(days=1)).result(
            60
        )
    yield client.ask(Api.LIST_DELAYS, {"topic": "orders", "limit": 10})
    yield client.ask(
        Api.CHANGE_DELAYS,
        {"changes": [{"delay_id": delay.delay_id, "due_us": None}], "topic": "orders"},
    )
    yield client.ask(Api.DESCRIBE_DELAYS, {})


def changed_topics(client: Raw) -> Iterator[str]:
    yield client.ask(Api.DELETE_RECORDS, {"topics": [{"name": "orders", "partitions": {"0": -1}}]})
    yield client.ask(
        Api.ALTER_TOPICS,
        {"topics": [{"name": "orders", "configs": {"retention.ms": 3_600_000}}]},
    )
    yield client.ask(Api.DESCRIBE_SCHEMAS, {"topic": "orders"})
    users = {"name": "users", "configs": {"cleanup.policy": "compact"}}
    yield client.ask(Api.CREATE_TOPICS, {"topics": [users]})
    yield client.ask(Api.COMPACT_TOPIC, {"name": "users", "number": 1})


def configuration(client: Raw) -> Iterator[str]:
    yield client.ask(Api.DESCRIBE_CLUSTER, {})
    yield client.ask(Api.ALTER_CONFIGS, {"set": {"groups.max": 500}, "unset": []})
    yield client.ask(Api.DESCRIBE_CONFIGS, {"names": ["groups.max", "slots"]})
    yield client.ask(Api.RELOAD_CONFIG, {})
    change = {"user": "alice", "client": None, "set": {"producer_byte_rate": "10MiB"}}
    yield client.ask(Api.ALTER_QUOTAS, {"changes": [change]})
    yield client.ask(Api.DESCRIBE_QUOTAS, {})


def users_and_rights(client: Raw) -> Iterator[str]:
    yield client.ask(Api.ALTER_USERS, {"user": "shop", "action": "add", "groups": ["sales"]})
    yield client.ask(Api.LIST_USERS, {"name": "shop"})
    acl = {
        "principal": "User:shop", "resource_type": "topic", "name": "orders",
        "operation": "write",
    }  # fmt: skip
    yield client.ask(Api.ALTER_ACLS, {"add": [acl]})
    yield client.ask(Api.LIST_ACLS, {"filter": {"name": "orders"}})
    yield client.ask(Api.TEST_ACL, {**acl, "operation": "describe"})


def deleted_topics(client: Raw) -> Iterator[str]:
    yield client.ask(Api.DELETE_TOPICS, {"topics": [{"name": "orders"}]})
    yield client.ask(Api.LIST_DELETED_TOPICS, {"after": None})
    yield client.ask(Api.UNDELETE_TOPICS, {"topics": [{"name": "orders"}]})
    yield client.ask(Api.PURGE_TOPICS, {"topics": [{"name": "orders"}]})


def unknown_api(client: Raw) -> Iterator[str]:
    request, response = client.exchange(999, [])
    yield dump("A request with an unknown API number", request, [])
    yield dump("its answer", response, [[(24, 32), GENERATION], []])


def consumer_group(first: Raw, second: Raw, topic_id: str) -> Iterator[str]:
    """Two members share a topic of two partitions; one commits and leaves; an operator looks, moves
    the offsets and deletes the group.
    """
    one, other = ({"group": "billing", "member_id": member_id} for member_id in MEMBERS)
    joins = {
        "member_epoch": 0, "topics": ["payments"], "follows_catalog": False, "assignor": "sticky",
        "session_timeout_ms": 45_000,
        "rebalance_timeout_ms": 300_000, "heartbeat_interval_ms": 3_000, "client_id": "dump",
        "owned": {},
    }  # fmt: skip
    beat = Api.GROUP_HEARTBEAT
    yield "The first member joins, gets both partitions, and reports them as owned:\n"
    yield first.ask(beat, {**one, **joins})
    yield first.ask(beat, {**one, "member_epoch": 1, "owned": {topic_id: [0, 1]}})
    yield first.ask(beat, {**one, "member_epoch": 1})
    yield "A second member joins over another connection, and waits:\n"
    yield second.ask(beat, {**other, **joins})
    yield "The first gets a push, commits, and gives a partition back; the second gets it:\n"
    header, body = first.push()
    yield dump("the push", [header], [[(24, 32), GENERATION]]) + f"  frame 2: {body.decode()}\n"
    yield first.ask(beat, {**one, "member_epoch": 1})
    yield first.ask(
        Api.COMMIT_OFFSETS,
        {
            **one,
            "member_epoch": 1,
            "offsets": [["payments", 0, 3, 0, "by hand"], ["payments", 1, 9, -1, ""]],
        },
    )
    yield first.ask(beat, {**one, "member_epoch": 1, "owned": {topic_id: [0]}})
    second.push()
    yield second.ask(beat, {**other, "member_epoch": 2})
    yield second.ask(beat, {**other, "member_epoch": 2, "owned": {topic_id: [1]}})
    yield "Offsets, groups, members and partitions:\n"
    yield first.ask(
        Api.FETCH_OFFSETS, {"group": "billing", "partitions": [["payments", 0], ["payments", 1]]}
    )
    yield first.ask(Api.LIST_GROUPS, {"after": ""})
    yield first.ask(Api.DESCRIBE_GROUP, {"group": "billing", "part": "members", "after": None})
    yield first.ask(Api.DESCRIBE_GROUP, {"group": "billing", "part": "partitions", "after": None})
    yield "Both leave. Then offsets are altered, and the group is deleted:\n"
    yield first.ask(beat, {**one, "member_epoch": -1})
    second.ask(beat, {**other, "member_epoch": -1})
    yield first.ask(
        Api.ALTER_GROUP_OFFSETS,
        {"group": "billing", "offsets": [["payments", 0, 0, ""], ["payments", 1, None, ""]]},
    )
    yield first.ask(Api.DELETE_GROUPS, {"groups": ["billing"]})


def share_group(client: Raw, topic_id: str) -> Iterator[str]:
    """A member of a share group acquires and acknowledges."""
    worker = {"group": "workers", "kind": "share", "member_id": MEMBERS[0]}
    yield (
        "A share group: a member joins, acquires, accepts two records, and releases one while it "
        "acquires again:\n"
    )
    yield client.ask(
        Api.GROUP_HEARTBEAT,
        {
            **worker,
            "member_epoch": 0,
            "topics": ["payments"],
            "offset_reset": "earliest",
            "client_id": "dump",
        },
    )
    member = {"group": "workers", "member_id": MEMBERS[0], "member_epoch": 1}
    yield client.ask(
        Api.SHARE_ACQUIRE, {**member, "sequence": 1, "max_records": 3, "acknowledge": []}
    )
    yield client.ask(
        Api.SHARE_ACKNOWLEDGE,
        {**member, "sequence": 2, "acknowledge": [[topic_id, 0, 0, 1, "accept"]]},
    )
    yield client.ask(
        Api.SHARE_ACQUIRE,
        {
            **member,
            "sequence": 3,
            "max_records": 3,
            "acknowledge": [[topic_id, 0, 2, 2, "release"]],
        },
    )
    yield client.ask(Api.DESCRIBE_GROUP, {"group": "workers", "part": "partitions", "after": None})
    client.ask(Api.GROUP_HEARTBEAT, {**worker, "member_epoch": -1})
    client.ask(Api.DELETE_GROUPS, {"groups": ["workers"]})


def transactions(client: Raw) -> Iterator[str]:
    """A transaction without records, and what operators see."""
    yield (
        "A producer takes a transactional id and makes a branch, commits without records, and an "
        "operator aborts:\n"
    )
    named = {"transactional_id": "billing-1"}
    init = {**named, "timeout_ms": 60_000, "client_id": "dump", "attempt": "random-5f0c91b7"}
    yield client.ask(Api.INIT_TRANSACTIONS, init)
    owned = {key: client.answer[key] for key in ("owner", "producer_id", "producer_epoch")}
    yield client.ask(Api.DESCRIBE_TRANSACTION, {**named, "owner": owned["owner"]})
    yield client.ask(Api.CREATE_BRANCHES, {**named, **owned, "count": 1})
    yield client.ask(Api.JOIN_TRANSACTION, {**named, **owned, "attempt": "random-5f0c91b7"})
    end = {**named, **owned, "outcome": "commit", "offsets": [], "is_empty": True}
    yield client.ask(Api.END_TRANSACTION, end)
    yield client.ask(Api.ABORT_TRANSACTION, named)
    yield "A list of what is open:\n"
    yield client.ask(Api.LIST_TRANSACTIONS, {"states": ["ongoing"]})


def groups(first: Raw, second: Raw, address: str) -> Iterator[str]:
    """A consumer group and a share group of one topic."""
    with Admin(address) as admin, Producer(address) as producer:
        admin.create_topics([NewTopic("payments", partitions=2)])
        for number in range(4):
            producer.send("payments", b"%d" % number, partition=0).result(60)
        topic_id = admin.topic_info(["payments"])["payments"].topic_id.hex()
    yield from consumer_group(first, second, topic_id)
    yield from share_group(first, topic_id)
    first.ask(Api.DELETE_TOPICS, {"topics": [{"name": "payments"}]})


def exchanges(client: Raw, other: Raw, address: str) -> Iterator[str]:
    """All exchanges, in the order of the document."""
    yield from handshake(client)
    yield from topic_of_orders(client)
    with Admin(address) as admin:
        info = admin.topic_info(["orders"])["orders"]
    yield from produce(client, info)
    yield from fetch_and_credit(client, info)
    yield from offsets(client)
    yield from delays(client, address)
    list(handshake(other))
    yield from groups(client, other, address)
    yield from transactions(client)
    yield from changed_topics(client)
    yield from configuration(client)
    yield from users_and_rights(client)
    yield from deleted_topics(client)
    yield from unknown_api(client)


def test_the_exchanges_are_real_ones_and_there_is_one_for_every_api() -> None:
    with embedded(auto_create_topics=False) as appliance, contextlib.ExitStack() as stack:
        client, other = Raw(appliance.address), Raw(appliance.address)
        stack.callback(client.socket.close)
        stack.callback(other.socket.close)
        text = "\n".join(exchanges(client, other, appliance.address))
    assert all(api.name in text for api in Api), "an API has no exchange"
    check_part(ROOT / "docs/protocol.md", "exchanges", f"```\n{text}```\n")
