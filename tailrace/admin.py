"""Administration: topics, offsets, the state of the appliance.

Every call is one request, driven by the caller's thread; not thread-safe, a context manager. Calls that change something are answered
when it is done:
the files exist, or are gone.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from tailrace.connection import Connection
from tailrace.environment import REAL, Environment
from tailrace.errors import InvalidRequestError, OffsetOutOfRangeError, error_for
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode, code_of
from tailrace.protocol.session import CLIENT_JSON_MAX_BYTES
from tailrace.protocol.wire import Api
from tailrace.records import TopicPartition
from tailrace.settings import DEFAULT_BOOTSTRAP
from tailrace.topics import TopicInfo, topics_from_metadata


class NewTopic:
    """A topic to be made. `schema`: a pyarrow Schema, or any frame that has the columns; None: the default schema of key, value,
    timestamp and headers.
    """

    def __init__(self, name: str, partitions: int = 1, configs: Mapping[str, Any] | None = None, schema: Any = None) -> None:
        self.name = name
        self.partitions = partitions
        self.configs = dict(configs or {})
        self.schema = schema

    def __repr__(self) -> str:
        return f"NewTopic(name={self.name!r}, partitions={self.partitions}, configs={self.configs}, schema={'given' if self.schema is not None else None})"


def create_request(
    name: str, partitions: int = 1, configs: Mapping[str, Any] | None = None, schema_message: bytes | None = None
) -> dict[str, Any]:
    """One entry of a CREATE_TOPICS request."""
    schema = None if schema_message is None else base64.b64encode(schema_message).decode("ascii")
    return {"name": name, "partitions": partitions, "configs": dict(configs or {}), "schema": schema}


class Admin:
    """A connection for administration."""

    def __init__(
        self,
        bootstrap: str = DEFAULT_BOOTSTRAP,
        *,
        request_timeout_ms: int = 30_000,
        connect_timeout_ms: int | None = None,
        client_id: str = "tailrace-admin",
        environment: Environment = REAL,
    ) -> None:
        """`connect_timeout_ms`: how long to try an appliance that does not answer at all; None: as long as a request may take."""
        self._timeout_ms = request_timeout_ms
        self._connect_timeout_ms = connect_timeout_ms
        self._connection = Connection(bootstrap, client_id, environment)

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def _call(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        response = self._connection.call(api, [requests.encode_json(request)], self._timeout_ms, self._connect_timeout_ms)
        return requests.decode_json(response.body[0], CLIENT_JSON_MAX_BYTES)

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

    def create_topics(self, topics: Sequence[NewTopic], *, validate_only: bool = False) -> None:
        """Make topics. Raises TopicExistsError, InvalidTopicNameError, InvalidSettingError, InvalidSchemaError."""
        items = []
        for topic in topics:
            message = None
            if topic.schema is not None:
                from tailrace.schema import schema_of, to_message

                message = to_message(schema_of(topic.schema))
            items.append(create_request(topic.name, topic.partitions, topic.configs, message))
        self._change(Api.CREATE_TOPICS, items, validate_only)

    def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics with everything in them. Raises UnknownTopicError."""
        self._change(Api.DELETE_TOPICS, [{"name": name} for name in names])

    def alter_topics(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Change settings: topic -> {setting: value}; others stay. Raises UnknownTopicError, InvalidSettingError."""
        self._change(Api.ALTER_TOPICS, [{"name": name, "configs": dict(values)} for name, values in configs.items()])

    def create_partitions(self, counts: Mapping[str, int]) -> None:
        """Raise the number of partitions: topic -> total. Keys then go elsewhere than before, as in Kafka. Raises UnknownTopicError,
        InvalidSettingError.
        """
        self._change(Api.ALTER_TOPICS, [{"name": name, "partitions": count} for name, count in counts.items()])

    def list_topics(self) -> list[str]:
        """Names of all topics, ascending."""
        answer = self._call(Api.METADATA, {"topics": None, "names_only": True})
        return [topic["name"] for topic in answer["topics"]]

    def topic_info(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        """Schemas, settings and partition counts. Raises UnknownTopicError."""
        return topics_from_metadata(self._call(Api.METADATA, {"topics": list(names)}))

    def describe_topics(self, names: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
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

    def describe_configs(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Settings of topics, complete. Raises UnknownTopicError."""
        return {name: dict(info.settings) for name, info in self.topic_info(names).items()}

    # ---- offsets ---------------------------------------------------------------------------------------------------------------------

    def offsets(self, wanted: Mapping[TopicPartition, str | int]) -> dict[TopicPartition, dict[str, Any]]:
        """What LIST_OFFSETS says of each partition, for "earliest", "latest" or a time in microseconds; check each with
        `check_offsets_answer`.
        """
        if not wanted:
            return {}
        items = [{"topic": tp.topic, "partition": tp.partition, "at": at} for tp, at in wanted.items()]
        answer = self._call(Api.LIST_OFFSETS, {"partitions": items})
        return {TopicPartition(item["topic"], item["partition"]): item for item in answer["offsets"]}

    def delete_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records below these offsets (-1: below the high watermark). Answers where each partition begins now. Raises
        UnknownTopicError, OffsetOutOfRangeError.
        """
        wanted: dict[str, dict[str, int]] = {}
        for key, offset in offsets.items():
            wanted.setdefault(key[0], {})[str(key[1])] = offset
        results = self._change(Api.DELETE_RECORDS, [{"name": name, "partitions": partitions} for name, partitions in wanted.items()])
        starts = {result["name"]: result["log_start_offsets"] for result in results}
        return {TopicPartition(*key): int(starts[key[0]][str(key[1])]) for key in offsets}

    def lease_offsets(self, lease: str, offsets: Mapping[TopicPartition, int], ttl_ms: int) -> None:
        """Ask that retention keeps everything from these offsets on for `ttl_ms` (0: give the lease back). Ask again before it ends to keep it longer.
        Raises UnknownTopicError, OffsetOutOfRangeError when an offset is gone already.
        """
        for key, offset in offsets.items():
            request = {"lease": lease, "topic": key[0], "partition": key[1], "offset": offset, "ttl_ms": ttl_ms}
            start = self._call(Api.LEASE_OFFSETS, request)["log_start_offset"]
            if ttl_ms and start > offset:
                raise OffsetOutOfRangeError(f"{key[0]}-{key[1]} begins at offset {start}, not {offset}")

    # ---- the appliance ---------------------------------------------------------------------------------------------------------------

    def describe_cluster(self) -> dict[str, Any]:
        """Processes with pid and restarts, how many topics, partitions and bytes, which partitions take no writes and why."""
        return self._call(Api.DESCRIBE_CLUSTER, {})

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
