"""ShareGroupHeartbeat, ShareFetch, ShareAcknowledge: Kafka's share groups (KIP-932) are our share
groups.

ShareFetch acknowledges, acquires, and reads what was acquired: SHARE_ACQUIRE and FETCH in one.
Requests of a member carry no member epoch, so the gateway keeps that of its last heartbeat.

Invariants:
- A response has the batches of all records that it says are acquired. Records that could not be
  read are given back as unread.
- A request with another session epoch than the next one changes nothing.
- Records at the delivery limit are rejected, as Kafka archives them.

Crash: sessions and epochs are in memory. Clients begin another session; acquired records are
released with their members or their locks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from netfront.kafka.apis.call import Call, RefusedError, Services
from netfront.kafka.apis.classic_groups import check_group_name
from netfront.kafka.apis.cluster import pause
from netfront.kafka.apis.records import convert_outgoing
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.kafka_records.errors import KafkaRecordsError
from tailrace.protocol import messages
from tailrace.protocol.frame import Api
from tailrace.protocol.messages import SHARE_RUNS_MAX, FetchEntry, FetchRequest

SESSION_TIMEOUT_MS = 45_000
HEARTBEAT_INTERVAL_MS = 3_000
SESSIONS_MAX = 20_000
FINAL_EPOCH = -1
EPOCH_MAX = (1 << 31) - 1
RECORDS_MAX = 2_000
READ_MAX_BYTES = 4 << 20
OUT_MAX_BYTES = 16 << 20
WAIT_MAX_MS = 60_000
FIRST_PAUSE_NS, LONGEST_PAUSE_NS = 20_000_000, 250_000_000
OUTCOMES = {0: "accept", 1: "accept", 2: "release", 3: "reject", 4: "renew"}
"""Our outcomes for Kafka's types. 0 is a gap: an offset without a record."""
Partition = tuple[str, int]
"""Topic id, hexadecimal, and partition."""


class ShareMember:
    """A member of a share group, and its session here."""

    __slots__ = ("epoch", "partitions", "session_epoch")

    def __init__(self) -> None:
        self.epoch = 0
        """Epoch of its last heartbeat; 0: unknown."""
        self.session_epoch = -1
        """The next request's; -1: there is no session."""
        self.partitions: dict[Partition, None] = {}


def _members(services: Services) -> OrderedDict[tuple[str, str], ShareMember]:
    found: OrderedDict[tuple[str, str], ShareMember] = services.state.setdefault(
        "share_members", OrderedDict()
    )
    return found


def _member(call: Call) -> ShareMember:
    members = _members(call.services)
    key = call.request["group_id"] or "", call.request["member_id"] or ""
    found = members.setdefault(key, ShareMember())
    members.move_to_end(key)
    if len(members) > SESSIONS_MAX:
        members.popitem(last=False)
    return found


# ---- ShareGroupHeartbeat -------------------------------------------------------------------------


def heartbeat(call: Call) -> Steps:
    """Join, stay in or leave a share group."""
    request = call.request
    name, epoch = request["group_id"], request["member_epoch"]
    check_group_name(name)
    asked: dict[str, Any] = {
        "group": name, "kind": "share", "member_id": request["member_id"], "member_epoch": epoch,
    }  # fmt: skip
    topics = request["subscribed_topic_names"]
    if topics is not None:
        asked["topics"] = topics
    if epoch == 0:
        asked |= {
            "session_timeout_ms": SESSION_TIMEOUT_MS, "client_id": call.client_id,
            "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS, "offset_reset": "latest",
        }  # fmt: skip
    answer = yield call.ask(Api.GROUP_HEARTBEAT, asked)
    if answer.code is not ErrorCode.OK:
        raise RefusedError(coordinator_error(answer.code), answer.sentence)
    found = answer.json()
    if epoch < 0:
        _members(call.services).pop((name, request["member_id"]), None)
    else:
        _member(call).epoch = found["member_epoch"]
    names = found.get("topic_names")
    assignment = None
    if names is not None:
        routes = call.services.routes
        assignment = {
            "topic_partitions": [
                {
                    "topic_id": bytes.fromhex(topic_id),
                    "partitions": list(range(routes.partition_count(topic))),
                }
                for topic_id, topic in names.items()
            ]
        }
    return {
        "error_code": KafkaError.NONE, "member_id": found["member_id"],
        "member_epoch": found["member_epoch"], "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
        "assignment": assignment,
    }  # fmt: skip


# ---- sessions and acknowledgements ---------------------------------------------------------------


def _begin(call: Call) -> ShareMember:
    """Check the session's epoch and go on to the next. Raises RefusedError."""
    member, epoch = _member(call), call.request["share_session_epoch"]
    if epoch == 0:
        member.partitions.clear()
        member.session_epoch = 0
    elif member.session_epoch < 0:
        raise RefusedError(KafkaError.SHARE_SESSION_NOT_FOUND)
    elif epoch not in (FINAL_EPOCH, member.session_epoch):
        raise RefusedError(KafkaError.INVALID_SHARE_SESSION_EPOCH)
    if epoch == FINAL_EPOCH:
        member.session_epoch = -1
        member.partitions.clear()
    else:
        member.session_epoch = 1 if member.session_epoch >= EPOCH_MAX else member.session_epoch + 1
    return member


def _runs(call: Call) -> list[list[Any]]:
    """The acknowledgements of a request as our runs of offsets. Raises RefusedError."""
    found: list[list[Any]] = []
    for topic in call.request["topics"]:
        for partition in topic["partitions"]:
            place = bytes(topic["topic_id"]).hex(), partition["partition_index"]
            for batch in partition["acknowledgement_batches"]:
                found += _runs_of(place, batch)
    return found


def _runs_of(place: Partition, batch: dict[str, Any]) -> Iterator[list[Any]]:
    first, last, types = batch["first_offset"], batch["last_offset"], batch["acknowledge_types"]
    count = last - first + 1
    if first < 0 or count < 1 or len(types) not in (1, count) or not set(types) <= set(OUTCOMES):
        raise RefusedError(
            KafkaError.INVALID_REQUEST,
            f"an acknowledgement of the offsets {first} to {last} has {len(types)} types; it takes "
            "one, or one for each offset, from 0 to 4",
        )
    if len(types) == 1:
        yield [*place, first, last, OUTCOMES[types[0]]]
        return
    start = 0
    for at in range(1, count + 1):
        if at == count or OUTCOMES[types[at]] != OUTCOMES[types[start]]:
            yield [*place, first + start, first + at - 1, OUTCOMES[types[start]]]
            start = at


def _acknowledge(call: Call, member: ShareMember, runs: list[list[Any]]) -> Steps:
    """Returns the error of each partition of which a run was refused."""
    errors: dict[Partition, KafkaError] = {}
    for start in range(0, len(runs), SHARE_RUNS_MAX):
        some = runs[start : start + SHARE_RUNS_MAX]
        answer = yield call.ask(Api.SHARE_ACKNOWLEDGE, {**_identity(call, member),
                                                        "acknowledge": some})  # fmt: skip
        if answer.code is not ErrorCode.OK:
            error = coordinator_error(answer.code)
            errors |= {(run[0], run[1]): error for run in some}
            continue
        for refused in answer.json()["refused"]:
            errors[refused[0], refused[1]] = coordinator_error(refused[4])
    return errors


def _identity(call: Call, member: ShareMember) -> dict[str, Any]:
    request = call.request
    return {
        "group": request["group_id"], "member_id": request["member_id"],
        "member_epoch": member.epoch,
    }  # fmt: skip


def acknowledge(call: Call) -> Steps:
    """ShareAcknowledge: end the locks of records."""
    runs = _runs(call)
    member = _begin(call)
    errors = yield from _acknowledge(call, member, runs)
    return {
        "error_code": KafkaError.NONE,
        "responses": [
            {
                "topic_id": topic["topic_id"],
                "partitions": [
                    {
                        "partition_index": partition["partition_index"],
                        "error_code": errors.get(
                            (bytes(topic["topic_id"]).hex(), partition["partition_index"]),
                            KafkaError.NONE,
                        ),
                    }
                    for partition in topic["partitions"]
                ],
            }
            for topic in call.request["topics"]
        ],
    }


# ---- ShareFetch ----------------------------------------------------------------------------------


def fetch(call: Call) -> Steps:
    """ShareFetch: acknowledge records, acquire others and read them."""
    request = call.request
    runs = _runs(call)
    is_final = request["share_session_epoch"] == FINAL_EPOCH
    member = _begin(call)
    if not is_final:
        for topic in request["topics"]:
            for partition in topic["partitions"]:
                place = bytes(topic["topic_id"]).hex(), partition["partition_index"]
                member.partitions[place] = None
        for topic in request["forgotten_topics_data"]:
            for index in topic["partitions"]:
                member.partitions.pop((bytes(topic["topic_id"]).hex(), index), None)
    errors = yield from _acknowledge(call, member, runs)
    acquired: dict[Partition, list[list[int]]] = {}
    lock_ms = 0
    if not is_final and not request.get("is_renew_ack") and member.partitions:
        acquired, lock_ms = yield from _acquire(call, member)
    entries: dict[Partition, dict[str, Any]] = {}
    for run in runs:
        entries.setdefault((run[0], run[1]), _entry(run[1]))
    room = OUT_MAX_BYTES
    for place, found in acquired.items():
        entry = entries.setdefault(place, _entry(place[1]))
        yield from _read(call, member, place, found, entry, room)
        room -= len(entry["records"])
    for place, error in errors.items():
        entries.setdefault(place, _entry(place[1]))["acknowledge_error_code"] = error
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic_id, _), entry in entries.items():
        topics.setdefault(topic_id, []).append(entry)
    return {
        "error_code": KafkaError.NONE,
        "acquisition_lock_timeout_ms": lock_ms,
        "responses": [
            {"topic_id": bytes.fromhex(topic_id), "partitions": partitions}
            for topic_id, partitions in topics.items()
        ],
    }


def _entry(partition: int) -> dict[str, Any]:
    return {
        "partition_index": partition, "error_code": KafkaError.NONE, "records": b"",
        "acknowledge_error_code": KafkaError.NONE, "acquired_records": [],
    }  # fmt: skip


def _acquire(call: Call, member: ShareMember) -> Steps:
    """Acquire records, waiting for some. Returns them by partition, as [first, last, deliveries],
    and how long they are locked.
    """
    request, services = call.request, call.services
    waits_ms = max(0, min(request["max_wait_ms"], WAIT_MAX_MS))
    until_ns = services.now_ns + waits_ms * 1_000_000
    wished = max(1, min(request["max_records"], RECORDS_MAX))
    pause_ns = FIRST_PAUSE_NS
    while True:
        asked = {**_identity(call, member), "max_records": wished, "acknowledge": []}
        answer = yield call.ask(Api.SHARE_ACQUIRE, asked)
        if answer.code is not ErrorCode.OK:
            raise RefusedError(coordinator_error(answer.code), answer.sentence)
        found = answer.json()
        if found["dead"]:
            dead = [[*run[:4], "reject"] for run in found["dead"]]
            yield from _acknowledge(call, member, dead)
        acquired: dict[Partition, list[list[int]]] = {}
        for topic_id, partition, first, last, count in found["acquired"]:
            acquired.setdefault((topic_id, partition), []).append([first, last, count])
        if acquired or services.now_ns >= until_ns:
            return acquired, found["lock_ms"]
        yield pause(services, min(pause_ns, max(1, until_ns - services.now_ns)))
        pause_ns = min(2 * pause_ns, LONGEST_PAUSE_NS)


def _read(
    call: Call,
    member: ShareMember,
    place: Partition,
    runs: list[list[int]],
    entry: dict[str, Any],
    room: int,
) -> Steps:
    """Read acquired records into an entry. Those that are left over are given back."""
    topic_id = bytes.fromhex(place[0])
    route = call.services.routes.find(topic_id, place[1])
    parts: list[bytes | bytearray] = []
    offset, end = min(run[0] for run in runs), max(run[1] for run in runs) + 1
    while route is not None and offset < end and room > 0:
        one = FetchEntry(topic_id, place[1], -1, offset, READ_MAX_BYTES, 0)
        asked = FetchRequest(0, 1, READ_MAX_BYTES, call.peer.received_bytes, [one])
        answer = yield call.peer.ask(Api.FETCH, [messages.encode_fetch(asked)])
        if answer.code is not ErrorCode.OK:
            break
        ((found, batches),) = messages.decode_fetched(answer.body)
        if found.error:
            break
        following = offset
        if len(batches):
            try:
                converted = convert_outgoing(route, batches, room)
            except KafkaRecordsError as error:
                entry["error_code"] = error.code
                break
            parts.append(converted.records)
            room -= len(converted.records)
            following = converted.next_offset
            if not converted.is_cut:
                following = max(following, found.resume_offset)
        else:
            following = max(following, found.resume_offset)
        if following <= offset:
            break
        offset = following
    entry["records"] = b"".join(parts)
    unread = []
    for first, last, count in runs:
        if first < offset:
            entry["acquired_records"].append(
                {"first_offset": first, "last_offset": min(last, offset - 1),
                 "delivery_count": count}
            )  # fmt: skip
        if last >= offset:
            unread.append([*place, max(first, offset), last, "unread"])
    if unread:
        yield from _acknowledge(call, member, unread)
