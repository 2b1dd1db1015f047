"""Administration: topics, offsets, the state of the appliance.

Every call is one request, driven by the caller's thread; not thread-safe, a context manager. Calls that change something are answered
when it is done:
the files exist, or are gone.
"""

from __future__ import annotations

import base64
import datetime as dt
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from tailrace.arguments import name_list, partition_of
from tailrace.connection import Connection
from tailrace.delays import due_time_us, moment_us
from tailrace.environment import REAL, Environment
from tailrace.errors import (
    DelayNotEnabledError,
    InvalidRequestError,
    InvalidSettingError,
    NotSupportedError,
    OffsetOutOfRangeError,
    TailraceError,
    UnknownTopicError,
    error_for,
)
from tailrace.protocol.errors import ErrorCode, code_of
from tailrace.protocol.wire import Api
from tailrace.records import TopicPartition, to_timestamp_us
from tailrace.recurrence import Recurrence
from tailrace.settings import DEFAULT_BOOTSTRAP, merged
from tailrace.topics import TopicInfo, topics_from_metadata

TOPICS_AT_ONCE = 256
OFFSETS_AT_ONCE = 1_024
DELAYS_PAGE = 1_000
DELAYS_AT_ONCE = 2_000
LEASES_AT_ONCE = 1_000
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class NewTopic:
    """A topic to be made. `schema`: a pyarrow Schema, or any frame that has the columns; None: the default schema of key, value,
    timestamp and headers.
    """

    def __init__(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, Any] | None = None,
        schema: Any = None,
        *,
        num_partitions: int | None = None,
        replication_factor: int = 1,
    ) -> None:
        """`num_partitions`: Kafka's name for `partitions`. Raises InvalidSettingError for a wrong part, NotSupportedError for more than one replica."""
        if num_partitions is not None:
            partitions = num_partitions
        if not isinstance(name, str):
            raise InvalidSettingError(f"the name of a topic is {name!r:.100}; it must be text")
        if not isinstance(partitions, int) or isinstance(partitions, bool):
            raise InvalidSettingError(f"partitions is {partitions!r:.100}; it takes a whole number")
        if configs is not None and not isinstance(configs, Mapping):
            raise InvalidSettingError(f"configs is a {type(configs).__name__}; it takes a dict of setting -> value")
        if replication_factor not in (1, -1):
            raise NotSupportedError("replication is not part of this version: leave replication_factor out")
        self.name = name
        self.partitions = partitions
        self.configs = dict(configs or {})
        self.schema = schema

    def __repr__(self) -> str:
        return f"NewTopic(name={self.name!r}, partitions={self.partitions}, configs={self.configs}, schema={'given' if self.schema is not None else None})"


class PendingDelay(NamedTuple):
    """A record that waits for its time, as `Admin.list_delays` shows it."""

    delay_id: str
    topic: str
    partition: int
    due: dt.datetime
    """When it is delivered; of a recurring one: the next time. In UTC."""
    key: bytes | None
    repeat: Recurrence | None


def create_request(
    name: str, partitions: int = 1, configs: Mapping[str, Any] | None = None, schema_message: bytes | None = None
) -> dict[str, Any]:
    """One entry of a CREATE_TOPICS request."""
    request: dict[str, Any] = {"name": name, "partitions": partitions, "configs": dict(configs or {}), "schema": None}
    if schema_message is not None:
        request["schema"] = base64.b64encode(schema_message).decode("ascii")
        if "delay.enabled" in request["configs"]:
            request["delay_schema"] = _delay_schema_of(schema_message)
    return request


def _delay_schema_of(schema_message: bytes) -> str:
    """The schema of the delay log of a topic that has this one, for JSON."""
    from tailrace.schema import delay_schema, from_message, to_message

    return base64.b64encode(to_message(delay_schema(from_message(schema_message)))).decode("ascii")


def partition_counts(call: Callable[[Api, dict[str, Any]], dict[str, Any]]) -> dict[str, int]:
    """Topic -> how many partitions it has, names ascending, asked for page by page through `call(api, request)`."""
    counts: dict[str, int] = {}
    after: str | None = ""
    while after is not None:
        answer = call(Api.METADATA, {"topics": None, "names_only": True, "after": after})
        counts.update((topic["name"], topic["partitions"]) for topic in answer["topics"])
        after = answer.get("after")
    return counts


class Admin:
    """A connection for administration."""

    def __init__(
        self,
        bootstrap: str | Mapping[str, Any] | None = None,
        *,
        bootstrap_servers: str | None = None,
        request_timeout_ms: int = 30_000,
        connect_timeout_ms: int | None = None,
        client_id: str = "tailrace-admin",
        environment: Environment = REAL,
    ) -> None:
        """`bootstrap`: the address, or Kafka's dict (`{"bootstrap.servers": "localhost:7420"}`). `connect_timeout_ms`: how long to try an appliance that
        does not answer at all; None: as long as a request may take. Raises InvalidSettingError.
        """
        settings = merged(
            bootstrap if isinstance(bootstrap, Mapping) else {"bootstrap": bootstrap or bootstrap_servers or DEFAULT_BOOTSTRAP}, {}
        )
        unknown = sorted(set(settings) - {"bootstrap"})
        if unknown:
            raise InvalidSettingError(f"unknown setting {unknown[0]!r} of an Admin; what is not the address is given as a keyword argument")
        self._timeout_ms = request_timeout_ms
        self._connect_timeout_ms = connect_timeout_ms
        self._connection = Connection(settings.get("bootstrap", DEFAULT_BOOTSTRAP), client_id, environment, "admin client")

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def _call(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        return self._connection.call_json(api, request, self._timeout_ms, self._connect_timeout_ms)

    def _change(self, api: Api, items: list[dict[str, Any]], validate_only: bool = False) -> list[dict[str, Any]]:
        """A change of topics. Raises the error of the first that failed; the others are done."""
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
        """Make topics. Raises TopicExistsError, InvalidTopicNameError, InvalidSettingError, InvalidSchemaError."""
        items = []
        for topic in [topics] if isinstance(topics, NewTopic) else topics:
            if not isinstance(topic, NewTopic):
                raise InvalidRequestError(f"{topic!r:.100} is no NewTopic; write NewTopic(name, partitions)")
            message = None
            if topic.schema is not None:
                from tailrace.schema import schema_of, to_message

                message = to_message(schema_of(topic.schema))
            items.append(create_request(topic.name, topic.partitions, topic.configs, message))
        self._change(Api.CREATE_TOPICS, items, validate_only)

    def delete_topics(self, names: str | Iterable[str]) -> None:
        """Delete topics (a name, or several) with everything in them. Raises UnknownTopicError."""
        self._change(Api.DELETE_TOPICS, [{"name": name} for name in name_list("names", names)])

    def alter_topics(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Change settings: topic -> {setting: value}; others stay. Raises UnknownTopicError, InvalidSettingError."""
        items: list[dict[str, Any]] = [{"name": name, "configs": dict(values)} for name, values in configs.items()]
        delayed = [item["name"] for item in items if "delay.enabled" in item["configs"]]
        infos = self.topic_info(delayed) if delayed else {}
        for item in items:
            if item["name"] in infos and infos[item["name"]].typed:
                item["delay_schema"] = _delay_schema_of(infos[item["name"]].schema_message)
        self._change(Api.ALTER_TOPICS, items)

    def create_partitions(self, counts: Mapping[str, int]) -> None:
        """Raise the number of partitions: topic -> total. Keys then go elsewhere than before, as in Kafka. Raises UnknownTopicError,
        InvalidSettingError.
        """
        self._change(Api.ALTER_TOPICS, [{"name": name, "partitions": count} for name, count in counts.items()])

    def list_topics(self) -> list[str]:
        """Names of all topics, ascending."""
        return list(self.partition_counts())

    def partition_counts(self) -> dict[str, int]:
        """How many partitions each topic has; names ascending."""
        return partition_counts(self._call)

    def topic_info(self, names: str | Iterable[str]) -> dict[str, TopicInfo]:
        """Schemas, settings and partition counts. Raises UnknownTopicError."""
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
        """Everything known of topics (None: of all): settings, schema, and per partition its offsets, bytes and state. Raises
        UnknownTopicError.
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
                    {"partition": number, "beginning_offset": found.get("beginning"), "end_offset": found.get("end"), "bytes": found.get("size_bytes"),
                     "leader_epoch": found.get("leader_epoch"), "state": found.get("state", code_of(found["code"]).name)}
                )  # fmt: skip
            result[name] = {
                "name": name, "topic_id": info.topic_id.hex(), "typed": info.typed, "schema": str(info.schema), "configs": dict(info.settings),
                "partitions": partitions,
            }  # fmt: skip
        return result

    def describe_configs(self, names: str | Iterable[str]) -> dict[str, dict[str, Any]]:
        """Settings of topics, complete. Raises UnknownTopicError."""
        return {name: dict(info.settings) for name, info in self.topic_info(names).items()}

    # ---- offsets ---------------------------------------------------------------------------------------------------------------------

    def offsets(self, wanted: Mapping[TopicPartition, str | int | dt.datetime]) -> dict[TopicPartition, dict[str, Any]]:
        """What LIST_OFFSETS says of each partition, for "earliest", "latest" or a time (a datetime, or int microseconds), for which `offset` is the first
        record at or after it, -1 where there is none. Check each with `check_offsets_answer`.
        """
        items = []
        for given, at in wanted.items():
            key = partition_of(given)
            items.append({"topic": key.topic, "partition": key.partition, "at": to_timestamp_us(at) if isinstance(at, dt.datetime) else at})
        found: dict[TopicPartition, dict[str, Any]] = {}
        for start in range(0, len(items), OFFSETS_AT_ONCE):
            answer = self._call(Api.LIST_OFFSETS, {"partitions": items[start : start + OFFSETS_AT_ONCE]})
            found.update((TopicPartition(item["topic"], item["partition"]), item) for item in answer["offsets"])
        return found

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records below these offsets (-1: below the high watermark). Answers where each partition begins now. Raises
        UnknownTopicError, OffsetOutOfRangeError.
        """
        wanted: dict[str, dict[str, int]] = {}
        for key, offset in offsets.items():
            topic, partition = partition_of(key)
            wanted.setdefault(topic, {})[str(partition)] = offset
        results = self._change(Api.DELETE_RECORDS, [{"name": name, "partitions": partitions} for name, partitions in wanted.items()])
        starts = {result["name"]: result["log_start_offsets"] for result in results}
        return {TopicPartition(*key): int(starts[key[0]][str(key[1])]) for key in offsets}

    def lease_offsets(self, lease: str, offsets: Mapping[TopicPartition, int], ttl_ms: int) -> None:
        """Ask that retention keeps everything from these offsets on for `ttl_ms` (0: give the lease back). Ask again before it ends to keep it longer.
        A lease is durable when this returns. Raises UnknownTopicError, OffsetOutOfRangeError when an offset is gone already, InvalidRequestError when there
        are too many leases.
        """
        items = list(offsets.items())
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
        key: bytes | None = None,
        due_from: dt.datetime | None = None,
        due_to: dt.datetime | None = None,
    ) -> Iterator[PendingDelay]:
        """What waits in a topic, by partition and due time, fetched page by page. Raises UnknownTopicError, InvalidRequestError."""
        request: dict[str, Any] = {"topic": topic, "partition": partition, "limit": DELAYS_PAGE, "after": None}
        request["key"] = None if key is None else key.hex()
        request["from_us"] = None if due_from is None else moment_us("due_from", due_from)
        request["to_us"] = None if due_to is None else moment_us("due_to", due_to)
        return self._pages(request)

    def _pages(self, request: dict[str, Any]) -> Iterator[PendingDelay]:
        while True:
            try:
                answer = self._call(Api.LIST_DELAYS, request)
            except UnknownTopicError:
                if request["topic"] in self.partition_counts():
                    raise DelayNotEnabledError(f"topic {request['topic']!r} has no delayed records: delay.enabled is false") from None
                raise
            for row in answer["delays"]:
                yield PendingDelay(
                    row["delay_id"], row["topic"], row["partition"], _EPOCH + dt.timedelta(microseconds=row["due_us"]),
                    None if row["key"] is None else base64.b64decode(row["key"]), Recurrence(**row["repeat"]) if row["repeat"] else None,
                )  # fmt: skip
            request["after"] = answer["after"]
            if answer["after"] is None:
                return

    def cancel_delays(self, delay_ids: str | Iterable[str], *, topic: str | None = None) -> dict[str, TailraceError | None]:
        """Have delayed records not delivered. Answers for each id None, or why not: UnknownDelayError when it came too late. `topic`: ids of other topics
        are refused. Raises InvalidRequestError, RequestTimeoutError.
        """
        return {
            name: found if isinstance(found, TailraceError) else None
            for name, found in self._change_delays(dict.fromkeys(name_list("delay_ids", delay_ids)), topic).items()
        }

    def reschedule_delays(self, dues: Mapping[str, dt.datetime], *, topic: str | None = None) -> dict[str, str | TailraceError]:
        """Have delayed records delivered at another time: id -> when (a datetime with a time zone). Answers for each its new id, by which it goes from now
        on, or why not. Raises InvalidRequestError, InvalidRecordError, RequestTimeoutError.
        """
        return self._change_delays({name: due_time_us(due, None, time.time_ns() // 1000) for name, due in dues.items()}, topic)

    def _change_delays(self, changes: Mapping[str, int | None], topic: str | None) -> dict[str, Any]:
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
        self._change(Api.ALTER_TOPICS, [{"name": topic, "online": True}])


def check_offsets_answer(item: dict[str, Any]) -> dict[str, Any]:
    """One entry of a LIST_OFFSETS answer. Raises what it says."""
    code = code_of(item["code"])
    if code is not ErrorCode.OK:
        raise error_for(code, f"{item['topic']}-{item['partition']}")
    if "offset" not in item:
        raise InvalidRequestError("an offset is missing in the answer")
    return item
