"""The documents are true: generated parts are what the code says, snippets run, named tests exist,
links lead somewhere.

After a change that is meant, `TAILRACE_WRITE_DOCS=1 pytest tests/test_docs.py` writes the generated
parts anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import json
import pathlib
import re
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import click
import pytest
import zmq

from appliance.cli.main import tailrace
from appliance.config.files.default_file import in_toml
from appliance.config.setting_definition import Definition
from appliance.config.settings import definitions
from appliance.config.topic_settings import LATER, TOPIC_SETTINGS
from netfront.kafka.apis.table import APIS
from netfront.kafka.wire import codec
from tailrace import Admin, NewTopic, Producer, embedded
from tailrace.client.config.settings import ConsumerSettings, ProducerSettings
from tailrace.consumer.table.settings import TableSettings
from tailrace.core.error_codes import ERROR_TABLE
from tailrace.format.record_batch.batch_header import BatchHeader
from tailrace.protocol import credit_messages, fetch_messages, produce_messages
from tailrace.protocol import frame as wire
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import (
    API_VERSIONS,
    PUSH_CORRELATION_ID,
    Api,
    decode_response_header,
    encode_request,
)
from tailrace.scanning.options import ScanSettings
from tests.kit.batches import make_batch
from tests.kit.processes import HANG_LIMIT_S
from tests.kit.runs.documents import ROOT, check_part

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_the_error_table() -> None:
    rows = [
        f"| {int(c)} | {c.name} | {'yes' if r.retriable else 'no'} | {r.meaning} | {r.advice} |\n"
        for c, r in ERROR_TABLE.items()
    ]
    check_part(
        ROOT / "docs/protocol.md",
        "errors",
        "| number | name | retriable | meaning | what to do |\n|---|---|---|---|---|\n"
        + "".join(rows),
    )


def plain_value(value: object) -> str:
    """A topic setting's value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def setting_row(definition: Definition) -> str:
    """A row of docs/configuration.md."""
    default = in_toml(definition.default).replace("|", "\\|")
    values = f"{definition.range_text}{f' {definition.unit}' if definition.unit else ''}"
    change = "reload" if definition.is_live else "restart"
    return (
        f"| `{definition.name}` | `{default}` | {values} | {change} | {definition.since} | "
        f"{definition.doc} |\n"
    )


def test_the_table_of_the_appliances_settings() -> None:
    check_part(
        ROOT / "docs/configuration.md",
        "settings",
        "| setting | default | values | applied by | since | |\n|---|---|---|---|---|---|\n"
        + "".join(setting_row(definition) for definition in definitions().values()),
    )


def test_the_settings_tables() -> None:
    rows = [
        f"| `{s.name}` | `{plain_value(s.default)}` | {s.doc} |\n" for s in TOPIC_SETTINGS.values()
    ]
    later = (
        "\nNot in this version, and refused rather than ignored: "
        f"{', '.join(f'`{name}`' for name in LATER)}.\n"
    )
    check_part(
        ROOT / "docs/operations.md",
        "topic settings",
        "| setting | default | |\n|---|---|---|\n" + "".join(rows) + later,
    )


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command below `group`, with what is typed for it."""
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def test_the_table_of_commands() -> None:
    rows = [
        f"| `{path}` | {command.get_short_help_str(200)} |\n"
        for path, command in commands(tailrace, "tailrace")
    ]
    assert len(rows) > 20
    check_part(ROOT / "docs/cli.md", "commands", "| command | |\n|---|---|\n" + "".join(rows))


@pytest.mark.parametrize(
    ("part", "kind"),
    [("producer settings", ProducerSettings), ("consumer settings", ConsumerSettings)],
)
def test_the_tables_of_the_clients_settings(part: str, kind: type) -> None:
    rows = [
        f"| `{item.name}` | `{item.default}` | {item.metadata['doc']} |\n"
        for item in dataclasses.fields(kind)
    ]
    check_part(
        ROOT / "docs/sdk.md", part, "| setting | default | |\n|---|---|---|\n" + "".join(rows)
    )


def test_the_table_of_a_scans_settings() -> None:
    rows = [
        f"| `{item.name}` | `{item.default}` | {item.metadata['doc']} |\n"
        for item in dataclasses.fields(ScanSettings)
    ]
    check_part(
        ROOT / "docs/scan.md",
        "scan settings",
        "| setting | default | |\n|---|---|---|\n" + "".join(rows),
    )


def test_the_table_of_a_tables_settings() -> None:
    rows = [
        f"| `{item.name}` | `{item.default}` | {item.metadata['doc']} |\n"
        for item in dataclasses.fields(TableSettings)
    ]
    check_part(
        ROOT / "docs/table.md",
        "table settings",
        "| setting | default | |\n|---|---|---|\n" + "".join(rows),
    )


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


def test_the_table_of_versions() -> None:
    rows = [
        f"| {Api(api).name} | {int(api)} | {low} to {high} |\n"
        for api, (low, high) in API_VERSIONS.items()
    ]
    check_part(
        ROOT / "docs/protocol.md",
        "versions",
        "| API | number | versions |\n|---|---|---|\n" + "".join(rows),
    )


def test_the_table_of_kafkas_apis() -> None:
    rows = [
        f"| {codec.definitions()[str(api)]['name']} | {api} | {row.low} to {row.high} |\n"
        for api, row in sorted(APIS.items())
    ]
    check_part(
        ROOT / "docs/kafka.md",
        "kafka apis",
        "| API | number | versions |\n|---|---|---|\n" + "".join(rows),
    )


TYPES = {"16s": "16s", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}


def layout_of(text: str) -> str:
    """`name type | name type ...`, as a page writes it, in the notation of `struct`."""
    return "<" + "".join(TYPES[kind] for kind in re.findall(r"\w+ (16s|[iu]\d\d)\b", text))


def test_layouts_are_those_of_the_codec() -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    blocks = {
        name: re.split("then count times\n", text)
        for name, text in re.findall(
            r"^(\w+ (?:request|response)(?: \d)?) {2,4}([^`]*?)(?=^\w|^```)", page, re.M
        )
    }
    found = {name: [layout_of(part) for part in parts] for name, parts in blocks.items()}
    assert found == {
        "PRODUCE request": [
            produce_messages._PRODUCE_MANY.format,
            produce_messages._PRODUCE_ENTRY.format.replace("4x", "I"),
        ],
        "PRODUCE response": [
            produce_messages._PRODUCED_MANY.format,
            produce_messages._PRODUCED_ENTRY.format,
        ],
        "PRODUCE request 1": [produce_messages._PRODUCE.format],
        "PRODUCE response 1": [produce_messages._PRODUCED.format],
        "FETCH request": [fetch_messages._FETCH.format, fetch_messages._FETCH_ENTRY.format],
        "FETCH response": [fetch_messages._FETCHED.format, fetch_messages._FETCHED_ENTRY.format],
    }
    rows = re.findall(
        r"^\|(.*?)\|(.*?)\|(.*?)\|(.*?)\|$",
        page[page.index("| request header") : page.index("- **Correlation")],
        re.M,
    )[2:]
    assert [layout_of(" ".join(row[side] for row in rows)) for side in (1, 3)] == [
        wire._REQUEST.format,
        wire._RESPONSE.format,
    ]
    for side in (0, 2):
        offsets = [int(row[side]) for row in rows if row[side].strip()]
        sizes = [struct.calcsize(layout_of(row[side + 1])) for row in rows if row[side].strip()]
        assert offsets == [sum(sizes[:number]) for number in range(len(sizes))]


def test_every_field_of_a_batch_header_is_explained() -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    section = page[
        page.index("### The header of a batch") : page.index("A malformed header is answered")
    ]
    named = set(
        re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"^\| ([a-z_0-9, ]+) \|", section, re.M)))
    )
    fields = {field.name for field in dataclasses.fields(BatchHeader)} | {
        "header_length",
        "version",
        "magic",
    }
    assert named - {"field"} == fields


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


def a_group(first: Raw, second: Raw, address: str) -> Iterator[str]:
    """Two members share a topic of two partitions; one commits and leaves; an operator looks, moves
    the offsets and deletes the group.
    """
    with Admin(address) as admin, Producer(address) as producer:
        admin.create_topics([NewTopic("payments", partitions=2)])
        for number in range(4):
            producer.send("payments", b"%d" % number, partition=0).result(60)
        topic_id = admin.topic_info(["payments"])["payments"].topic_id.hex()
    one, other = (
        {"group": "billing", "member_id": f"7c1d9a52-0000-4000-8000-00000000000{number}"}
        for number in (1, 2)
    )
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
    worker = {"group": "workers", "kind": "share", "member_id": one["member_id"]}
    yield (
        "A share group: a member joins, acquires, accepts two records, and releases one while it "
        "acquires again:\n"
    )
    yield first.ask(
        beat,
        {
            **worker,
            "member_epoch": 0,
            "topics": ["payments"],
            "offset_reset": "earliest",
            "client_id": "dump",
        },
    )
    member = {"group": "workers", "member_id": one["member_id"], "member_epoch": 1}
    yield first.ask(
        Api.SHARE_ACQUIRE, {**member, "sequence": 1, "max_records": 3, "acknowledge": []}
    )
    yield first.ask(
        Api.SHARE_ACKNOWLEDGE,
        {**member, "sequence": 2, "acknowledge": [[topic_id, 0, 0, 1, "accept"]]},
    )
    yield first.ask(
        Api.SHARE_ACQUIRE,
        {
            **member,
            "sequence": 3,
            "max_records": 3,
            "acknowledge": [[topic_id, 0, 2, 2, "release"]],
        },
    )
    yield first.ask(Api.DESCRIBE_GROUP, {"group": "workers", "part": "partitions", "after": None})
    first.ask(beat, {**worker, "member_epoch": -1})
    first.ask(Api.DELETE_GROUPS, {"groups": ["workers"]})
    first.ask(Api.DELETE_TOPICS, {"topics": [{"name": "payments"}]})
    yield (
        "A producer takes a transactional id and makes a branch, commits without records, and an "
        "operator aborts:\n"
    )
    named = {"transactional_id": "billing-1"}
    init = {**named, "timeout_ms": 60_000, "client_id": "dump", "attempt": "random-5f0c91b7"}
    yield first.ask(Api.INIT_TRANSACTIONS, init)
    owned = {key: first.answer[key] for key in ("owner", "producer_id", "producer_epoch")}
    yield first.ask(Api.DESCRIBE_TRANSACTION, {**named, "owner": owned["owner"]})
    yield first.ask(Api.CREATE_BRANCHES, {**named, **owned, "count": 1})
    yield first.ask(Api.JOIN_TRANSACTION, {**named, **owned, "attempt": "random-5f0c91b7"})
    end = {**named, **owned, "outcome": "commit", "offsets": [], "is_empty": True}
    yield first.ask(Api.END_TRANSACTION, end)
    yield first.ask(Api.ABORT_TRANSACTION, named)
    yield "A list of what is open:\n"
    yield first.ask(Api.LIST_TRANSACTIONS, {"states": ["ongoing"]})


def test_the_exchanges_are_real_ones_and_there_is_one_for_every_api() -> None:
    with embedded(auto_create_topics=False) as appliance, contextlib.ExitStack() as stack:
        client = Raw(appliance.address)
        stack.callback(client.socket.close)
        versions = {str(int(api)): list(span) for api, span in API_VERSIONS.items()}
        request, response = client.exchange(
            Api.HANDSHAKE, [requests.encode_json({"versions": versions, "client_id": "dump"})]
        )
        parts = [dump("HANDSHAKE request", request, [])]
        # The answer's JSON holds numbers of varying length: it is shown as text, behind its header.
        parts.append(dump("HANDSHAKE response", response[:1], [[(20, 24), (24, 32), GENERATION]]))
        parts[-1] += (
            f"  frame 2: {json.dumps(_without_what_varies(requests.decode_json(response[1])))}\n"
        )
        request, response = client.exchange(Api.PING, [])
        parts.append(dump("PING request", request, []))
        parts.append(dump("PING response", response, [[(24, 32), GENERATION]]))
        parts.append(
            client.ask(
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
        )
        parts.append(client.ask(Api.METADATA, {"topics": ["orders"]}))
        parts.append(client.ask(Api.INIT_PRODUCER_ID, {}))
        with Admin(appliance.address) as admin:
            info = admin.topic_info(["orders"])["orders"]
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
        parts.append(
            dump(
                "PRODUCE request, acks=all: two batches in one frame, a third for a partition "
                "that is not there",
                request,
                [[], ids],
                shown=2,
            )
        )
        times = [(at + 16, at + 24) for at in range(8, 56, 24)]
        parts.append(dump("PRODUCE response", response, [[(24, 32), GENERATION], times]))
        body = [
            produce_messages.encode_produce(
                produce_messages.ProduceRequest(info.topic_id, 0, produce_messages.ACKS_ALL, 30_000)
            ),
            batch,
        ]
        request, response = client.exchange(Api.PRODUCE, body, 1)
        parts.append(
            dump("PRODUCE request of version 1, acks=all", request, [[], [TOPIC_ID]], shown=2)
        )
        parts.append(dump("its response", response, [[(24, 32), GENERATION], [(8, 16)]]))
        fetch = fetch_messages.FetchRequest(
            500, 1, 1 << 20, 0, [fetch_messages.FetchEntry(info.topic_id, 0, -1, 0, 1 << 20)]
        )
        request, response = client.exchange(Api.FETCH, [fetch_messages.encode_fetch(fetch)])
        assert not decode_response_header(response[0]).error
        assert len(response) == 3
        parts.append(dump("FETCH request", request, [[], [(24, 40)]]))
        parts.append(dump("FETCH response", response, [[(24, 32), GENERATION], [(8, 24)]], shown=2))
        request, response = client.exchange(Api.CREDIT, [credit_messages.encode_credit(1 << 20)])
        parts.append(dump("CREDIT request", request, []))
        parts.append(dump("the push that answers it", response, [[(24, 32), GENERATION]]))
        parts.append(
            client.ask(
                Api.LIST_OFFSETS,
                {"partitions": [{"topic": "orders", "partition": 0, "at": "latest"}]},
            )
        )
        parts.append(
            client.ask(
                Api.LIST_OFFSETS,
                {"partitions": [{"topic": "orders", "partition": 0, "at": 1_700_000_000_000_001}]},
            )
        )
        parts.append(
            client.ask(
                Api.LEASE_OFFSETS,
                {
                    "lease": "reader",
                    "topic": "orders",
                    "partition": 0,
                    "offset": 0,
                    "ttl_ms": 60_000,
                },
            )
        )
        with Producer(appliance.address) as producer:
            delay = producer.send(
                "orders", b"later", b"u1", deliver_after=dt.timedelta(days=1)
            ).result(60)
        parts.append(client.ask(Api.LIST_DELAYS, {"topic": "orders", "limit": 10}))
        parts.append(
            client.ask(
                Api.CHANGE_DELAYS,
                {"changes": [{"delay_id": delay.delay_id, "due_us": None}], "topic": "orders"},
            )
        )
        parts.append(client.ask(Api.DESCRIBE_DELAYS, {}))
        other = Raw(appliance.address)
        stack.callback(other.socket.close)
        other.exchange(
            Api.HANDSHAKE, [requests.encode_json({"versions": versions, "client_id": "dump"})]
        )
        parts += a_group(client, other, appliance.address)
        parts.append(
            client.ask(
                Api.DELETE_RECORDS, {"topics": [{"name": "orders", "partitions": {"0": -1}}]}
            )
        )
        parts.append(
            client.ask(
                Api.ALTER_TOPICS,
                {"topics": [{"name": "orders", "configs": {"retention.ms": 3_600_000}}]},
            )
        )
        parts.append(client.ask(Api.DESCRIBE_SCHEMAS, {"topic": "orders"}))
        users = {"name": "users", "configs": {"cleanup.policy": "compact"}}
        parts.append(client.ask(Api.CREATE_TOPICS, {"topics": [users]}))
        parts.append(client.ask(Api.COMPACT_TOPIC, {"name": "users", "number": 1}))
        parts.append(client.ask(Api.DESCRIBE_CLUSTER, {}))
        parts.append(client.ask(Api.ALTER_CONFIGS, {"set": {"groups.max": 500}, "unset": []}))
        parts.append(client.ask(Api.DESCRIBE_CONFIGS, {"names": ["groups.max", "slots"]}))
        parts.append(client.ask(Api.RELOAD_CONFIG, {}))
        change = {"user": "alice", "client": None, "set": {"producer_byte_rate": "10MiB"}}
        parts.append(client.ask(Api.ALTER_QUOTAS, {"changes": [change]}))
        parts.append(client.ask(Api.DESCRIBE_QUOTAS, {}))
        parts.append(
            client.ask(Api.ALTER_USERS, {"user": "shop", "action": "add", "groups": ["sales"]})
        )
        parts.append(client.ask(Api.LIST_USERS, {"name": "shop"}))
        acl = {
            "principal": "User:shop", "resource_type": "topic", "name": "orders",
            "operation": "write",
        }  # fmt: skip
        parts.append(client.ask(Api.ALTER_ACLS, {"add": [acl]}))
        parts.append(client.ask(Api.LIST_ACLS, {"filter": {"name": "orders"}}))
        parts.append(client.ask(Api.TEST_ACL, {**acl, "operation": "describe"}))
        parts.append(client.ask(Api.DELETE_TOPICS, {"topics": [{"name": "orders"}]}))
        parts.append(client.ask(Api.LIST_DELETED_TOPICS, {"after": None}))
        parts.append(client.ask(Api.UNDELETE_TOPICS, {"topics": [{"name": "orders"}]}))
        parts.append(client.ask(Api.PURGE_TOPICS, {"topics": [{"name": "orders"}]}))
        request, response = client.exchange(999, [])
        parts.append(dump("A request with an unknown API number", request, []))
        parts.append(dump("its answer", response, [[(24, 32), GENERATION], []]))
    text = "\n".join(parts)
    assert all(api.name in text for api in Api), "an API has no exchange"
    check_part(ROOT / "docs/protocol.md", "exchanges", f"```\n{text}```\n")


@pytest.mark.parametrize("name", ["groups.md", "queues.md", "guarantees.md", "limits.md"])
def test_the_tests_that_a_document_names_exist(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w/.]+)`", text))
    defined = set(
        re.findall(
            r"def (test_\w+)", "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
        )
    )
    assert named
    assert named <= defined


def test_links_lead_to_files() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), (
                f"{path.name} links to {target}"
            )


@functools.cache
def _anchors(path: pathlib.Path) -> set[str]:
    """Anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_anchors_lead_to_headings() -> None:
    for path in DOCUMENTS:
        for page, anchor in re.findall(r"\]\(([^)#]*)#([^)]*)\)", path.read_text()):
            target = path.parent / page if page else path
            assert page.startswith("http") or anchor in _anchors(target), (
                f"{path.name} links to {page}#{anchor}"
            )


def test_every_page_can_be_found_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w.-]+\.md)", (ROOT / "README.md").read_text()))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= linked


def test_no_page_has_a_heading_twice() -> None:
    """The second one's anchor leads to the first, and the two say the same thing twice, or
    differ.
    """
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert path.name == "CHANGELOG.md" or len(headings) == len(set(headings)), path.name


SNIPPETS_PROGRAM = """
import contextlib, json, sys
import tailrace

page, snippets = sys.argv[1], json.load(sys.stdin)
start = tailrace.embedded

@contextlib.contextmanager
def empty():
    # The page's one appliance, as empty as a new one.
    yield appliance
    with tailrace.Admin(appliance.address) as admin:
        admin.delete_groups(list(admin.list_groups()))
        admin.delete_topics(admin.list_topics())

def embedded(**settings):
    return start(**settings) if settings else empty()

with start() as appliance:
    tailrace.embedded = embedded
    for number, snippet in enumerate(snippets, 1):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), {"__name__": "__main__"})
"""


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "README.md",
        *(
            ROOT / "docs" / f"{name}.md"
            for name in ("export", "groups", "queues", "scan", "sdk", "table", "transactions")
        ),
    ],
    ids=lambda path: path.name,
)
def test_python_snippets_run(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Those of spark.md run in tests/spark_bridge/test_page.py."""
    snippets = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    snippets = [
        snippet for snippet in snippets if not snippet.startswith("spark.")
    ]  # tests/spark_bridge/test_datasource.py reads so
    assert snippets
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SNIPPETS_PROGRAM, path.name],
        input=json.dumps(snippets), capture_output=True, text=True,
        timeout=HANG_LIMIT_S, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_files_named_in_the_map_exist() -> None:
    for name in re.findall(
        r"`((?:tailrace|shm|workers|netfront|appliance|spark_bridge|bench|tests|systemd)/[\w/.]+)`",
        (ROOT / "CONTRIBUTING.md").read_text(),
    ):
        assert (ROOT / name).exists(), f"CONTRIBUTING.md names {name}"


def test_functions_named_in_the_map_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`\s+\(`(\w+)`", text)
    assert named
    for path, name in named:
        assert re.search(rf"^\s*(?:def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE), (
            f"CONTRIBUTING.md names {name} in {path}"
        )


DISTRIBUTIONS = ("tailrace", "shm", "netfront", "workers", "appliance", "spark_bridge")


def test_the_drawing_of_the_rooms_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    drawing = text.split("```text\n")[1].split("```")[0]
    assert len(drawing.splitlines()) <= 40
    words = set(re.findall(r"\w+", drawing))
    for distribution in DISTRIBUTIONS:
        rooms = {path.parent.name for path in (ROOT / distribution).glob("*/__init__.py")}
        assert rooms <= words, f"CONTRIBUTING.md draws no {rooms - words} of {distribution}"


def test_the_drawing_has_the_layers_that_imports_keep() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = {c["containers"][0]: c["layers"] for c in contracts["contracts"] if "containers" in c}
    drawn = re.sub(r" ?\| ?", "|", _right_column((ROOT / "CONTRIBUTING.md").read_text()))
    for container in ("netfront", "appliance.groups"):
        assert " > ".join(layers[container]).replace(" | ", "|") in drawn
    tailrace = " > ".join(layers["tailrace"][1:-1]).replace(" | ", "|")
    assert tailrace in drawn


def _right_column(text: str) -> str:
    """The rooms of the drawing, which begin at one column."""
    lines = text.split("```text\n")[1].split("```")[0].splitlines()
    column = lines[0].index("rooms, the highest first")
    return " ".join(" ".join(line[column:] for line in lines).split())
