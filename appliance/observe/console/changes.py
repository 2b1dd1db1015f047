"""Changes through the page: topics, records, groups, transactions, delays. Each is a call of
Admin or Producer, with the request's JSON as arguments.

Owner: the thread of a request. The caller has checked the token.
Invariants:
- An unknown field, or one of another type, is refused with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from appliance.observe.console.redrive import redrive
from tailrace.admin.admin import Admin
from tailrace.client.topics.list_offsets import check_offsets_answer
from tailrace.client.topics.new_topic import NewTopic
from tailrace.core.errors import InvalidRequestError
from tailrace.core.topic_partition import TopicPartition
from tailrace.producer.producer import Producer

TIMEOUT_S = 15.0
_KINDS = {str: "text", int: "a number", dict: "an object", list: "a list", bool: "true or false"}

Change = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""(address, request) -> answer. Raises TailraceError."""


def _take(request: Mapping[str, Any], fields: Mapping[str, type], required: int) -> list[Any]:
    """The values of fields in order, None for those left out. The first `required` are needed."""
    unknown = sorted(set(request) - set(fields))
    if unknown:
        raise InvalidRequestError(f"unknown field {unknown[0]!r}; known are {', '.join(fields)}")
    values = []
    for place, (name, kind) in enumerate(fields.items()):
        value = request.get(name)
        if value is None:
            if place < required:
                raise InvalidRequestError(f"{name} is missing; it is {_KINDS[kind]}")
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidRequestError(f"{name} is {_KINDS[kind]}")
        values.append(value)
    return values


def create_topic(address: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Create a topic."""
    name, partitions, configs = _take(
        request, {"name": str, "partitions": int, "configs": dict}, required=1
    )
    with Admin(address, client_id="tailrace-console") as admin:
        admin.create_topics(NewTopic(name, 1 if partitions is None else partitions, configs or {}))
    return {"done": f"topic {name} is created"}


def alter_topic(address: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Change settings of a topic, or its number of partitions."""
    name, configs, partitions = _take(
        request, {"name": str, "configs": dict, "partitions": int}, required=1
    )
    with Admin(address, client_id="tailrace-console") as admin:
        if configs:
            admin.alter_topics({name: configs})
        if partitions is not None:
            admin.create_partitions({name: partitions})
    return {"done": f"topic {name} is changed"}


def produce(address: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Send one record."""
    topic, value, key, partition, headers = _take(
        request, {"topic": str, "value": str, "key": str, "partition": int, "headers": dict}, 1
    )
    with Producer(address, client_id="tailrace-console", linger_ms=0) as producer:
        metadata = producer.send(
            topic,
            None if value is None else value.encode(),
            key=None if key is None else key.encode(),
            partition=partition,
            headers=[(name, str(text).encode()) for name, text in (headers or {}).items()],
        ).result(TIMEOUT_S)
    return {"done": f"partition {metadata.partition}, offset {metadata.offset}"}


def reset_group(address: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Set the committed offsets of a group for one topic: to its beginning, its end, or a time."""
    group, topic, to, time_ms = _take(
        request, {"group": str, "topic": str, "to": str, "time_ms": int}, required=3
    )
    if to not in ("earliest", "latest", "time") or (to == "time") != (time_ms is not None):
        raise InvalidRequestError("to is earliest, latest, or time with time_ms")
    with Admin(address, client_id="tailrace-console") as admin:
        counts = admin.partition_counts(internal=True)
        where: Any = time_ms * 1_000 if to == "time" else to
        asked = {TopicPartition(topic, number): where for number in range(counts.get(topic, 0))}
        if not asked:
            raise InvalidRequestError(f"there is no topic {topic!r}")
        found = admin.offsets(asked)
        offsets = {}
        for partition, answer in found.items():
            offset = check_offsets_answer(answer)["offset"]
            offsets[partition] = answer["end"] if offset < 0 else offset
        admin.alter_group_offsets(group, offsets)
    return {"done": f"group {group} continues at {to} of {topic}"}


def delete_group(address: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Delete a group with its committed offsets."""
    (group,) = _take(request, {"group": str}, required=1)
    with Admin(address, client_id="tailrace-console") as admin:
        admin.delete_groups(group)
    return {"done": f"group {group} is deleted"}


def abort_transaction(address: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Abort the open transaction of an id."""
    (name,) = _take(request, {"transactional_id": str}, required=1)
    with Admin(address, client_id="tailrace-console") as admin:
        admin.abort_transaction(name)
    return {"done": f"the transaction of {name} is aborted"}


def cancel_delay(address: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Cancel a delayed record."""
    (delay_id,) = _take(request, {"delay_id": str}, required=1)
    with Admin(address, client_id="tailrace-console") as admin:
        error = admin.cancel_delays([delay_id])[delay_id]
    if error is not None:
        raise error
    return {"done": "the delayed record is cancelled"}


def redrive_letters(address: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Send the dead letters of a topic again."""
    topic, to = _take(request, {"topic": str, "to": str}, required=1)
    done = redrive(address, topic, to)
    return {"done": f"{done.sent} records are sent again, {done.skipped} stay"}


CHANGES: Mapping[str, Change] = {
    "create-topic": create_topic,
    "alter-topic": alter_topic,
    "produce": produce,
    "reset-group": reset_group,
    "delete-group": delete_group,
    "abort-transaction": abort_transaction,
    "cancel-delay": cancel_delay,
    "redrive": redrive_letters,
}
"""Name in the address -> change."""
