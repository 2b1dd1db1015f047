"""Administration: topics, offsets, delayed records, the state of the appliance; of groups: see `tailrace.group_admin`.

Every call is one request or a few, driven by the caller's thread.
"""

from __future__ import annotations

import base64
import datetime as dt
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

from tailrace.arguments import by_partition, mapping_of, name_list, name_of, optional_text_bytes, whole
from tailrace.connection import Connection
from tailrace.delays import due_time_us, moment_us
from tailrace.environment import REAL, Environment
from tailrace.errors import (
    DelayNotEnabledError,
    InvalidRecordError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    TailraceError,
    UnknownTopicError,
    error_for,
)
from tailrace.group_admin import GroupAdmin
from tailrace.new_topic import NewTopic as NewTopic
from tailrace.new_topic import check_configs, delay_schema_of
from tailrace.new_topic import create_request as create_request
from tailrace.offset_lookup import list_offsets
from tailrace.other_names import OtherNames
from tailrace.protocol.errors import ErrorCode, code_of
from tailrace.protocol.wire import Api
from tailrace.records import TopicPartition, to_timestamp_us
from tailrace.recurrence import Recurrence
from tailrace.settings import AdminSettings, build, documented, merged
from tailrace.topics import TopicInfo, is_internal, topics_from_metadata

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


def partition_counts(call: Callable[[Api, dict[str, Any]], dict[str, Any]], internal: bool = False) -> dict[str, int]:
    """Topic -> how many partitions it has, names ascending, asked for page by page through `call(api, request)`. `internal`: also of topics that are not a
    user's (see `tailrace.topics`).
    """
    counts: dict[str, int] = {}
    after: str | None = ""
    while after is not None:
        answer = call(Api.METADATA, {"topics": None, "names_only": True, "after": after})
        counts.update((topic["name"], topic["partitions"]) for topic in answer["topics"] if internal or not is_internal(topic["name"]))
        after = answer.get("after")
    return counts


@documented(AdminSettings)
class Admin(GroupAdmin, OtherNames):
    """Makes, changes, describes and deletes topics and groups, and shows the state of the appliance. A context manager; for one thread at a time.

        with tailrace.Admin("tcp://127.0.0.1:7420") as admin:
            admin.create_topics(tailrace.NewTopic("orders", partitions=4, configs={"retention.ms": "7d"}))

    What changes something is done when the method returns: files exist, or are gone. Every method raises NotReachableError when no appliance answers,
    RequestTimeoutError when the answer takes longer than `request_timeout_ms`, and ClientClosedError once it is closed.
    """

    _elsewhere: ClassVar[dict[str, str]] = {
        "alter_consumer_group_offsets": "write alter_group_offsets(group, {TopicPartition(topic, 0): 1000})",
        "alter_configs": "write alter_topics({topic: {setting: value}})",
        "close_idle": "write close()",
        "delete_consumer_group_offsets": "write alter_group_offsets(group, {TopicPartition(topic, 0): None})",
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
        "remove_members_from_consumer_group": "stop the consumers; one that is gone leaves its group by itself",
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
        environment: Environment = REAL,
    ) -> None:
        """`bootstrap`: the address, or a dict of settings with Kafka's names (`{"bootstrap.servers": "localhost:7420"}`); settings that are left out are as
        `tailrace.settings.AdminSettings` says. Raises InvalidSettingError.
        """
        first = bootstrap if isinstance(bootstrap, Mapping) or bootstrap is None else {"bootstrap": bootstrap}
        given = {
            "bootstrap_servers": bootstrap_servers, "request_timeout_ms": request_timeout_ms, "connect_timeout_ms": connect_timeout_ms,
            "client_id": client_id,
        }  # fmt: skip
        self.settings = build(AdminSettings, merged(first, {name: value for name, value in given.items() if value is not None}))
        self._connection = Connection(self.settings.bootstrap, self.settings.client_id, environment, "admin client")

    def __enter__(self) -> Admin:
        self._connection.check_usable()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. A second time it does nothing."""
        self._connection.close()

    def _call(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        return self._connection.call_json(api, request, self.settings.request_timeout_ms, self.settings.connect_timeout_ms)

    def _change(self, api: Api, items: list[dict[str, Any]], validate_only: bool = False) -> list[dict[str, Any]]:
        """A change of topics. Raises the error of the first that failed; the others are done."""
        self._connection.check_usable()
        if not items:
            return []
        answer = self._call(api, {"topics": items, "validate_only": validate_only})
        for result in answer["results"]:
            if result["code"]:
                raise error_for(code_of(result["code"]), result.get("message", ""))
        results: list[dict[str, Any]] = answer["results"]
        return results

    # ---- topics ----------------------------------------------------------------------------------------------------------------------

    def create_topics(self, topics: NewTopic | Iterable[NewTopic], *, validate_only: bool = False) -> None:
        """Make topics: one, or several. With `validate_only` only say whether they could be made. Those before the first that is refused are made.

        Raises TopicExistsError, InvalidTopicNameError, InvalidSettingError, InvalidSchemaError, InvalidRequestError.
        """
        given: object = [topics] if isinstance(topics, NewTopic) else topics
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise InvalidRequestError(f"{given!r:.100} is no NewTopic; write NewTopic(name, partitions)")
        items = []
        for topic in given:
            if not isinstance(topic, NewTopic):
                raise InvalidRequestError(f"{topic!r:.100} is no NewTopic; write NewTopic(name, partitions)")
            items.append(topic.request())
        self._change(Api.CREATE_TOPICS, items, validate_only)

    def delete_topics(self, names: str | Iterable[str]) -> None:
        """Delete topics (a name, or several) with everything in them. Raises UnknownTopicError."""
        self._change(Api.DELETE_TOPICS, [{"name": name} for name in name_list("names", names)])

    def alter_topics(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Change settings: topic -> {setting: value}; settings that are not named stay. Raises UnknownTopicError, InvalidSettingError."""
        items: list[dict[str, Any]] = []
        for name, values in mapping_of("configs", configs, '{"orders": {"retention.ms": "7d"}}').items():
            changed = mapping_of(f"configs of {name!r:.100}", values, '{"retention.ms": "7d"}')
            check_configs(changed)
            items.append({"name": name_of("the name of a topic", name), "configs": dict(changed)})
        delayed = [item["name"] for item in items if "delay.enabled" in item["configs"]]
        infos = self.topic_info(delayed) if delayed else {}
        for item in items:
            if item["name"] in infos and infos[item["name"]].typed:
                item["delay_schema"] = delay_schema_of(infos[item["name"]].schema_message)
        self._change(Api.ALTER_TOPICS, items)

    def create_partitions(self, counts: Mapping[str, int]) -> None:
        """Raise the number of partitions: topic -> total. Keys then go elsewhere than before, as in Kafka. Raises UnknownTopicError,
        InvalidSettingError.
        """
        wanted = mapping_of("counts", counts, '{"orders": 8}').items()
        self._change(Api.ALTER_TOPICS, [{"name": name_of("the name of a topic", name), "partitions": count} for name, count in wanted])

    def list_topics(self, *, internal: bool = False) -> list[str]:
        """Names of all topics, ascending; `internal`: also of those that Spark's sink stages rows in, and the like."""
        return list(self.partition_counts(internal=internal))

    def partition_counts(self, *, internal: bool = False) -> dict[str, int]:
        """How many partitions each topic has; names ascending. `internal`: as of `list_topics`."""
        return partition_counts(self._call, internal)

    def topic_info(self, names: str | Iterable[str]) -> dict[str, TopicInfo]:
        """Schemas, settings and partition counts. Raises UnknownTopicError."""
        self._connection.check_usable()
        wanted, infos, count = name_list("names", names), dict[str, TopicInfo](), TOPICS_AT_ONCE
        while wanted:
            try:
                infos.update(topics_from_metadata(self._call(Api.METADATA, {"topics": wanted[:count]}), *wanted[:count]))
            except TailraceError as error:
                if error.code is not ErrorCode.REQUEST_TOO_LARGE or count == 1:
                    raise
                count = max(1, count // 4)  # their schemas are large
                continue
            del wanted[:count]
        return infos

    def describe_topics(self, names: str | Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Everything known of topics (None: of all): settings, schema, when they were created (ISO 8601), and per partition its offsets, records, bytes on
        the disk, segments, state, newest timestamp and time of the last append, both in milliseconds since 1970; of a topic with hash
        slots its slot_map_version, and per partition its slots and hand_over: partition that gave it some -> the offset there up to which it is to be read
        before. Raises UnknownTopicError.
        """
        infos = self.topic_info(self.list_topics() if names is None else names)
        result: dict[str, dict[str, Any]] = {}
        wanted = [TopicPartition(name, p) for name, info in infos.items() for p in range(len(info.partitions))]
        offsets = self.offsets(dict.fromkeys(wanted, "latest"))
        for name, info in infos.items():
            partitions = []
            for number in range(len(info.partitions)):
                found = offsets[TopicPartition(name, number)]
                partitions.append(
                    {"partition": number, "beginning_offset": found.get("beginning"), "end_offset": found.get("end"),
                     "records": (found.get("end") or 0) - (found.get("beginning") or 0), "bytes": found.get("size_bytes"),
                     "segments": found.get("segments"),
                     "newest_timestamp": _ms(found.get("max_timestamp_us")) if found.get("end") != found.get("beginning") else None,
                     "last_append": _ms(found.get("last_append_us")), "leader_epoch": found.get("leader_epoch"),
                     "state": found.get("state", code_of(found["code"]).name),
                     **({"slots": info.partitions[number].get("slots"), "hand_over": dict(info.hand_overs.get(number, ()))} if info.slot_map_version else {})}
                )  # fmt: skip
            result[name] = {
                "name": name, "topic_id": info.topic_id.hex(), "typed": info.typed, "schema": str(info.schema), "configs": dict(info.settings),
                "created": (_EPOCH + dt.timedelta(microseconds=info.created_us)).isoformat() if info.created_us else None, "partitions": partitions,
                **({"slot_map_version": info.slot_map_version} if info.slot_map_version else {}),
            }  # fmt: skip
        return result

    def describe_configs(self, names: str | Iterable[str]) -> dict[str, dict[str, Any]]:
        """Settings of topics, complete. Raises UnknownTopicError."""
        return {name: dict(info.settings) for name, info in self.topic_info(names).items()}

    # ---- offsets ---------------------------------------------------------------------------------------------------------------------

    def offsets(self, wanted: Mapping[TopicPartition, str | int | dt.datetime]) -> dict[TopicPartition, dict[str, Any]]:
        """What the appliance says of each partition's offset at "earliest", "latest" or a time (a datetime, or int microseconds), for which `offset` is the
        first record at or after it, -1 where there is none. Each is a dict with `offset`, `beginning`, `end`, `size_bytes`, `leader_epoch` and `state`, or
        with the `code` of a refusal, which `tailrace.offset_lookup.check_offsets_answer` raises.
        """
        self._connection.check_usable()
        given = by_partition("wanted", wanted, '{TopicPartition(topic, 0): "latest"}')
        times = {key: to_timestamp_us(at) if isinstance(at, dt.datetime) else at for key, at in given.items()}
        return list_offsets(self._call, times.items())

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records below these offsets (-1: below the high watermark). Returns where each partition begins now. Raises UnknownTopicError,
        OffsetOutOfRangeError.
        """
        given = by_partition("offsets", offsets, "{TopicPartition(topic, 0): 1000}")
        wanted: dict[str, dict[str, int]] = {}
        for key, offset in given.items():
            wanted.setdefault(key.topic, {})[str(key.partition)] = whole("offset", offset, -1)
        results = self._change(Api.DELETE_RECORDS, [{"name": name, "partitions": partitions} for name, partitions in wanted.items()])
        starts = {result["name"]: result["log_start_offsets"] for result in results}
        return {key: int(starts[key.topic][str(key.partition)]) for key in given}

    def lease_offsets(self, lease: str, offsets: Mapping[TopicPartition, int], ttl_ms: int) -> None:
        """Ask that retention keeps everything from these offsets on for `ttl_ms` (0: give the lease back). Ask again before it ends to keep it longer.
        A lease is durable when this returns. `lease`: its name, 1 to 100 characters. Raises UnknownTopicError, OffsetOutOfRangeError when an offset is gone
        already, InvalidRequestError when there are too many leases.
        """
        self._connection.check_usable()
        name_of("lease", lease)
        whole("ttl_ms", ttl_ms, 0)
        given = by_partition("offsets", offsets, "{TopicPartition(topic, 0): 1000}")
        items = [(key, whole("offset", offset, 0)) for key, offset in given.items()]
        for start in range(0, len(items), LEASES_AT_ONCE):
            piece = items[start : start + LEASES_AT_ONCE]
            wanted = [{"topic": key[0], "partition": key[1], "offset": offset} for key, offset in piece]
            answer = self._call(Api.LEASE_OFFSETS, {"lease": lease, "ttl_ms": ttl_ms, "partitions": wanted})
            for (key, offset), begins_at in zip(piece, answer["log_start_offsets"], strict=True):
                if ttl_ms and begins_at > offset:
                    raise OffsetOutOfRangeError(f"{key[0]}-{key[1]} begins at offset {begins_at}, not {offset}")

    # ---- delayed records -------------------------------------------------------------------------------------------------------------

    def list_delays(
        self,
        topic: str,
        *,
        partition: int | None = None,
        key: bytes | str | None = None,
        due_from: dt.datetime | None = None,
        due_to: dt.datetime | None = None,
    ) -> Iterator[PendingDelay]:
        """What waits in a topic, by partition and due time, fetched page by page. `key`: only records with this key (text is taken as UTF-8); `due_from`,
        `due_to` (datetimes with a time zone): only those due between. Raises UnknownTopicError, DelayNotEnabledError, InvalidRequestError, also while the
        pages are gone through.
        """
        self._connection.check_usable()
        return self._pages(delays_request(topic, partition, key, due_from, due_to))

    def _pages(self, request: dict[str, Any]) -> Iterator[PendingDelay]:
        while True:
            delays, request["after"] = self._delays_page(request)
            yield from delays
            if request["after"] is None:
                return

    def _delays_page(self, request: dict[str, Any]) -> tuple[list[PendingDelay], str | None]:
        """One page of `list_delays`, and what the next begins after (None: it was the last)."""
        try:
            answer = self._call(Api.LIST_DELAYS, request)
        except UnknownTopicError:
            if request["topic"] in self.partition_counts():
                raise DelayNotEnabledError(f"topic {request['topic']!r} has no delayed records: delay.enabled is false") from None
            raise
        delays = [
            PendingDelay(
                row["delay_id"], row["topic"], row["partition"], _EPOCH + dt.timedelta(microseconds=row["due_us"]),
                None if row["key"] is None else base64.b64decode(row["key"]), Recurrence(**row["repeat"]) if row["repeat"] else None,
            )
            for row in answer["delays"]
        ]  # fmt: skip
        return delays, answer["after"]

    def cancel_delays(self, delay_ids: str | Iterable[str], *, topic: str | None = None) -> dict[str, TailraceError | None]:
        """Have delayed records (a delay_id, or several) not delivered. Returns for each id None, or why not: UnknownDelayError when it came too late.
        `topic`: ids of other topics are refused. Raises InvalidRequestError, RequestTimeoutError.
        """
        return {
            name: found if isinstance(found, TailraceError) else None
            for name, found in self._change_delays(dict.fromkeys(name_list("delay_ids", delay_ids)), topic).items()
        }

    def reschedule_delays(self, dues: Mapping[str, dt.datetime], *, topic: str | None = None) -> dict[str, str | TailraceError]:
        """Have delayed records delivered at another time: delay_id -> when (a datetime with a time zone). Returns for each its new id, by which it goes from
        now on, or why not. Raises InvalidRequestError, RequestTimeoutError.
        """
        changes: dict[str, int | None] = {}
        for name, due in mapping_of("dues", dues, "{delay_id: datetime}").items():
            _moment_us(f"the time for {name!r:.60}", due)
            changes[name_of("a delay_id", name)] = due_time_us(due, None, time.time_ns() // 1000)
        return self._change_delays(changes, topic)

    def _change_delays(self, changes: Mapping[str, int | None], topic: str | None) -> dict[str, Any]:
        self._connection.check_usable()
        if topic is not None:
            name_of("topic", topic)
        answers: dict[str, Any] = {}
        items = [{"delay_id": name, "due_us": due_us} for name, due_us in changes.items()]
        for start in range(0, len(items), DELAYS_AT_ONCE):
            piece = items[start : start + DELAYS_AT_ONCE]
            found = self._call(Api.CHANGE_DELAYS, {"changes": piece, "topic": topic})["results"]
            for item, result in zip(piece, found, strict=True):
                refused = result["code"] != ErrorCode.OK
                answers[str(item["delay_id"])] = (
                    error_for(code_of(result["code"]), result.get("message", "")) if refused else result.get("delay_id")
                )
        return answers

    def describe_delays(self) -> list[dict[str, Any]]:
        """Per partition of topics with delays: how many records wait, when the next is due, how many were delivered, how late the last one was."""
        partitions: list[dict[str, Any]] = []
        answer: dict[str, Any] = {"after": None}
        while True:  # page by page
            answer = self._call(Api.DESCRIBE_DELAYS, {"after": answer["after"]})
            partitions += answer["partitions"]
            if answer.get("after") is None:
                return partitions

    # ---- the appliance ---------------------------------------------------------------------------------------------------------------

    def describe_cluster(self) -> dict[str, Any]:
        """Processes with pid and restarts, how many topics, partitions and bytes, which partitions take no writes and why."""
        state = self._call(Api.DESCRIBE_CLUSTER, {})
        page = state
        while (after := page.get("offline_next")) is not None:
            page = self._call(Api.DESCRIBE_CLUSTER, {"offline_after": after})
            state["offline"] += page["offline"]
        return state

    def bring_online(self, topic: str) -> None:
        """Let partitions that a failed disk took offline take writes again: their logs are recovered, then opened. Raises UnknownTopicError,
        PartitionOfflineError, StorageError when the disk still refuses.
        """
        self._change(Api.ALTER_TOPICS, [{"name": name_of("topic", topic), "online": True}])


def delays_request(
    topic: str, partition: int | None, key: bytes | str | None, due_from: dt.datetime | None, due_to: dt.datetime | None
) -> dict[str, Any]:
    """A LIST_DELAYS request for the first page: see `Admin.list_delays`. Raises InvalidRequestError."""
    key_bytes = optional_text_bytes("key", key)
    return {
        "topic": name_of("topic", topic), "partition": None if partition is None else whole("partition", partition, 0), "limit": DELAYS_PAGE,
        "after": None, "key": None if key_bytes is None else key_bytes.hex(), "from_us": None if due_from is None else _moment_us("due_from", due_from),
        "to_us": None if due_to is None else _moment_us("due_to", due_to),
    }  # fmt: skip


def _ms(us: int | None) -> int | None:
    return us // 1000 if us else None


def _moment_us(what: str, when: Any) -> int:
    """A datetime with a time zone, microseconds since 1970. Raises InvalidRequestError."""
    try:
        return moment_us(what, when)
    except InvalidRecordError as error:
        raise InvalidRequestError(error.detail) from None
