"""Administration client: topics, offsets and the state of the appliance. Other methods have modules
of their own beside it: `groups`, `transactions`, `delays`, `deleted_topics`, `compaction`, `users`
(and ACLs).

Each call makes a request or a few in the caller's thread.
"""

from __future__ import annotations

import base64
import datetime as dt
import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, TypeVar

from tailrace.admin.compaction import CompactionAdmin
from tailrace.admin.configs import ConfigAdmin
from tailrace.admin.delays import DelayAdmin
from tailrace.admin.deleted_topics import DeletedTopicAdmin
from tailrace.admin.groups import GroupAdmin
from tailrace.admin.quotas import QuotaAdmin
from tailrace.admin.schemas import SchemaAdmin, encoded_schema
from tailrace.admin.topic_list import partition_counts
from tailrace.admin.transactions import TransactionAdmin
from tailrace.admin.users import UserAdmin
from tailrace.client.config.from_context import FromContext
from tailrace.client.config.kafka_names import RenamedMethods
from tailrace.client.config.setting_fields import build, documented, merged
from tailrace.client.config.settings import AdminSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import SYSTEM, Runtime
from tailrace.client.connections.steps import (
    Steps,
    call,
    call_json,
    decode_answer,
    operation,
    run_on,
)
from tailrace.client.topics.list_offsets import list_offsets
from tailrace.client.topics.new_topic import NewTopic as NewTopic
from tailrace.client.topics.new_topic import check_configs, delay_schema_of
from tailrace.client.topics.new_topic import create_request as create_request
from tailrace.client.topics.schema_author import author
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    TailraceError,
    error_for,
)
from tailrace.core.records import to_timestamp_us
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import (
    by_partition,
    mapping_of,
    name_list,
    name_of,
    whole,
)
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import encode_json

T = TypeVar("T")
TOPICS_AT_ONCE = 256
LEASES_AT_ONCE = 1_000
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@documented(AdminSettings)
class Admin(
    ConfigAdmin,
    QuotaAdmin,
    GroupAdmin,
    TransactionAdmin,
    DelayAdmin,
    DeletedTopicAdmin,
    SchemaAdmin,
    CompactionAdmin,
    UserAdmin,
    FromContext,
    RenamedMethods,
):
    """Creates, changes, describes and deletes topics and groups, and shows the state of the
    appliance. A context manager; for one thread at a time.

        with tailrace.Admin("tcp://127.0.0.1:7420") as admin:
            admin.create_topics(tailrace.NewTopic("orders", partitions=4))
            admin.alter_topics({"orders": {"retention.ms": "7d"}})

    A change is complete when the method returns: files exist, or are deleted. Every method raises
    NotReachableError when no appliance answers, RequestTimeoutError when the response takes longer
    than `request_timeout_ms`, and ClientClosedError after `close`.
    """

    _renamed: ClassVar[dict[str, str]] = {
        "alter_client_quotas": 'write alter_quotas({QuotaEntity(user="alice"): {...}})',
        "alter_consumer_group_offsets": "write alter_group_offsets(group, {TopicPartition(topic, "
        "0): 1000})",
        "close_idle": "write close()",
        "delete_consumer_group_offsets": "write alter_group_offsets(group, {TopicPartition(topic, "
        "0): None})",
        "delete_consumer_groups": "write delete_groups([group])",
        "create_acls": "write add_acls([{...}])",
        "delete_acls": "write remove_acls([{...}])",
        "describe_acls": "write list_acls()",
        "describe_client_quotas": "write describe_quotas()",
        "describe_consumer_groups": "write describe_groups([group])",
        "describe_group": "write describe_groups(group)[group]",
        "describe_log_dirs": "describe_topics() says the bytes of each partition",
        "incremental_alter_configs": "write alter_configs({topic: {setting: value}})",
        "list_consumer_group_offsets": "write list_group_offsets(group)",
        "list_consumer_groups": "write list_groups()",
        "list_share_groups": 'write list_groups(): their "kind" is "share"',
        "list_offsets": 'write offsets({partition: "latest"}), or use a Consumer\'s end_offsets()',
        "remove_members_from_consumer_group": "stop the consumers; one that is gone leaves its "
        "group by itself",
        "reset_group_offsets": "write alter_group_offsets(group, {TopicPartition(topic, 0): 1000})",
    }

    def __init__(
        self,
        bootstrap: str | Sequence[str] | Mapping[str, Any] | None = None,
        *,
        bootstrap_servers: str | Sequence[str] | None = None,
        request_timeout_ms: int | str | None = None,
        connect_timeout_ms: int | str | None = None,
        client_id: str | None = None,
        context: str | None = None,
        runtime: Runtime = SYSTEM,
    ) -> None:
        """`bootstrap` is the address, or a dict of settings by Kafka's names
        (`{"bootstrap.servers": "localhost:7420"}`). The defaults of other settings are in
        `tailrace.client.config.settings.AdminSettings`. Raises InvalidSettingError.
        """
        first = (
            bootstrap
            if isinstance(bootstrap, Mapping) or bootstrap is None
            else {"bootstrap": bootstrap}
        )
        given = {
            "bootstrap_servers": bootstrap_servers, "request_timeout_ms": request_timeout_ms,
            "connect_timeout_ms": connect_timeout_ms,
            "client_id": client_id, "context": context,
        }  # fmt: skip
        self.settings = build(
            AdminSettings,
            merged(first, {name: value for name, value in given.items() if value is not None}),
        )
        self._connection = Connection(
            self.settings.bootstrap_servers, self.settings.client_id, runtime, "admin client"
        )
        self._connection.reachability.gives_up = self.settings.connect_timeout_ms is not None

    def __enter__(self) -> Admin:
        self._connection.check_usable()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. A repeated call does nothing."""
        self._connection.close()

    def _run_steps(self, steps: Steps[T], /) -> T:
        return run_on(self._connection, steps)

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        return call_json(
            self._connection,
            api,
            request,
            self.settings.request_timeout_ms,
            self.settings.connect_timeout_ms,
        )

    def _change(
        self, api: Api, items: list[dict[str, Any]], validate_only: bool = False
    ) -> Steps[list[dict[str, Any]]]:
        """Change topics. Raises the error of the first that failed; the others are changed."""
        self._connection.check_usable()
        if not items:
            return []
        body = [encode_json({"topics": items, "validate_only": validate_only})]
        response = yield from call(
            self._connection, api, body, self.settings.request_timeout_ms,
            self.settings.connect_timeout_ms,
        )  # fmt: skip
        answer = decode_answer(api, response)
        for result in answer["results"]:
            if result["code"]:
                raise error_for(
                    code_of(result["code"]), result.get("message", ""), response.correlation_id
                )
        results: list[dict[str, Any]] = answer["results"]
        return results

    # ---- topics ----------------------------------------------------------------------------------

    @operation
    def create_topics(
        self, topics: NewTopic | Iterable[NewTopic], *, validate_only: bool = False
    ) -> Steps[None]:
        """Create topics: one, or several. With `validate_only` only check that they can be created.
        Topics before the first refused one are created.

        Raises TopicExistsError, InvalidTopicNameError, InvalidSettingError, InvalidSchemaError,
        InvalidRequestError.
        """
        given: object = [topics] if isinstance(topics, NewTopic) else topics
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise InvalidRequestError(
                f"{given!r:.100} is no NewTopic; write NewTopic(name, partitions)"
            )
        items = []
        for topic in given:
            if not isinstance(topic, NewTopic):
                raise InvalidRequestError(
                    f"{topic!r:.100} is no NewTopic; write NewTopic(name, partitions)"
                )
            items.append(topic.request())
        yield from self._change(Api.CREATE_TOPICS, items, validate_only)

    @operation
    def delete_topics(
        self, names: str | Iterable[str], *, with_derived: bool = False, now: bool = False
    ) -> Steps[None]:
        """Delete topics (a name, or several) with all records; with `with_derived` their
        `derived_topics` too. The appliance's setting topic.delete.retention.ms says how long
        `undelete_topic` brings them back; with `now` they are gone at once. Raises
        UnknownTopicError.
        """
        requested = name_list("names", names)
        if with_derived:
            requested += yield from self._derived_topics(requested)
        if not isinstance(now, bool):
            raise InvalidRequestError(f"now is {now!r:.100}; it takes True or False")
        flags = {"now": True} if now else {}
        yield from self._change(Api.DELETE_TOPICS, [{"name": name, **flags} for name in requested])

    @operation
    def derived_topics(self, names: str | Iterable[str]) -> Steps[list[str]]:
        """The retry topics and dead-letter topics that clients have created for these topics only,
        and theirs in turn, ascending. Raises UnknownTopicError.
        """
        return (yield from self._derived_topics(name_list("names", names)))

    def _derived_topics(self, names: list[str]) -> Steps[list[str]]:
        from tailrace.client.topics.derived_topics import derived_from

        self._connection.check_usable()
        existing = yield from partition_counts(self._call)
        return sorted((yield from derived_from(self._call, names, existing)))

    @operation
    def alter_topics(
        self,
        configs: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        schema: Mapping[str, Any] | None = None,
        schema_id: int | None = None,
        validate_only: bool = False,
    ) -> Steps[None]:
        """Change settings, topic -> {setting: value}, and schemas of typed topics, topic -> pyarrow
        Schema or a frame with the columns. The rest stays. `schema_id`: the version that `schema`
        was made for; another present version refuses the change. With `validate_only` only check
        that the changes are allowed.

        Which changes of a schema are allowed: docs/schemas.md. Raises UnknownTopicError,
        InvalidSettingError, InvalidSchemaError.
        """
        if configs is None and schema is None:
            raise InvalidRequestError(
                'give configs, {"orders": {"retention.ms": "7d"}}, or schema, {"orders": schema}'
            )
        schemas = {}
        for name, source in mapping_of("schema", schema or {}, '{"orders": schema}').items():
            name_of("the name of a topic", name)
            message = encoded_schema(name, source)
            schemas[name] = {
                "schema": base64.b64encode(message).decode("ascii"), "author": author(),
                **({} if schema_id is None else {"schema_id": whole("schema_id", schema_id, 0)}),
            }  # fmt: skip
        yield from self._alter_topics(
            {} if configs is None else configs, schemas, validate_only=validate_only
        )

    def _alter_topics(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        schemas: Mapping[str, dict[str, Any]] = MappingProxyType({}),
        *,
        validate_only: bool = False,
    ) -> Steps[None]:
        items: list[dict[str, Any]] = []
        for name, values in mapping_of(
            "configs", configs, '{"orders": {"retention.ms": "7d"}}'
        ).items():
            changed = mapping_of(f"configs of {name!r:.100}", values, '{"retention.ms": "7d"}')
            check_configs(changed)
            items.append({"name": name_of("the name of a topic", name), "configs": dict(changed)})
        by_name = {item["name"]: item for item in items}
        for name, altered in schemas.items():
            if name not in by_name:
                by_name[name] = {"name": name, "configs": {}}
                items.append(by_name[name])
            by_name[name].update(altered)
        delayed = [
            item["name"] for item in items if "delay.enabled" in item["configs"] or "schema" in item
        ]
        infos = (yield from self._topic_info(delayed)) if delayed else {}
        for item in items:
            info = infos.get(item["name"])
            if info is None or not info.typed:
                continue
            if info.delay_log is not None or "delay.enabled" in item["configs"]:
                message = (
                    base64.b64decode(item["schema"]) if "schema" in item else info.schema_message
                )
                item["delay_schema"] = delay_schema_of(message)
        yield from self._change(Api.ALTER_TOPICS, items, validate_only)

    @operation
    def create_partitions(self, counts: Mapping[str, int]) -> Steps[None]:
        """Raise the number of partitions: topic -> total. Keys are then assigned to other
        partitions than before, as in Kafka. Raises UnknownTopicError, InvalidSettingError.
        """
        requested = mapping_of("counts", counts, '{"orders": 8}').items()
        yield from self._change(
            Api.ALTER_TOPICS,
            [
                {"name": name_of("the name of a topic", name), "partitions": count}
                for name, count in requested
            ],
        )

    @operation
    def move_partition(
        self, topic: str, partition: int, data_dir: str, *, validate_only: bool = False
    ) -> Steps[None]:
        """Move a partition to another data directory of the appliance, which `describe_cluster`
        lists. Returns when it is closed for the move: producers wait, and `moves` of
        `describe_cluster` says how it goes on. `tailrace partition move` copies most of it before.
        With `validate_only` only check that it can move. Raises UnknownTopicError,
        InvalidRequestError.
        """
        name = name_of("the name of a topic", topic)
        move = {"partition": partition, "data_dir": os.fspath(data_dir)}
        yield from self._change(Api.ALTER_TOPICS, [{"name": name, "move": move}], validate_only)

    @operation
    def list_topics(self, *, internal: bool = False) -> Steps[list[str]]:
        """The names of all topics, ascending. With `internal` also those in which Spark's sink
        stages rows, and the like.
        """
        return list((yield from partition_counts(self._call, internal)))

    @operation
    def partition_counts(self, *, internal: bool = False) -> Steps[dict[str, int]]:
        """The partition count of each topic, names ascending. `internal`: as for `list_topics`."""
        return (yield from partition_counts(self._call, internal))

    @operation
    def topic_info(self, names: str | Iterable[str]) -> Steps[dict[str, TopicInfo]]:
        """Schemas, settings and partition counts. Raises UnknownTopicError."""
        return (yield from self._topic_info(names))

    def _topic_info(self, names: str | Iterable[str]) -> Steps[dict[str, TopicInfo]]:
        self._connection.check_usable()
        requested, infos, count = name_list("names", names), dict[str, TopicInfo](), TOPICS_AT_ONCE
        while requested:
            try:
                answer = yield from self._call(Api.METADATA, {"topics": requested[:count]})
                found = topics_from_metadata(answer, *requested[:count])
                for name, info in found.items():
                    if not info.has_all_schemas:  # a response has room for some topics' versions
                        answer = yield from self._call(Api.METADATA, {"topics": [name]})
                        found[name] = topics_from_metadata(answer, name)[name]
                infos.update(found)
            except TailraceError as error:
                if error.code is not ErrorCode.REQUEST_TOO_LARGE or count == 1:
                    raise
                count = max(1, count // 4)  # their schemas are large
                continue
            del requested[:count]
        return infos

    @operation
    def describe_topics(
        self, names: str | Iterable[str] | None = None
    ) -> Steps[dict[str, dict[str, Any]]]:
        """All properties of topics (None: of all topics): settings, schema, creation time (ISO
        8601), and partitions. A partition has its offsets, records, bytes on the disk, segments and
        state. Its newest timestamp and the time of the last append are in milliseconds since 1970.
        A partition with an open transaction has its last_stable_offset, below end_offset. A topic
        with hash slots also has its slot_map_version, and each partition its slots and hand_over:
        {source partition: the offset up to which it is to be read before}. Raises
        UnknownTopicError.
        """
        infos = yield from self._topic_info(
            list((yield from partition_counts(self._call))) if names is None else names
        )
        result: dict[str, dict[str, Any]] = {}
        requested = [
            TopicPartition(name, p)
            for name, info in infos.items()
            for p in range(len(info.partitions))
        ]
        offsets = yield from list_offsets(self._call, dict.fromkeys(requested, "latest").items())
        for name, info in infos.items():
            created = None
            if info.created_us:
                created = (_EPOCH + dt.timedelta(microseconds=info.created_us)).isoformat()
            result[name] = {
                "name": name,
                "topic_id": info.topic_id.hex(),
                "typed": info.typed,
                "schema": str(info.schema),
                "configs": dict(info.settings),
                "created": created,
                "partitions": [
                    _described_partition(info, number, offsets[TopicPartition(name, number)])
                    for number in range(len(info.partitions))
                ],
            }
            if info.slot_map_version:
                result[name]["slot_map_version"] = info.slot_map_version
        return result

    # ---- offsets ---------------------------------------------------------------------------------

    @operation
    def offsets(
        self, requested: Mapping[TopicPartition, str | int | dt.datetime]
    ) -> Steps[dict[TopicPartition, dict[str, Any]]]:
        """Look up each partition's offset at "earliest", "latest" or a time (a datetime, or int
        microseconds): of the first record at or after it, -1 if there is none. Each is a dict with
        `offset`, `beginning`, `end` (of committed records; `high_watermark` is the end with open
        transactions), `size_bytes`, `leader_epoch` and `state`, or with the `code`
        of an error, which `tailrace.client.topics.list_offsets.check_offsets_answer` raises.
        """
        self._connection.check_usable()
        given = by_partition("requested", requested, '{TopicPartition(topic, 0): "latest"}')
        times = {
            key: to_timestamp_us(at) if isinstance(at, dt.datetime) else at
            for key, at in given.items()
        }
        return (yield from list_offsets(self._call, times.items()))

    @operation
    def delete_records(
        self, offsets: Mapping[TopicPartition, int]
    ) -> Steps[dict[TopicPartition, int]]:
        """Delete the records below these offsets (-1: below the high watermark). Returns the new
        first offset of each partition. Raises UnknownTopicError, OffsetOutOfRangeError.
        """
        given = by_partition("offsets", offsets, "{TopicPartition(topic, 0): 1000}")
        requested: dict[str, dict[str, int]] = {}
        for key, offset in given.items():
            requested.setdefault(key.topic, {})[str(key.partition)] = whole("offset", offset, -1)
        results = yield from self._change(
            Api.DELETE_RECORDS,
            [{"name": name, "partitions": partitions} for name, partitions in requested.items()],
        )
        starts = {result["name"]: result["log_start_offsets"] for result in results}
        return {key: int(starts[key.topic][str(key.partition)]) for key in given}

    @operation
    def lease_offsets(
        self,
        lease: str,
        offsets: Mapping[TopicPartition, int],
        ttl_ms: int,
        *,
        topic_ids: Mapping[str, bytes] | None = None,
    ) -> Steps[None]:
        """Lease offsets: retention keeps all records from these offsets on for `ttl_ms` (0: end the
        lease). A repeated call extends the lease. A lease is durable when this returns. `lease` is
        its name, 1 to 100 characters. `topic_ids` are the ids of the topics by name. Raises
        UnknownTopicError (UnknownTopicIdError for a recreated topic), OffsetOutOfRangeError for an
        offset that is deleted already, InvalidRequestError when there are too many leases.
        """
        ids = {name: {"topic_id": topic_id.hex()} for name, topic_id in (topic_ids or {}).items()}
        self._connection.check_usable()
        name_of("lease", lease)
        whole("ttl_ms", ttl_ms, 0)
        given = by_partition("offsets", offsets, "{TopicPartition(topic, 0): 1000}")
        items = [(key, whole("offset", offset, 0)) for key, offset in given.items()]
        for start in range(0, len(items), LEASES_AT_ONCE):
            piece = items[start : start + LEASES_AT_ONCE]
            requested = [
                {"topic": key[0], "partition": key[1], "offset": offset, **ids.get(key[0], {})}
                for key, offset in piece
            ]
            answer = yield from self._call(
                Api.LEASE_OFFSETS, {"lease": lease, "ttl_ms": ttl_ms, "partitions": requested}
            )
            for (key, offset), begins_at in zip(piece, answer["log_start_offsets"], strict=True):
                if ttl_ms and begins_at > offset:
                    raise OffsetOutOfRangeError(
                        f"offset {offset} of {key[0]}-{key[1]} cannot be leased: the log begins at "
                        f"offset {begins_at}"
                    )

    # ---- the appliance ---------------------------------------------------------------------------

    @operation
    def describe_cluster(self) -> Steps[dict[str, Any]]:
        """Processes with pid and restarts; the numbers of topics, partitions and bytes; partitions
        that accept no writes, with the reason.
        """
        state = yield from self._call(Api.DESCRIBE_CLUSTER, {})
        page = state
        while (after := page.get("offline_next")) is not None:
            page = yield from self._call(Api.DESCRIBE_CLUSTER, {"offline_after": after})
            state["offline"] += page["offline"]
        return state

    @operation
    def bring_online(self, topic: str) -> Steps[None]:
        """Recover and open the logs of partitions that a failed disk took offline. Raises
        UnknownTopicError, PartitionOfflineError, StorageError when the disk still fails.
        """
        yield from self._change(
            Api.ALTER_TOPICS, [{"name": name_of("topic", topic), "online": True}]
        )


def _described_partition(info: TopicInfo, number: int, found: dict[str, Any]) -> dict[str, Any]:
    """A partition as `describe_topics` returns it, from its entry in a LIST_OFFSETS response."""
    beginning, stable = found.get("beginning"), found.get("end")
    end = found.get("high_watermark", stable)
    described = {
        "partition": number,
        "beginning_offset": beginning,
        "end_offset": end,
        "records": (end or 0) - (beginning or 0),
        "bytes": found.get("size_bytes"),
        "segments": found.get("segments"),
        "newest_timestamp": _ms(found.get("max_timestamp_us")) if end != beginning else None,
        "last_append": _ms(found.get("last_append_us")),
        "leader_epoch": found.get("leader_epoch"),
        "state": found.get("state", code_of(found["code"]).name),
    }
    if stable != end:
        described["last_stable_offset"] = stable
    if "compaction" in found:
        described["compaction"] = found["compaction"]
    if info.slot_map_version:
        described["slots"] = info.partitions[number].get("slots")
        described["hand_over"] = dict(info.hand_overs.get(number, ()))
    return described


def _ms(us: int | None) -> int | None:
    return us // 1000 if us else None
