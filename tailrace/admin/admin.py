"""Administration: topics, offsets, delayed records, the state of the appliance; of groups: see
`tailrace.admin.groups`.

Every call is one request or a few, driven by the caller's thread.
"""

from __future__ import annotations

import base64
import datetime as dt
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, TypeVar

from tailrace.admin.groups import GroupAdmin
from tailrace.client.connection import Connection
from tailrace.client.kafka_names import RenamedMethods
from tailrace.client.list_offsets import list_offsets
from tailrace.client.new_topic import NewTopic as NewTopic
from tailrace.client.new_topic import check_configs, delay_schema_of
from tailrace.client.new_topic import create_request as create_request
from tailrace.client.runtime import SYSTEM, Runtime
from tailrace.client.settings import AdminSettings, build, documented, merged
from tailrace.client.steps import Call, Steps, call_json, operation, run_on
from tailrace.client.topic_metadata import TopicInfo, is_internal, topics_from_metadata
from tailrace.core.delays import due_time_us, moment_us
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import (
    DelayNotEnabledError,
    InvalidRecordError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    TailraceError,
    UnknownTopicError,
    error_for,
)
from tailrace.core.records import to_timestamp_us
from tailrace.core.recurrence import Recurrence
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import (
    by_partition,
    mapping_of,
    name_list,
    name_of,
    optional_text_bytes,
    whole,
)
from tailrace.protocol.frame import Api

T = TypeVar("T")
TOPICS_AT_ONCE = 256
DELAYS_PAGE = 1_000
DELAYS_AT_ONCE = 2_000
LEASES_AT_ONCE = 1_000
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class PendingDelay(NamedTuple):
    """A record that waits for its time, as `Admin.list_delays` shows it."""

    delay_id: str
    topic: str
    partition: int
    due: dt.datetime
    """When it is delivered; of a recurring one: the next time. In UTC."""
    key: bytes | None
    repeat: Recurrence | None


def partition_counts(call: Call, internal: bool = False) -> Steps[dict[str, int]]:
    """Topic -> how many partitions it has, names ascending, asked for page by page through
    `call(api, request)`. `internal`: also of topics that are not a user's (see
    `tailrace.client.topic_metadata`).
    """
    counts: dict[str, int] = {}
    after: str | None = ""
    while after is not None:
        answer = yield from call(Api.METADATA, {"topics": None, "names_only": True, "after": after})
        counts.update(
            (topic["name"], topic["partitions"])
            for topic in answer["topics"]
            if internal or not is_internal(topic["name"])
        )
        after = answer.get("after")
    return counts


@documented(AdminSettings)
class Admin(GroupAdmin, RenamedMethods):
    """Makes, changes, describes and deletes topics and groups, and shows the state of the
    appliance. A context manager; for one thread at a time.

        with tailrace.Admin("tcp://127.0.0.1:7420") as admin:
            admin.create_topics(tailrace.NewTopic("orders", partitions=4, configs={"retention.ms":
            "7d"}))

    What changes something is done when the method returns: files exist, or are gone. Every method
    raises NotReachableError when no appliance answers, RequestTimeoutError when the answer takes
    longer than `request_timeout_ms`, and ClientClosedError once it is closed.
    """

    _renamed: ClassVar[dict[str, str]] = {
        "alter_consumer_group_offsets": "write alter_group_offsets(group, {TopicPartition(topic, "
        "0): 1000})",
        "alter_configs": "write alter_topics({topic: {setting: value}})",
        "close_idle": "write close()",
        "delete_consumer_group_offsets": "write alter_group_offsets(group, {TopicPartition(topic, "
        "0): None})",
        "delete_consumer_groups": "write delete_groups([group])",
        "describe_acls": "users are not part of this version",
        "describe_consumer_groups": "write describe_groups([group])",
        "describe_group": "write describe_groups(group)[group]",
        "describe_log_dirs": "describe_topics() says the bytes of each partition",
        "incremental_alter_configs": "write alter_topics({topic: {setting: value}})",
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
        runtime: Runtime = SYSTEM,
    ) -> None:
        """`bootstrap`: the address, or a dict of settings with Kafka's names
        (`{"bootstrap.servers": "localhost:7420"}`); settings that are left out are as
        `tailrace.client.settings.AdminSettings` says. Raises InvalidSettingError.
        """
        first = (
            bootstrap
            if isinstance(bootstrap, Mapping) or bootstrap is None
            else {"bootstrap": bootstrap}
        )
        given = {
            "bootstrap_servers": bootstrap_servers, "request_timeout_ms": request_timeout_ms,
            "connect_timeout_ms": connect_timeout_ms,
            "client_id": client_id,
        }  # fmt: skip
        self.settings = build(
            AdminSettings,
            merged(first, {name: value for name, value in given.items() if value is not None}),
        )
        self._connection = Connection(
            self.settings.bootstrap_servers, self.settings.client_id, runtime, "admin client"
        )

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
        """End the connection. A second time it does nothing."""
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
        """A change of topics. Raises the error of the first that failed; the others are done."""
        self._connection.check_usable()
        if not items:
            return []
        answer = yield from self._call(api, {"topics": items, "validate_only": validate_only})
        for result in answer["results"]:
            if result["code"]:
                raise error_for(code_of(result["code"]), result.get("message", ""))
        results: list[dict[str, Any]] = answer["results"]
        return results

    # ---- topics ----------------------------------------------------------------------------------

    @operation
    def create_topics(
        self, topics: NewTopic | Iterable[NewTopic], *, validate_only: bool = False
    ) -> Steps[None]:
        """Make topics: one, or several. With `validate_only` only say whether they could be made.
        Those before the first that is refused are made.

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
        self, names: str | Iterable[str], *, with_derived: bool = False
    ) -> Steps[None]:
        """Delete topics (a name, or several) with everything in them; `with_derived`: and their
        `derived_topics`. Raises UnknownTopicError.
        """
        requested = name_list("names", names)
        if with_derived:
            requested += yield from self._derived_topics(requested)
        yield from self._change(Api.DELETE_TOPICS, [{"name": name} for name in requested])

    @operation
    def derived_topics(self, names: str | Iterable[str]) -> Steps[list[str]]:
        """The retry topics and dead-letter topics that clients have made for these topics and for
        no other, and theirs in turn, ascending. Raises UnknownTopicError.
        """
        return (yield from self._derived_topics(name_list("names", names)))

    def _derived_topics(self, names: list[str]) -> Steps[list[str]]:
        from tailrace.client.derived_topics import derived_from

        self._connection.check_usable()
        existing = yield from partition_counts(self._call)
        return sorted((yield from derived_from(self._call, names, existing)))

    @operation
    def alter_topics(self, configs: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        """Change settings: topic -> {setting: value}; settings that are not named stay. Raises
        UnknownTopicError, InvalidSettingError.
        """
        items: list[dict[str, Any]] = []
        for name, values in mapping_of(
            "configs", configs, '{"orders": {"retention.ms": "7d"}}'
        ).items():
            changed = mapping_of(f"configs of {name!r:.100}", values, '{"retention.ms": "7d"}')
            check_configs(changed)
            items.append({"name": name_of("the name of a topic", name), "configs": dict(changed)})
        delayed = [item["name"] for item in items if "delay.enabled" in item["configs"]]
        infos = (yield from self._topic_info(delayed)) if delayed else {}
        for item in items:
            if item["name"] in infos and infos[item["name"]].typed:
                item["delay_schema"] = delay_schema_of(infos[item["name"]].schema_message)
        yield from self._change(Api.ALTER_TOPICS, items)

    @operation
    def create_partitions(self, counts: Mapping[str, int]) -> Steps[None]:
        """Raise the number of partitions: topic -> total. Keys then go elsewhere than before, as in
        Kafka. Raises UnknownTopicError, InvalidSettingError.
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
    def list_topics(self, *, internal: bool = False) -> Steps[list[str]]:
        """Names of all topics, ascending; `internal`: also of those that Spark's sink stages rows
        in, and the like.
        """
        return list((yield from partition_counts(self._call, internal)))

    @operation
    def partition_counts(self, *, internal: bool = False) -> Steps[dict[str, int]]:
        """How many partitions each topic has; names ascending. `internal`: as of `list_topics`."""
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
                infos.update(topics_from_metadata(answer, *requested[:count]))
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
        """Everything known of topics (None: of all): settings, schema, when they were created (ISO
        8601), and per partition its offsets, records, bytes on the disk, segments, state, newest
        timestamp and time of the last append, both in milliseconds since 1970; of a topic with hash
        slots its slot_map_version, and per partition its slots and hand_over: partition that gave
        it some -> the offset there up to which it is to be read before. Raises UnknownTopicError.
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
            partitions = []
            for number in range(len(info.partitions)):
                found = offsets[TopicPartition(name, number)]
                partitions.append(
                    {"partition": number, "beginning_offset": found.get("beginning"),
                    "end_offset": found.get("end"),
                     "records": (found.get("end") or 0) - (found.get("beginning") or 0),
                     "bytes": found.get("size_bytes"),
                     "segments": found.get("segments"),
                     "newest_timestamp": _ms(found.get("max_timestamp_us")) if found.get("end") != found.get("beginning") else None,  # noqa: E501
                     "last_append": _ms(found.get("last_append_us")),
                     "leader_epoch": found.get("leader_epoch"),
                     "state": found.get("state", code_of(found["code"]).name),
                     **({"slots": info.partitions[number].get("slots"),
                     "hand_over": dict(info.hand_overs.get(number,
                     ()))} if info.slot_map_version else {})}
                )  # fmt: skip
            result[name] = {
                "name": name, "topic_id": info.topic_id.hex(), "typed": info.typed,
                "schema": str(info.schema), "configs": dict(info.settings),
                "created": (_EPOCH + dt.timedelta(microseconds=info.created_us)).isoformat() if info.created_us else None, "partitions": partitions,  # noqa: E501
                **({"slot_map_version": info.slot_map_version} if info.slot_map_version else {}),
            }  # fmt: skip
        return result

    @operation
    def describe_configs(self, names: str | Iterable[str]) -> Steps[dict[str, dict[str, Any]]]:
        """Settings of topics, complete. Raises UnknownTopicError."""
        return {
            name: dict(info.settings) for name, info in (yield from self._topic_info(names)).items()
        }

    # ---- offsets ---------------------------------------------------------------------------------

    @operation
    def offsets(
        self, requested: Mapping[TopicPartition, str | int | dt.datetime]
    ) -> Steps[dict[TopicPartition, dict[str, Any]]]:
        """What the appliance says of each partition's offset at "earliest", "latest" or a time (a
        datetime, or int microseconds), for which `offset` is the first record at or after it, -1
        where there is none. Each is a dict with `offset`, `beginning`, `end`, `size_bytes`,
        `leader_epoch` and `state`, or with the `code` of a refusal, which
        `tailrace.client.list_offsets.check_offsets_answer` raises.
        """
        self._connection.check_usable()
        given = by_partition("wanted", requested, '{TopicPartition(topic, 0): "latest"}')
        times = {
            key: to_timestamp_us(at) if isinstance(at, dt.datetime) else at
            for key, at in given.items()
        }
        return (yield from list_offsets(self._call, times.items()))

    @operation
    def delete_records(
        self, offsets: Mapping[TopicPartition, int]
    ) -> Steps[dict[TopicPartition, int]]:
        """Delete the records below these offsets (-1: below the high watermark). Returns where each
        partition begins now. Raises UnknownTopicError, OffsetOutOfRangeError.
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
        """Ask that retention keeps everything from these offsets on for `ttl_ms` (0: give the lease
        back). Ask again before it ends to keep it longer. A lease is durable when this returns.
        `lease`: its name, 1 to 100 characters. `topic_ids`: name -> id of the topics that are
        meant. Raises UnknownTopicError (UnknownTopicIdError for one that was deleted and made again
        since), OffsetOutOfRangeError when an offset is gone already, InvalidRequestError when there
        are too many leases.
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
                        f"{key[0]}-{key[1]} begins at offset {begins_at}, not {offset}"
                    )

    # ---- delayed records -------------------------------------------------------------------------

    def list_delays(
        self,
        topic: str,
        *,
        partition: int | None = None,
        key: bytes | str | None = None,
        due_from: dt.datetime | None = None,
        due_to: dt.datetime | None = None,
    ) -> Iterator[PendingDelay]:
        """What waits in a topic, by partition and due time, fetched page by page. `key`: only
        records with this key (text is taken as UTF-8); `due_from`, `due_to` (datetimes with a time
        zone): only those due between. Raises UnknownTopicError, DelayNotEnabledError,
        InvalidRequestError, also while the pages are gone through.
        """
        self._connection.check_usable()
        return self._pages(delays_request(topic, partition, key, due_from, due_to))

    def _pages(self, request: dict[str, Any]) -> Iterator[PendingDelay]:
        while True:
            delays, request["after"] = self._run_steps(self._delays_page(request))
            yield from delays
            if request["after"] is None:
                return

    def _delays_page(self, request: dict[str, Any]) -> Steps[tuple[list[PendingDelay], str | None]]:
        """One page of `list_delays`, and what the next begins after (None: it was the last)."""
        try:
            answer = yield from self._call(Api.LIST_DELAYS, request)
        except UnknownTopicError:
            if request["topic"] in (yield from partition_counts(self._call)):
                raise DelayNotEnabledError(
                    f"topic {request['topic']!r} has no delayed records: delay.enabled is false"
                ) from None
            raise
        delays = [
            PendingDelay(
                row["delay_id"], row["topic"], row["partition"],
                _EPOCH + dt.timedelta(microseconds=row["due_us"]),
                None if row["key"] is None else base64.b64decode(row["key"]),
                Recurrence(**row["repeat"]) if row["repeat"] else None,
            )
            for row in answer["delays"]
        ]  # fmt: skip
        return delays, answer["after"]

    @operation
    def cancel_delays(
        self, delay_ids: str | Iterable[str], *, topic: str | None = None
    ) -> Steps[dict[str, TailraceError | None]]:
        """Have delayed records (a delay_id, or several) not delivered. Returns for each id None, or
        why not: UnknownDelayError when it came too late. `topic`: ids of other topics are refused.
        Raises InvalidRequestError, RequestTimeoutError.
        """
        return {
            name: found if isinstance(found, TailraceError) else None
            for name, found in (
                yield from self._change_delays(
                    dict.fromkeys(name_list("delay_ids", delay_ids)), topic
                )
            ).items()
        }

    @operation
    def reschedule_delays(
        self, dues: Mapping[str, dt.datetime], *, topic: str | None = None
    ) -> Steps[dict[str, str | TailraceError]]:
        """Have delayed records delivered at another time: delay_id -> when (a datetime with a time
        zone). Returns for each its new id, by which it goes from now on, or why not. Raises
        InvalidRequestError, RequestTimeoutError.
        """
        changes: dict[str, int | None] = {}
        for name, due in mapping_of("dues", dues, "{delay_id: datetime}").items():
            _moment_us(f"the time for {name!r:.60}", due)
            changes[name_of("a delay_id", name)] = due_time_us(due, None, time.time_ns() // 1000)
        return (yield from self._change_delays(changes, topic))

    def _change_delays(
        self, changes: Mapping[str, int | None], topic: str | None
    ) -> Steps[dict[str, Any]]:
        self._connection.check_usable()
        if topic is not None:
            name_of("topic", topic)
        answers: dict[str, Any] = {}
        items = [{"delay_id": name, "due_us": due_us} for name, due_us in changes.items()]
        for start in range(0, len(items), DELAYS_AT_ONCE):
            piece = items[start : start + DELAYS_AT_ONCE]
            answer = yield from self._call(Api.CHANGE_DELAYS, {"changes": piece, "topic": topic})
            for item, result in zip(piece, answer["results"], strict=True):
                refused = result["code"] != ErrorCode.OK
                answers[str(item["delay_id"])] = (
                    error_for(code_of(result["code"]), result.get("message", ""))
                    if refused
                    else result.get("delay_id")
                )
        return answers

    @operation
    def describe_delays(self) -> Steps[list[dict[str, Any]]]:
        """Per partition of topics with delays: how many records wait, when the next is due, how
        many were delivered, how late the last one was.
        """
        partitions: list[dict[str, Any]] = []
        answer: dict[str, Any] = {"after": None}
        while True:  # page by page
            answer = yield from self._call(Api.DESCRIBE_DELAYS, {"after": answer["after"]})
            partitions += answer["partitions"]
            if answer.get("after") is None:
                return partitions

    # ---- the appliance ---------------------------------------------------------------------------

    @operation
    def describe_cluster(self) -> Steps[dict[str, Any]]:
        """Processes with pid and restarts, how many topics, partitions and bytes, which partitions
        take no writes and why.
        """
        state = yield from self._call(Api.DESCRIBE_CLUSTER, {})
        page = state
        while (after := page.get("offline_next")) is not None:
            page = yield from self._call(Api.DESCRIBE_CLUSTER, {"offline_after": after})
            state["offline"] += page["offline"]
        return state

    @operation
    def bring_online(self, topic: str) -> Steps[None]:
        """Let partitions that a failed disk took offline take writes again: their logs are
        recovered, then opened. Raises UnknownTopicError, PartitionOfflineError, StorageError when
        the disk still refuses.
        """
        yield from self._change(
            Api.ALTER_TOPICS, [{"name": name_of("topic", topic), "online": True}]
        )


def delays_request(
    topic: str,
    partition: int | None,
    key: bytes | str | None,
    due_from: dt.datetime | None,
    due_to: dt.datetime | None,
) -> dict[str, Any]:
    """A LIST_DELAYS request for the first page: see `Admin.list_delays`. Raises
    InvalidRequestError.
    """
    key_bytes = optional_text_bytes("key", key)
    return {
        "topic": name_of("topic", topic),
        "partition": None if partition is None else whole("partition", partition, 0),
        "limit": DELAYS_PAGE,
        "after": None, "key": None if key_bytes is None else key_bytes.hex(),
        "from_us": None if due_from is None else _moment_us("due_from", due_from),
        "to_us": None if due_to is None else _moment_us("due_to", due_to),
    }  # fmt: skip


def _ms(us: int | None) -> int | None:
    return us // 1000 if us else None


def _moment_us(label: str, when: Any) -> int:
    """A datetime with a time zone, microseconds since 1970. Raises InvalidRequestError."""
    try:
        return moment_us(label, when)
    except InvalidRecordError as error:
        raise InvalidRequestError(error.detail) from None
