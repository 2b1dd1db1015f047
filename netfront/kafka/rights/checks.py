"""Parts of the rules: resources of a request are told apart into allowed and denied ones.

A rule takes the denied resources out of the request, and gives back a function that puts their
errors into the response. So no handler sees what its client may not do.

Owner: pure functions of a request and its user.

Invariants:
- A topic that is named by an id, and that the user may not describe, is unknown (UNKNOWN_TOPIC_ID).
- Each entry of a request is decided once, in one pass.
- A denied name is answered the same whether it exists or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.pause import give_way
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.definitions import ZERO_UUID
from netfront.kafka.wire.errors import KafkaError
from shm.messages.kafka_names import API_NAMES
from shm.rights.acl import (
    ALTER,
    ALTER_CONFIGS,
    CLUSTER,
    CLUSTER_ACTION,
    CREATE,
    DELETE,
    DESCRIBE,
    DESCRIBE_CONFIGS,
    GROUP,
    IDEMPOTENT_WRITE,
    READ,
    THE_CLUSTER,
    TOPIC,
    TRANSACTIONAL_ID,
    WRITE,
)

Entry: TypeAlias = dict[str, Any]
Item = TypeVar("Item")
Merge: TypeAlias = Callable[[Entry], None]
Rule: TypeAlias = Callable[[Call], Merge | Steps | None]
"""Raises RefusedError, AnsweredError. One of long lists is a generator, and returns the merge."""
OPERATION_CODES = {
    READ: 3, WRITE: 4, CREATE: 5, DELETE: 6, ALTER: 7, DESCRIBE: 8, CLUSTER_ACTION: 9,
    DESCRIBE_CONFIGS: 10, ALTER_CONFIGS: 11, IDEMPOTENT_WRITE: 12,
}  # fmt: skip
"""Kafka's numbers of operations."""
DENIED = {
    TOPIC: KafkaError.TOPIC_AUTHORIZATION_FAILED,
    GROUP: KafkaError.GROUP_AUTHORIZATION_FAILED,
    CLUSTER: KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    TRANSACTIONAL_ID: KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
ON_CLUSTER = CLUSTER, THE_CLUSTER


class AnsweredError(Exception):
    """A request that is denied as a whole, and has this response."""

    def __init__(self, response: Entry) -> None:
        super().__init__()
        self.response = response


def sentence(call: Call, operation: str, kind: str, name: str) -> str:
    """The reason of a refusal."""
    assert call.principal is not None
    which = "the appliance" if kind == CLUSTER else f"{kind} {name[:249]!r}"
    return f"{call.principal.names[0]} may not {operation} {which}"


def is_allowed(call: Call, operation: str, kind: str, name: str) -> bool:
    """True if the user may do this. What it may not do is told to the audit log: the front does not
    get the parts of a request that are denied here.
    """
    if call.may(operation, kind, name):
        return True
    front = call.services.front
    if front.is_audited:
        front.note_denial(call.peer.identity, _asker(call), sentence(call, operation, kind, name))
    return False


def _asker(call: Call) -> dict[str, str]:
    """The fields of an event about a request."""
    assert call.principal is not None
    return {
        "user": call.principal.names[0], "client": call.client_id,
        "address": call.connection.address, "api": f"Kafka {API_NAMES[call.api]}",
    }  # fmt: skip


def require(call: Call, operation: str, kind: str, name: str) -> None:
    """Raise RefusedError unless the user may do this."""
    if not is_allowed(call, operation, kind, name):
        raise RefusedError(DENIED[kind], sentence(call, operation, kind, name))


def on_cluster(operation: str) -> Rule:
    """The rule of a request that needs a right of the whole appliance."""

    def rule(call: Call) -> None:
        require(call, operation, *ON_CLUSTER)

    return rule


def nothing(_call: Call) -> None:
    """The rule of a request that every user may make."""


def separated(call: Call, items: Iterable[Item], is_allowed: Callable[[Item], bool]) -> Steps:
    """Returns the lists of allowed and of denied items. It lets the loop serve others."""
    allowed: list[Item] = []
    denied: list[Item] = []
    for number, item in enumerate(items):
        (allowed if is_allowed(item) else denied).append(item)
        yield from give_way(call.services, number)
    return allowed, denied


# ---- topics --------------------------------------------------------------------------------------


def topic_error(call: Call, operation: str, topic: Entry, field: str = "name") -> KafkaError:
    """The error of a topic in a request, which has a name or an id. NONE: it is allowed."""
    name = topic.get(field)
    topic_id = bytes(topic.get("topic_id") or ZERO_UUID)
    if not name and topic_id != ZERO_UUID:
        route = call.services.routes.find(topic_id, 0)
        if route is None:
            return KafkaError.NONE  # the handler finds none
        if not is_allowed(call, DESCRIBE, TOPIC, route.topic):
            return KafkaError.UNKNOWN_TOPIC_ID
        name = route.topic
    if is_allowed(call, operation, TOPIC, name or ""):
        return KafkaError.NONE
    return KafkaError.TOPIC_AUTHORIZATION_FAILED


def denied_topics(
    call: Call, holder: Entry, key: str, operation: str, *, field: str = "name"
) -> list[tuple[Entry, KafkaError]]:
    """Take the denied topics out of the list `holder[key]`. Returns them with their errors."""
    kept: list[Entry] = []
    denied: list[tuple[Entry, KafkaError]] = []
    for topic in holder[key] or ():
        error = topic_error(call, operation, topic, field)
        if error is KafkaError.NONE:
            kept.append(topic)
        else:
            denied.append((topic, error))
    if denied:
        holder[key] = kept
    return denied


def by_topic(
    answered: str,
    operation: str,
    partitions: Callable[[Entry, KafkaError], list[Entry]],
    *,
    field: str = "name",
) -> Rule:
    """The rule of a request whose `topics` need an operation. `answered`: their list in the
    response; `partitions` makes the entries of a topic that is denied.
    """

    def rule(call: Call) -> Merge | None:
        denied = denied_topics(call, call.request, "topics", operation, field=field)
        if not denied:
            return None

        def merge(response: Entry) -> None:
            response[answered] += [
                {
                    field: topic.get(field), "topic_id": topic.get("topic_id", ZERO_UUID),
                    "partitions": partitions(topic, error),
                }
                for topic, error in denied
            ]  # fmt: skip

        return merge

    return rule


def failed(field: str, **others: Any) -> Callable[[Entry, KafkaError], list[Entry]]:
    """Makes the entries of a denied topic: each partition (an object with `field`, or a number)
    with the error.
    """

    def partitions(topic: Entry, error: KafkaError) -> list[Entry]:
        return [
            {"partition_index": each[field] if field else each, "error_code": error, **others}
            for each in topic["partitions"]
        ]

    return partitions


# ---- operations that are shown -------------------------------------------------------------------


def operations(call: Call, kind: str, name: str, allowed: Iterable[str]) -> int:
    """The bits of the operations that the user has on a resource."""
    return sum(1 << OPERATION_CODES[each] for each in allowed if call.may(each, kind, name))


def show_topic_operations(call: Call, topics: Iterable[Entry], field: str = "name") -> None:
    """Show the user's own operations in entries that have them."""
    names = (READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS)
    for topic in topics:
        if "topic_authorized_operations" in topic and topic.get(field):
            topic["topic_authorized_operations"] = operations(call, TOPIC, topic[field], names)


def show_cluster_operations(call: Call, response: Entry) -> None:
    """Show the user's own operations on the cluster, if the response has them."""
    if "cluster_authorized_operations" in response:
        response["cluster_authorized_operations"] = operations(
            call, *ON_CLUSTER,
            (CREATE, ALTER, DESCRIBE, CLUSTER_ACTION, DESCRIBE_CONFIGS, ALTER_CONFIGS,
             IDEMPOTENT_WRITE),
        )  # fmt: skip


def show_group_operations(call: Call, groups: Iterable[Entry], field: str = "group_id") -> None:
    """Show the user's own operations in entries that have them."""
    for group in groups:
        if "authorized_operations" in group:
            group["authorized_operations"] = operations(
                call, GROUP, group[field], (READ, DELETE, DESCRIBE)
            )
