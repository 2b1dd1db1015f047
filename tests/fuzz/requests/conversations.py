"""Valid requests of every API, as a client that keeps to docs/protocol.md sends them: what the
fuzzer bends.

A request is a pure function of a random source and of the World (the topics that this run has
made), so a run can be repeated from its seed; ids of topics differ from run to run.
"""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tailrace import Admin, NewTopic
from tailrace.admin.admin import create_request
from tailrace.batch import arrow_codec as arrow_batch
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.records import Headers
from tailrace.core.schedule.delays import delay_id
from tailrace.format.record_batch.header_stamps import stamp_producer
from tailrace.format.schema import delay_schema, to_message
from tailrace.kernel.reference_arrow import default_rows
from tailrace.protocol import credit_messages, fetch_messages, produce_messages
from tailrace.protocol import json_messages as requests
from tailrace.protocol.fetch_messages import FETCH_UNCOMMITTED, FetchEntry, FetchRequest
from tailrace.protocol.frame import API_VERSIONS, Api, RequestHeader
from tailrace.protocol.produce_messages import ProduceBatches, ProduceEntry, ProduceRequest
from tests.fuzz.requests.group_conversations import GROUP_REQUESTS, Made
from tests.fuzz.requests.produce_mutations import framed
from tests.fuzz.requests.world import Target, World
from tests.kit.batches import TIME_US

SCRATCH_TOPICS = 24
"""Names of topics that come and go; there are never more, or the partitions would run out and
nothing could be made.
"""
FAR_US = 3_600_000_000
SCHEMAS = tuple(
    pa.schema(fields)
    for fields in (
        [("a", pa.int8()), ("b", pa.uint64()), ("c", pa.float64())],
        [("half", pa.float16()), ("single", pa.float32()), ("flag", pa.bool_())],
        [
            ("money", pa.decimal128(20, 4)),
            ("day", pa.date32()),
            ("second", pa.time32("s")),
            ("nano", pa.time64("ns")),
        ],
        [
            ("at", pa.timestamp("us", "UTC")),
            ("for", pa.duration("us")),
            ("id", pa.binary(16)),
            ("span", pa.month_day_nano_interval()),
        ],
        [
            ("many", pa.list_(pa.struct([("k", pa.utf8()), ("v", pa.binary())]))),
            ("map", pa.map_(pa.utf8(), pa.int32())),
        ],
        [
            ("point", pa.list_(pa.float32(), 3)),
            ("deep", pa.struct([("x", pa.struct([("y", pa.int16())]))])),
        ],
    )
)


@dataclass(slots=True)
class Request:
    """One request: the frames behind its header, and what its mutations need to know."""

    api: int
    body: list[bytes]
    seeds: list[int] = field(default_factory=list)
    """Seeds of the checksums of its batches."""
    version: int = 1
    correlation_id: int = 0
    flags: int = 0

    def header(self) -> bytes:
        return RequestHeader(
            self.api, self.version, self.correlation_id, sum(map(len, self.body)), self.flags
        ).to_bytes()


def make_world(address: str, rng: random.Random, start_us: int) -> World:
    """Make the topics of a run, and batches for them."""
    # The logs stay small however long the run is.
    kept: dict[str, Any] = {"segment.bytes": 8 << 20, "retention.bytes": 32 << 20}
    topics = [
        NewTopic("plain", 2, kept),
        NewTopic("zipped", 1,
        {**kept, "compression.type": "zstd", "message.timestamp.type": "LogAppendTime"}),
        NewTopic("typed", 1, kept, SCHEMAS[0]),
        NewTopic("nested", 1, {**kept, "durability": "memory"}, SCHEMAS[4]),
        NewTopic("later", 2, {**kept, "delay.enabled": True}),
        NewTopic("laterTyped", 1, {**kept, "delay.enabled": True}, SCHEMAS[0]),
    ]  # fmt: skip
    with Admin(address) as admin:
        admin.create_topics([*topics, NewTopic("gone")])
        infos = admin.topic_info([*(topic.name for topic in topics), "gone"])
        admin.delete_topics(["gone"])
    return world_of(infos, rng, start_us)


def world_of(infos: dict[str, TopicInfo], rng: random.Random, start_us: int) -> World:
    """The world of these topics; that of the name `gone` is deleted."""
    world = World(start_us, gone_id=infos["gone"].topic_id)
    for name, info in infos.items():
        if name == "gone":
            continue
        world.names.append(name)
        for partition in range(len(info.partitions)):
            world.targets.append(Target(info, partition, _batches(info, partition, rng, None)))
            if info.delay_log is not None:
                world.delayed.append(
                    Target(info.delay_log, partition, _batches(info, partition, rng, start_us))
                )
    return world


def _rows(schema: pa.Schema, count: int, rng: random.Random) -> pa.RecordBatch:
    """Values of any kind that the schemas above have."""

    def value(kind: pa.DataType) -> Any:
        if pa.types.is_list(kind):
            return [value(kind.value_type) for _ in range(rng.randrange(3))]
        if pa.types.is_map(kind):
            return [(f"k{n}", n) for n in range(rng.randrange(3))]
        if pa.types.is_struct(kind):
            return {kind.field(i).name: value(kind.field(i).type) for i in range(kind.num_fields)}
        if pa.types.is_string(kind):
            return "s" * rng.randrange(9)
        if pa.types.is_binary(kind):
            return b"b" * rng.randrange(40)
        return rng.randrange(100)

    return pa.RecordBatch.from_pylist(
        [{f.name: value(f.type) for f in schema} for _ in range(count)], schema=schema
    )


BATCHES = 12
ODD_DUES: tuple[int | None, ...] = (None, 0, -1, 1, TIME_US, (1 << 62), (1 << 63) - 1, -(1 << 63))
REPEATS = (
    '{"every_us":60000000,"expression":"","zone":"UTC","missed":"all"}',
    ('{"every_us":0,"expression":"* * * * '
                                                                         '*","zone":"Europe/Berlin","missed":"last"}'),
    '{"every_us":1,"expression":"","zone":"UTC","missed":"all"}',
    ('{"every_us":0,"expression":"* * * * '
                                                                  '*","zone":5,"missed":"all"}'),
                                                                  '{"every_us":"60000000"}',
    '{"every_us":-1}', '{"every_us":1e400}', '{"every_us":60000000,"missed":[]}', '{"more":1}',
    "[]", "null", "", "x" * 10_000, "[" * 2_000 + "]" * 2_000,
    '{"every_us":0,"expression":"0 0 30 2 *","zone":"UTC","missed":"all"}',
    ('{"every_us":0,"expression":"* * * * '
                                                                            '*","zone":"../../etc/passwd","missed":"all"}'),
)  # fmt: skip
"""Recurrences of a row: the first two as the SDK writes it."""


def _batches(
    info: TopicInfo, partition: int, rng: random.Random, due_from_us: int | None
) -> list[bytes]:
    """Well-formed ones for a partition; with `due_from_us`, for its delay log, some of them with
    rows that no SDK would make.
    """
    log = info if due_from_us is None else info.delay_log
    assert log is not None
    made = []
    for number in range(BATCHES):
        rows = _user_rows(info, number, rng)
        if due_from_us is not None:
            dues = [
                due_from_us + rng.choice((0, 1, 1_000_000, 30_000_000, FAR_US)) * rng.randrange(3)
                for _ in range(rows.num_rows)
            ]
            rows = arrow_batch.with_delays(rows, log.schema, dues, None)
        made.append(_encoded(rows, log, partition, rng.choice(("none", "none", "lz4", "zstd"))))
    if due_from_us is not None:
        for number in range(BATCHES):
            rows = _user_rows(info, number, rng)
            dues_and_none = [
                rng.choice((*ODD_DUES, due_from_us, due_from_us + 1_000_000))
                for _ in range(rows.num_rows)
            ]
            origins = [rng.choice((None, None, 0, 5, -1, 1 << 62)) for _ in range(rows.num_rows)]
            repeats = [rng.choice((None, rng.choice(REPEATS))) for _ in range(rows.num_rows)]
            columns = [
                *rows.columns,
                pa.array(dues_and_none, pa.int64()),
                pa.array(origins, pa.int64()),
                pa.array(repeats, pa.utf8()),
            ]
            made.append(
                _encoded(
                    pa.RecordBatch.from_arrays(columns, schema=log.schema), log, partition, "none"
                )
            )
    if not info.typed:  # little on the wire, much behind it
        for size in (1_500_000, 5_000_000, 80_000_000):
            rows = default_rows([TIME_US], [None], [b"x" * size], None)
            made.append(
                _encoded(
                    rows
                    if due_from_us is None
                    else arrow_batch.with_delays(rows, log.schema, [due_from_us], None),
                    log,
                    partition,
                    "zstd",
                )
            )
    return made


def _user_rows(info: TopicInfo, number: int, rng: random.Random) -> pa.RecordBatch:
    count = rng.choice((1, 1, 2, 5, 20))
    if info.typed:
        return _rows(info.schema, count, rng)
    values: list[bytes | None] = [rng.randbytes(rng.choice((0, 10, 100))) for _ in range(count)]
    if number == BATCHES - 1:
        values[0] = b"x" * 100_000
    keys = [rng.choice((None, b"", b"key%d" % n)) for n in range(count)]
    headers: list[Headers] | None = (
        [[("h", b"v")] * rng.randrange(3) for _ in range(count)] if number % 3 == 0 else None
    )
    return default_rows([TIME_US] * count, keys, values, headers)


def _encoded(rows: pa.RecordBatch, log: TopicInfo, partition: int, compression: str) -> bytes:
    return bytes(
        arrow_batch.encode(
            rows,
            schema_id=log.schema_id,
            seed=log.seeds[partition],
            compression=compression,
            first_timestamp_us=TIME_US,
            max_timestamp_us=TIME_US,
        )
    )


# ---- requests ------------------------------------------------------------------------------------


def _json(api: Api, value: dict[str, Any]) -> Request:
    return Request(api, [requests.encode_json(value)])


def handshake(_rng: random.Random, _world: World) -> Request:
    return _json(
        Api.HANDSHAKE,
        {"versions": {str(int(a)): list(v) for a, v in API_VERSIONS.items()}, "client_id": "fuzz"},
    )


def _ping(_rng: random.Random, _world: World) -> Request:
    return Request(Api.PING, [])


def _produce(rng: random.Random, world: World) -> Request:
    if rng.random() < 0.6:
        return _produce_many(rng, world)
    target = world.any_target(rng)
    return Request(
        Api.PRODUCE,
        [
            produce_messages.encode_produce(
                ProduceRequest(
                    target.info.topic_id, target.partition, rng.choice((-1, -1, 1, 1, 0)), 5000
                )
            ),
            _batch_for(rng, target),
        ],
        seeds=[target.seed],
    )


def _produce_many(rng: random.Random, world: World) -> Request:
    targets = [world.any_target(rng) for _ in range(rng.choice((1, 2, 2, 4, 9, 30)))]
    if rng.random() < 0.3:
        targets = [targets[0]] * len(targets)
    batches = [_batch_for(rng, target) for target in targets]
    entries = [
        ProduceEntry(t.info.topic_id, t.partition, 0, len(batch))
        for t, batch in zip(targets, batches, strict=True)
    ]
    trace_id = rng.choice((b"", b"", rng.randbytes(16)))
    head = ProduceBatches(rng.choice((-1, -1, 1, 1, 0)), 5000, entries, trace_id)
    return Request(
        Api.PRODUCE,
        framed(rng, head, batches),
        seeds=[target.seed for target in targets],
        version=3 if trace_id else rng.choice((2, 3)),
    )


def _batch_for(rng: random.Random, target: Target) -> bytes:
    batch = bytearray(rng.choice(target.batches))
    if rng.random() < 0.5:
        with memoryview(batch) as view:
            stamp_producer(
                view,
                producer_id=rng.randrange(40),
                producer_epoch=rng.randrange(2),
                base_sequence=rng.choice((0, 1, 7)),
                seed=target.seed,
            )
    return bytes(batch)


def _fetch(rng: random.Random, world: World) -> Request:
    is_parked = rng.random() < 0.2
    entries = []
    for _ in range(rng.choice((1, 1, 2, 8))):
        target = rng.choice(world.targets)
        entries.append(
            FetchEntry(
                target.info.topic_id,
                target.partition,
                rng.choice((-1, 0)),
                1 << 40 if is_parked else rng.randrange(30),
                1 << 16,
                rng.choice((0, FETCH_UNCOMMITTED)),
            )
        )
    request = FetchRequest(
        rng.randrange(1, 2000) if is_parked else 0, 1 << 20 if is_parked else 1, 1 << 17, 0, entries
    )
    return Request(Api.FETCH, [fetch_messages.encode_fetch(request)], version=rng.choice((2, 3)))


def _metadata(rng: random.Random, world: World) -> Request:
    names = rng.choice((None, rng.sample(world.names, 2), [], ["nosuch", _scratch(rng)]))
    return _json(Api.METADATA, {"topics": names, "names_only": rng.random() < 0.3})


def _scratch(rng: random.Random) -> str:
    return f"scratch-{rng.randrange(SCRATCH_TOPICS)}"


def _create(rng: random.Random, _world: World) -> Request:
    items = []
    for _ in range(rng.choice((1, 1, 1, 3))):
        configs: dict[str, Any] = {"segment.bytes": 1 << 20, "retention.ms": 60_000}
        schema = rng.choice(SCHEMAS) if rng.random() < 0.6 else None
        if rng.random() < 0.3:
            configs["delay.enabled"] = True
        item = create_request(
            _scratch(rng),
            rng.randrange(1, 4),
            configs,
            None if schema is None else to_message(schema),
        )
        items.append({**item, "topic_id": rng.randbytes(16).hex()})
    return _json(Api.CREATE_TOPICS, {"topics": items, "validate_only": rng.random() < 0.5})


def _delete(rng: random.Random, _world: World) -> Request:
    return _json(
        Api.DELETE_TOPICS,
        {
            "topics": [
                {"name": _scratch(rng), **rng.choice(({}, {"now": True}, {"now": 1}))}
                for _ in range(rng.randrange(1, 4))
            ],
            "validate_only": rng.random() < 0.2,
        },
    )


_USERS = ("fuzz-a", "fuzz-b", "fuzz-c", "", "no name", 7)
_ACTIONS = ("add", "delete", "disable", "enable", "set", "add_key", "remove_key", "fly", None)


def _acl(rng: random.Random) -> dict[str, Any]:
    return {
        "principal": f"User:{rng.choice(_USERS)}", "name": rng.choice(("t", "*", "x" * 300)),
        "resource_type": rng.choice(("topic", "group", "cluster", "moon")),
        "operation": rng.choice(("read", "write", "all", "own")),
        "pattern": rng.choice(("literal", "prefixed", None)),
    }  # fmt: skip


def _list_users(rng: random.Random, _world: World) -> Request:
    return _json(
        Api.LIST_USERS, {"name": rng.choice((None, *_USERS)), "after": rng.choice((None, "a"))}
    )


def _alter_users(rng: random.Random, _world: World) -> Request:
    key = {"name": rng.choice(("k", 7)), "public": rng.choice(("0" * 40, "x", None))}
    return _json(
        Api.ALTER_USERS,
        {
            "user": rng.choice(_USERS), "action": rng.choice(_ACTIONS), "keys": [key], "key": key,
            "groups": rng.choice((["g"], "g", None)), "accounts": rng.choice(([], [1], [-1])),
            "admin": rng.choice((True, False, 1)),
        },
    )  # fmt: skip


def _list_acls(rng: random.Random, _world: World) -> Request:
    return _json(Api.LIST_ACLS, {"filter": rng.choice((None, {"name": "t"}, {"x": 1}, 7))})


def _alter_acls(rng: random.Random, _world: World) -> Request:
    return _json(
        Api.ALTER_ACLS,
        {
            "add": [_acl(rng) for _ in range(rng.randint(0, 3))],
            "remove": [
                {"principal": f"User:{rng.choice(_USERS)}"} for _ in range(rng.randint(0, 2))
            ],
        },
    )


def _test_acl(rng: random.Random, _world: World) -> Request:
    return _json(Api.TEST_ACL, _acl(rng))


def _list_deleted(rng: random.Random, _world: World) -> Request:
    return _json(Api.LIST_DELETED_TOPICS, {"after": rng.choice((None, "x" * 32, 7))})


def _describe_schemas(rng: random.Random, _world: World) -> Request:
    return _json(Api.DESCRIBE_SCHEMAS, {"topic": rng.choice((_scratch(rng), "nosuch", None, 5))})


def _undelete(rng: random.Random, _world: World) -> Request:
    item = {"name": _scratch(rng), **rng.choice(({}, {"as": _scratch(rng)}, {"as": "a/b"}))}
    return _json(Api.UNDELETE_TOPICS, {"topics": [item], "validate_only": rng.random() < 0.2})


def _purge(rng: random.Random, _world: World) -> Request:
    names = [_scratch(rng), rng.choice(("nosuch", None, 5, "0" * 32))]
    return _json(Api.PURGE_TOPICS, {"topics": [{"name": name} for name in names]})


def _compact(rng: random.Random, _world: World) -> Request:
    number = rng.choice((None, 1, 0, -1, "x", 1 << 62, 2.5, True))
    name = rng.choice((_scratch(rng), "nosuch", None))
    return _json(Api.COMPACT_TOPIC, rng.choice(({"name": name}, {"name": name, "number": number})))


def _alter(rng: random.Random, _world: World) -> Request:
    item: dict[str, Any] = {"name": _scratch(rng), "partitions": rng.randrange(1, 5)}
    item["configs"] = rng.choice(
        (
            {},
            {"retention.ms": 1000},
            {"compression.type": "lz4"},
            {"durability": "memory"},
            {"delay.levels": "1s 5s"},
            {"max.message.bytes": 5000},
        )
    )
    if rng.random() < 0.3:
        item["configs"] = {"delay.enabled": True}
        item["delay_schema"] = base64.b64encode(
            to_message(delay_schema(rng.choice(SCHEMAS)))
        ).decode()
    if rng.random() < 0.1:
        item["move"] = rng.choice(
            ({}, {"partition": 0, "data_dir": "/"}, {"partition": -1, "data_dir": 7}, "0", [0])
        )
    return _json(Api.ALTER_TOPICS, {"topics": [item], "validate_only": False})


def _init_producer(rng: random.Random, _world: World) -> Request:
    return _json(
        Api.INIT_PRODUCER_ID,
        rng.choice(({}, {"producer_id": rng.randrange(50), "producer_epoch": rng.randrange(3)})),
    )


def _list_offsets(rng: random.Random, world: World) -> Request:
    items = [
        {
            "topic": rng.choice(world.names),
            "partition": rng.randrange(2),
            "at": rng.choice(
                (
                    "earliest",
                    "latest",
                    TIME_US,
                    {"behind": rng.randrange(20)},
                    {"time_of": rng.randrange(20)},
                )
            ),
        }
        for _ in range(rng.choice((1, 3)))
    ]
    return _json(Api.LIST_OFFSETS, {"partitions": items})


def _describe_cluster(_rng: random.Random, _world: World) -> Request:
    return _json(Api.DESCRIBE_CLUSTER, {})


def _describe_configs(rng: random.Random, _world: World) -> Request:
    names = rng.choice((None, [], ["log_level"], ["no.such"], "log_level", [1]))
    return _json(Api.DESCRIBE_CONFIGS, {"names": names})


def _alter_configs(rng: random.Random, _world: World) -> Request:
    """Values that other requests of the conversation do not depend on, and wrong ones."""
    values: dict[str, object] = {
        "retention.check.interval.ms": rng.choice((100, "1h", -1, None, [], "x" * 70)),
        "topic.retention.ms": rng.choice((86_400_000, "7d", -2, {})),
        "ring_bytes": 1 << 20, "no.such.setting": 1,
    }  # fmt: skip
    chosen = rng.sample(sorted(values), rng.randrange(3))
    return _json(
        Api.ALTER_CONFIGS,
        {
            "set": {name: values[name] for name in chosen},
            "unset": rng.choice(([], ["topic.retention.ms"], ["no.such"], [3])),
            "validate_only": rng.random() < 0.3,
        },
    )


def _alter_quotas(rng: random.Random, _world: World) -> Request:
    """Quotas that no request of the conversation reaches, and wrong ones."""
    change = {
        "user": rng.choice((None, "ANONYMOUS", "*", "", 3)),
        "client": rng.choice((None, "*", "c", [])),
        "prefix": rng.choice((None, None, "q.", {})),
        "set": rng.choice(
            ({"producer_byte_rate": "1GiB"}, {"request_rate": 1 << 30},
             {"stored_bytes_max": "1TiB"}, {"no_such": 1}, {"request_rate": 0}, [])
        ),
        "unset": rng.choice(([], None, ["request_rate"], ["no_such"], 3)),
    }  # fmt: skip
    changes = rng.choice(([change], [change] * 3, [], None, [3]))
    return _json(Api.ALTER_QUOTAS, {"changes": changes, "validate_only": rng.random() < 0.3})


def _describe_quotas(_rng: random.Random, _world: World) -> Request:
    return _json(Api.DESCRIBE_QUOTAS, {})


def _reload_config(_rng: random.Random, _world: World) -> Request:
    return _json(Api.RELOAD_CONFIG, {})


def _credit(rng: random.Random, _world: World) -> Request:
    return Request(Api.CREDIT, [credit_messages.encode_credit(rng.randrange(1 << 20))])


def _delete_records(rng: random.Random, world: World) -> Request:
    name = rng.choice([*world.names, _scratch(rng)])
    return _json(
        Api.DELETE_RECORDS,
        {
            "topics": [{"name": name, "partitions": {"0": rng.choice((0, 1, -1))}}],
            "validate_only": rng.random() < 0.5,
        },
    )


def _lease(rng: random.Random, world: World) -> Request:
    name = f"lease-{rng.randrange(8)}"
    return _json(
        Api.LEASE_OFFSETS,
        {
            "lease": name,
            "topic": rng.choice(world.names),
            "partition": 0,
            "offset": rng.randrange(20),
            "ttl_ms": rng.choice((0, 1000)),
        },
    )


def _list_delays(rng: random.Random, world: World) -> Request:
    after = rng.choice((None, None, [0, world.start_us // 1000, 3]))
    value = {
        "topic": rng.choice(("later", "laterTyped")),
        "partition": rng.choice((None, 0)),
        "key": rng.choice((None, "6b657930")),
        "from_us": None,
    }
    return _json(
        Api.LIST_DELAYS,
        {
            **value,
            "to_us": rng.choice((None, world.start_us + FAR_US)),
            "limit": rng.randrange(1, 200),
            "after": after,
        },
    )


def _change_delays(rng: random.Random, world: World) -> Request:
    changes = []
    for _ in range(rng.choice((1, 4))):
        target = rng.choice(world.delayed)
        due_us = world.start_us + rng.choice((0, 1_000_000, 30_000_000, FAR_US))
        name = delay_id(target.info.topic_id, target.partition, rng.randrange(200), due_us)
        changes.append({"delay_id": name, "due_us": rng.choice((None, world.start_us + FAR_US))})
    return _json(Api.CHANGE_DELAYS, {"changes": changes, "topic": None})


def _describe_delays(_rng: random.Random, _world: World) -> Request:
    return _json(Api.DESCRIBE_DELAYS, {})


def _of_groups(build: Callable[[random.Random, World], Made]) -> Builder:
    return lambda rng, world: _json(*build(rng, world))


Builder = Callable[[random.Random, World], Request]
REQUESTS: dict[Api, tuple[Builder, int]] = {
    Api.HANDSHAKE: (handshake, 2), Api.PING: (_ping, 1), Api.PRODUCE: (_produce, 12),
    Api.FETCH: (_fetch, 6), Api.METADATA: (_metadata, 3),
    Api.CREATE_TOPICS: (_create, 4), Api.DELETE_TOPICS: (_delete, 2), Api.ALTER_TOPICS: (_alter, 2),
    Api.INIT_PRODUCER_ID: (_init_producer, 2),
    Api.LIST_OFFSETS: (_list_offsets, 3), Api.DESCRIBE_CLUSTER: (_describe_cluster, 1),
    Api.DESCRIBE_CONFIGS: (_describe_configs, 1), Api.ALTER_CONFIGS: (_alter_configs, 1),
    Api.RELOAD_CONFIG: (_reload_config, 1), Api.LIST_DELETED_TOPICS: (_list_deleted, 1),
    Api.DESCRIBE_SCHEMAS: (_describe_schemas, 1),
    Api.LIST_USERS: (_list_users, 1), Api.ALTER_USERS: (_alter_users, 2),
    Api.LIST_ACLS: (_list_acls, 1), Api.ALTER_ACLS: (_alter_acls, 2), Api.TEST_ACL: (_test_acl, 1),
    Api.UNDELETE_TOPICS: (_undelete, 2), Api.PURGE_TOPICS: (_purge, 1),
    Api.COMPACT_TOPIC: (_compact, 1),
    Api.ALTER_QUOTAS: (_alter_quotas, 1), Api.DESCRIBE_QUOTAS: (_describe_quotas, 1),
    Api.CREDIT: (_credit, 1), Api.DELETE_RECORDS: (_delete_records, 2),
    Api.LEASE_OFFSETS: (_lease, 2), Api.LIST_DELAYS: (_list_delays, 4),
    Api.CHANGE_DELAYS: (_change_delays, 4), Api.DESCRIBE_DELAYS: (_describe_delays, 1),
    **{api: (_of_groups(build), weight) for api, (build, weight) in GROUP_REQUESTS.items()},
}  # fmt: skip
"""API -> how to make a request, and how often it comes (relative to the others)."""


def any_request(rng: random.Random, world: World) -> Request:
    known = [
        (build, weight) for api, (build, weight) in REQUESTS.items() if api not in world.without
    ]
    build = rng.choices([build for build, _ in known], [weight for _, weight in known])[0]
    return build(rng, world)


BINARY_FIELDS: dict[int, tuple[tuple[int, str], ...]] = {
    Api.PRODUCE: ((16, "i"), (20, "i"), (24, "I"), (28, "I")),
    Api.FETCH: (
        (0, "I"), (4, "I"), (8, "I"), (12, "I"), (16, "Q"), (40, "i"), (44, "i"), (48, "q"),
        (56, "I"), (60, "I"),
    ),
    Api.CREDIT: ((0, "Q"),),
}  # fmt: skip
"""API -> (position, struct letter) of each field of its binary frame; of FETCH: with its first
entry's; of PRODUCE: version 1.
"""


def max_wait_ms(request: Request) -> int:
    """Longest time that a fetch may be parked."""
    if request.api != Api.FETCH or not request.body or len(request.body[0]) < 4:
        return 0
    return int(struct.unpack_from("<I", request.body[0])[0])
