"""Rules of access: what each API needs, in one table. An API without a row is refused.

Owner: one front; pure functions of a request, or of its response.

Invariants:
- A request whose names cannot be read is refused: no service sees names that a rule does not.
- A refusal depends on the names of the request alone, never on what exists. Where a missing
  resource has a response of its own (topics), that response is the refusal.
- A list has no name that its reader may not describe.

Source: Kafka's table of operations and resources (security documentation, KafkaApis). `delay` is
ours: the delayed records of a topic.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

from shm.rights.acl import (
    ALTER,
    ALTER_CONFIGS,
    CLUSTER,
    CLUSTER_ACTION,
    CREATE,
    DELAY,
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
from shm.rights.authorizer import Principal
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.core.schedule.delays import parse_delay_id
from tailrace.protocol.frame import Api, WireError

Need: TypeAlias = tuple[str, str, str]
"""(Operation, type, name). The name "": any resource of the type is enough."""
Needs: TypeAlias = Iterator[tuple[Need, ...]]
"""Needs of a request: one of each group of alternatives."""
Request: TypeAlias = dict[str, Any]
TopicName: TypeAlias = Callable[[str], str | None]
"""Topic id, hexadecimal, -> name of the topic, or of the topic whose delay log it is."""


class Rule(NamedTuple):
    """The rule of an API."""

    needs: Callable[[Request, TopicName], Needs] | None = None
    """Needs of the request. None: nothing, or what `is_checked_by_route` says."""
    cuts: Callable[[Principal, Request], Request] | None = None
    """Removes from a request the names of which its sender may not see the existence, where a
    missing resource is no error.
    """
    lists: Callable[[Principal, Request], Request] | None = None
    """Removes from a response what its reader may not see."""
    is_checked_by_route: bool = False
    """True for requests that are checked partition by partition, where their routes are found."""


def refuse_unless(principal: Principal, needs: Needs, fulfilled: Container[Need] = ()) -> None:
    """Raise WireError unless the principal may do all of it. `fulfilled`: what the process itself
    may do in place of its clients.
    """
    for alternatives in needs:
        if not any(need in fulfilled or _may(principal, need) for need in alternatives):
            raise WireError(ErrorCode.NOT_AUTHORIZED, sentence(principal, *alternatives[0]))


def sentence(principal: Principal, operation: str, kind: str, name: str) -> str:
    """The reason of a refusal."""
    which = f"{kind} {name[:249]!r}" if name else f"any {kind}"
    if kind == CLUSTER:
        which = "the appliance"
    return f"{principal.names[0]} may not {operation} {which}"


def _may(principal: Principal, need: Need) -> bool:
    operation, kind, name = need
    return principal.may(operation, kind, name) if name else principal.may_any(operation, kind)


# ---- reading requests ----------------------------------------------------------------------------


def _malformed(reason: str) -> WireError:
    return WireError(
        ErrorCode.INVALID_REQUEST,
        f"{reason}: with security the names of a request must be readable",
    )


def _text(holder: Any, field: str) -> str:
    value = holder.get(field) if isinstance(holder, dict) else None
    if not isinstance(value, str) or not value:
        raise _malformed(f"`{field}` must be a text")
    return value


def _items(request: Request, field: str) -> list[Any]:
    value = request.get(field)
    if not isinstance(value, list):
        raise _malformed(f"`{field}` must be a list")
    return value


def _optional_items(request: Request, field: str) -> list[Any]:
    return [] if request.get(field) is None else _items(request, field)


def _row_text(row: Any, place: int = 0) -> str:
    if not isinstance(row, list) or len(row) <= place or not isinstance(row[place], str):
        raise _malformed("an entry must be a list with a name")
    return str(row[place])


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _malformed("a name must be a text")
    return value


# ---- topics --------------------------------------------------------------------------------------

_ON_CLUSTER: Final = (CLUSTER, THE_CLUSTER)
_ALTERED_BY: Final = {"configs": ALTER_CONFIGS, "delay_schema": ALTER_CONFIGS}


def _on_cluster(operation: str) -> Callable[[Request, TopicName], Needs]:
    def needs(_request: Request, _names: TopicName) -> Needs:
        yield ((operation, *_ON_CLUSTER),)

    return needs


def _on_topics(operation: str) -> Callable[[Request, TopicName], Needs]:
    def needs(request: Request, _names: TopicName) -> Needs:
        for item in _items(request, "topics"):
            yield ((operation, TOPIC, _text(item, "name")),)

    return needs


def _create_topics(request: Request, _names: TopicName) -> Needs:
    for item in _items(request, "topics"):
        yield (CREATE, TOPIC, _text(item, "name")), (CREATE, *_ON_CLUSTER)
        yield from _named_in_configs(item)


def _named_in_configs(item: Any) -> Needs:
    """Consumers write to the topic that `dead.letter.topic` names, with rights of their own. So it
    is set by users who may write there.
    """
    configs = item.get("configs")
    name = configs.get("dead.letter.topic") if isinstance(configs, dict) else None
    if name:
        yield ((WRITE, TOPIC, _name(name)),)


def _compact_topic(request: Request, _names: TopicName) -> Needs:
    yield ((ALTER, TOPIC, _text(request, "name")),)


def _alter_topics(request: Request, _names: TopicName) -> Needs:
    for item in _items(request, "topics"):
        name = _text(item, "name")
        for field in [field for field in item if field != "name"] or ["partitions"]:
            if field == "online":
                yield ((ALTER, *_ON_CLUSTER),)
            elif field == "delay_schema" and "schema" in item:
                yield ((ALTER, TOPIC, name),)  # the delay log has the columns of the topic
            else:
                yield ((_ALTERED_BY.get(field, ALTER), TOPIC, name),)
        yield from _named_in_configs(item)


def _deleted_topics(operation: str) -> Callable[[Request, TopicName], Needs]:
    """Deleted topics are named by name or by id. An id does not tell whose topic it was."""

    def needs(request: Request, _names: TopicName) -> Needs:
        for item in _items(request, "topics"):
            name = _text(item, "name")
            is_id = len(name) == 32 and all(c in "0123456789abcdef" for c in name.lower())
            yield ((ALTER, *_ON_CLUSTER) if is_id else (operation, TOPIC, name),)
            if item.get("as") is not None:
                yield ((CREATE, TOPIC, _text(item, "as")),)

    return needs


def _lease_offsets(request: Request, _names: TopicName) -> Needs:
    items = _items(request, "partitions") if "partitions" in request else [request]
    for item in items:
        yield ((READ, TOPIC, _text(item, "topic")),)


def _init_producer_id(_request: Request, _names: TopicName) -> Needs:
    yield (WRITE, TOPIC, ""), (IDEMPOTENT_WRITE, *_ON_CLUSTER)


def _schemas(request: Request, _names: TopicName) -> Needs:
    yield ((DESCRIBE, TOPIC, _text(request, "topic")),)


# ---- delayed records -----------------------------------------------------------------------------


def _list_delays(request: Request, _names: TopicName) -> Needs:
    name = _text(request, "topic")
    yield ((READ, TOPIC, name),)
    yield ((DESCRIBE, DELAY, name),)


def _changes_delays_of(topic: str) -> tuple[Need, ...]:
    """A user who may only write changes its own records (`netfront.access.delay_owners`)."""
    return (ALTER, DELAY, topic), (WRITE, TOPIC, topic)


def _change_delays(request: Request, names: TopicName) -> Needs:
    if request.get("topic") is not None:
        yield _changes_delays_of(_text(request, "topic"))
    topics = set()
    for item in _items(request, "changes"):
        try:
            topic_id = parse_delay_id(_text(item, "delay_id")).topic_id.hex()
        except TailraceError:
            continue  # the scheduler finds no record of such an id
        topics.add(names(topic_id))
    for name in topics:
        if name is not None:
            yield _changes_delays_of(name)
    if request.get("transaction") is not None:  # it names a producer, and no transactional id
        yield ((WRITE, TRANSACTIONAL_ID, ""),)


# ---- groups --------------------------------------------------------------------------------------


def _group(operation: str) -> Callable[[Request, TopicName], Needs]:
    def needs(request: Request, _names: TopicName) -> Needs:
        yield ((operation, GROUP, _text(request, "group")),)

    return needs


OF_A_GATEWAY: Final[Need] = (CLUSTER_ACTION, *_ON_CLUSTER)
"""The right of a gateway, which answers for the members of Kafka's classic groups."""
CLASSIC = "classic"
"""Kind of the requests that it makes for them: they begin and end the lease of a group, and commit
while others may not.
"""


def _of_kind(request: Request) -> Needs:
    if request.get("kind") == CLASSIC:
        yield (OF_A_GATEWAY,)


def _heartbeat(request: Request, _names: TopicName) -> Needs:
    yield from _of_kind(request)
    yield ((READ, GROUP, _text(request, "group")),)
    for name in _optional_items(request, "topics"):
        yield ((READ, TOPIC, _name(name)),)


def _visible_topics(principal: Principal, request: Request) -> Request:
    """A member may subscribe to topics that do not exist (yet)."""
    if request.get("topics") is None:
        return request
    names = [_name(name) for name in _items(request, "topics")]
    return {**request, "topics": [n for n in names if principal.may(DESCRIBE, TOPIC, n)]}


def _group_offsets(request: Request, _names: TopicName) -> Needs:
    yield from _of_kind(request)
    yield ((READ, GROUP, _text(request, "group")),)
    for row in _items(request, "offsets"):
        yield ((READ, TOPIC, _row_text(row)),)


def _fetch_offsets(request: Request, _names: TopicName) -> Needs:
    yield ((DESCRIBE, GROUP, _text(request, "group")),)
    for row in _optional_items(request, "partitions"):
        yield ((DESCRIBE, TOPIC, _row_text(row)),)


def _delete_groups(request: Request, _names: TopicName) -> Needs:
    for name in _items(request, "groups"):
        yield ((DELETE, GROUP, _name(name)),)


def _share(request: Request, names: TopicName) -> Needs:
    yield ((READ, GROUP, _text(request, "group")),)
    yield from _acknowledged(request, names)


def _acknowledged(holder: Request, names: TopicName) -> Needs:
    for topic_id in {_row_text(row) for row in _optional_items(holder, "acknowledge")}:
        name = names(topic_id)
        if name is not None:
            yield ((READ, TOPIC, name),)


# ---- transactions --------------------------------------------------------------------------------


def _transaction(operation: str) -> Callable[[Request, TopicName], Needs]:
    def needs(request: Request, _names: TopicName) -> Needs:
        yield ((operation, TRANSACTIONAL_ID, _text(request, "transactional_id")),)

    return needs


def _end_transaction(request: Request, names: TopicName) -> Needs:
    yield ((WRITE, TRANSACTIONAL_ID, _text(request, "transactional_id")),)
    for part in _optional_items(request, "offsets"):
        yield ((READ, GROUP, _text(part, "group")),)
        for row in _items(part, "entries"):
            yield ((READ, TOPIC, _row_text(row)),)
    for part in _optional_items(request, "acknowledgements"):
        yield ((READ, GROUP, _text(part, "group")),)
        yield from _acknowledged(part, names)


def _abort_transaction(request: Request, _names: TopicName) -> Needs:
    if request.get("transactional_id") is not None:
        yield ((WRITE, TRANSACTIONAL_ID, _text(request, "transactional_id")),)
    if request.get("producer_id") is not None or request.get("transactional_id") is None:
        yield ((ALTER, *_ON_CLUSTER),)


# ---- lists ---------------------------------------------------------------------------------------


def _of_rows(
    field: str, key: str, kind: str, operation: str = DESCRIBE
) -> Callable[[Principal, Request], Request]:
    """Keep the rows, objects with the name under `key`, that the reader may describe."""

    def lists(principal: Principal, answer: Request) -> Request:
        rows = answer.get(field, [])
        return {
            **answer,
            field: [
                row
                for row in rows
                if isinstance(row.get(key), str) and principal.may(operation, kind, row[key])
            ],
        }

    return lists


def _committed(principal: Principal, answer: Request) -> Request:
    rows = answer.get("offsets", [])
    return {**answer, "offsets": [row for row in rows if principal.may(DESCRIBE, TOPIC, row[0])]}


STUCK = "has not given back"
"""Begins the sentence about a member that names its partitions."""


def _described_group(principal: Principal, answer: Request) -> Request:
    if "members" in answer:
        members = [_shown_member(principal, member) for member in answer["members"]]
        return {**answer, "members": members}
    if "partitions" not in answer:
        return answer
    return _of_rows("partitions", "topic", TOPIC)(principal, answer)


def _shown_member(principal: Principal, member: Request) -> Request:
    """A member, without the names of topics that the reader may not describe."""
    topics, shown = member.get("topics") or (), dict(member)
    visible = [name for name in topics if principal.may(DESCRIBE, TOPIC, name)]
    is_hidden = len(visible) < len(topics) or bool(member.get("is_shortened"))
    if len(visible) < len(topics):
        shown["topics"] = visible
    for field in ("owned", "target"):
        partitions = member.get(field) or {}
        kept = {
            n: numbers for n, numbers in partitions.items() if principal.may(DESCRIBE, TOPIC, n)
        }
        if len(kept) < len(partitions):
            shown[field], is_hidden = kept, True
    if is_hidden and str(member.get("stuck", "")).startswith(STUCK):
        shown["stuck"] = f"{STUCK} partitions: its program does not call poll"
    return shown


def _transactions(principal: Principal, answer: Request) -> Request:
    if principal.may(DESCRIBE, *_ON_CLUSTER):
        return answer
    kept = _of_rows("transactions", "transactional_id", TRANSACTIONAL_ID)(principal, answer)
    kept.pop("totals", None)
    return kept


OPEN: Final = Rule()
BY_ROUTE: Final = Rule(is_checked_by_route=True)
RULES: Final[dict[int, Rule]] = {
    Api.HANDSHAKE: OPEN,
    Api.PING: OPEN,
    Api.CREDIT: OPEN,
    Api.PRODUCE: BY_ROUTE,  # write topic
    Api.FETCH: BY_ROUTE,  # read topic
    Api.METADATA: BY_ROUTE,  # describe topic
    Api.LIST_OFFSETS: BY_ROUTE,  # describe topic
    Api.CREATE_TOPICS: Rule(_create_topics),
    Api.DELETE_TOPICS: Rule(_on_topics(DELETE)),
    Api.ALTER_TOPICS: Rule(_alter_topics),
    Api.DELETE_RECORDS: Rule(_on_topics(DELETE)),
    Api.LIST_DELETED_TOPICS: Rule(lists=_of_rows("topics", "name", TOPIC)),
    Api.DESCRIBE_SCHEMAS: Rule(_schemas),
    Api.UNDELETE_TOPICS: Rule(_deleted_topics(CREATE)),
    Api.PURGE_TOPICS: Rule(_deleted_topics(DELETE)),
    Api.COMPACT_TOPIC: Rule(_compact_topic),
    Api.LEASE_OFFSETS: Rule(_lease_offsets),
    Api.INIT_PRODUCER_ID: Rule(_init_producer_id),
    Api.DESCRIBE_CLUSTER: Rule(_on_cluster(DESCRIBE)),
    Api.DESCRIBE_CONFIGS: Rule(_on_cluster(DESCRIBE_CONFIGS)),
    Api.ALTER_CONFIGS: Rule(_on_cluster(ALTER_CONFIGS)),
    Api.RELOAD_CONFIG: Rule(_on_cluster(ALTER_CONFIGS)),
    Api.DESCRIBE_QUOTAS: Rule(_on_cluster(DESCRIBE_CONFIGS)),
    Api.ALTER_QUOTAS: Rule(_on_cluster(ALTER_CONFIGS)),
    Api.LIST_DELAYS: Rule(_list_delays),
    Api.CHANGE_DELAYS: Rule(_change_delays),
    Api.DESCRIBE_DELAYS: Rule(lists=_of_rows("partitions", "topic", TOPIC)),
    Api.GROUP_HEARTBEAT: Rule(_heartbeat, cuts=_visible_topics),
    Api.COMMIT_OFFSETS: Rule(_group_offsets),
    Api.FETCH_OFFSETS: Rule(_fetch_offsets, lists=_committed),
    Api.LIST_GROUPS: Rule(lists=_of_rows("groups", "group", GROUP)),
    Api.DESCRIBE_GROUP: Rule(_group(DESCRIBE), lists=_described_group),
    Api.DELETE_GROUPS: Rule(_delete_groups),
    Api.ALTER_GROUP_OFFSETS: Rule(_group_offsets),
    Api.SHARE_ACQUIRE: Rule(_share),
    Api.SHARE_ACKNOWLEDGE: Rule(_share),
    Api.INIT_TRANSACTIONS: Rule(_transaction(WRITE)),
    Api.END_TRANSACTION: Rule(_end_transaction),
    Api.LIST_TRANSACTIONS: Rule(lists=_transactions),
    Api.DESCRIBE_TRANSACTION: Rule(_transaction(DESCRIBE)),
    Api.ABORT_TRANSACTION: Rule(_abort_transaction),
    Api.CREATE_BRANCHES: Rule(_transaction(WRITE)),
    Api.JOIN_TRANSACTION: Rule(_transaction(WRITE)),
    Api.LIST_USERS: Rule(_on_cluster(DESCRIBE)),
    Api.ALTER_USERS: Rule(_on_cluster(ALTER)),
    Api.LIST_ACLS: Rule(_on_cluster(DESCRIBE)),
    Api.ALTER_ACLS: Rule(_on_cluster(ALTER)),
    Api.TEST_ACL: Rule(_on_cluster(DESCRIBE)),
}
