"""ShareFetch: it acknowledges, acquires, and reads what was acquired.

It is SHARE_ACQUIRE and FETCH in one.

Invariants:
- A response has the batches of all records that it says are acquired. Records that could not be
  read are given back as unread.
- A partition that is not known is answered with an error, once for each request that names it.
- A topic that the user may not read any more is told with Kafka's error, partition by partition.
- Records at the delivery limit become dead letters (`dead_letters`).

Crash: acquired records are released with their members or their locks.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.pause import pause
from netfront.kafka.apis.records.conversion import convert_outgoing
from netfront.kafka.apis.records.producer_codecs import codec_of
from netfront.kafka.apis.records.tail_cache import tail_cache
from netfront.kafka.apis.share_groups.acknowledgements import (
    acknowledge_runs,
    runs_of_request,
)
from netfront.kafka.apis.share_groups.dead_letters import give_up
from netfront.kafka.apis.share_groups.sessions import (
    FINAL_EPOCH,
    Partition,
    ShareMember,
    begin_request,
    identity_of,
    member_key,
    share_error,
    share_members,
)
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.records.errors import KafkaRecordsError
from netfront.kafka.wire.errors import KafkaError
from shm.rights.acl import READ, TOPIC
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import fetch_messages
from tailrace.protocol.fetch_messages import FetchEntry, FetchRequest
from tailrace.protocol.frame import Api

RECORDS_MAX = 2_000
READ_MAX_BYTES = 4 << 20
OUT_MAX_BYTES = 16 << 20
WAIT_MAX_MS = 60_000
FIRST_PAUSE_NS, LONGEST_PAUSE_NS = 20_000_000, 250_000_000


def fetch(call: Call) -> Steps:
    """ShareFetch: acknowledge records, acquire others and read them."""
    request = call.request
    runs = runs_of_request(call)
    is_final = request["share_session_epoch"] == FINAL_EPOCH
    member = begin_request(call)
    unknown = {} if is_final else _change_session(call)
    errors = yield from acknowledge_runs(call, member, runs)
    acquired: dict[Partition, list[list[int]]] = {}
    lock_ms = 0
    if not is_final and not request.get("is_renew_ack") and member.partitions:
        acquired, lock_ms, denied = yield from _acquire(call, member)
        unknown |= denied
    entries: dict[Partition, dict[str, Any]] = {}
    for place, error in unknown.items():
        entries[place] = {**_entry(place[1]), "error_code": error}
    for run in runs:
        entries.setdefault((run[0], run[1]), _entry(run[1]))
    room = OUT_MAX_BYTES
    strange = [
        [*place, first, last, "unread"]
        for place, found in acquired.items()
        if place not in member.partitions
        for first, last, _ in found
    ]
    if strange:  # of partitions that the client has not heard of yet
        yield from acknowledge_runs(call, member, strange)
    for place, found in acquired.items():
        if place not in member.partitions:
            continue
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


def _change_session(call: Call) -> dict[Partition, KafkaError]:
    """Add and take out partitions of the session. Returns the errors of those that are not known,
    or not yet: the client asks for its metadata again, and reads them when they come.
    """
    members, key = share_members(call.services), member_key(call)
    routes = call.services.routes
    unknown: dict[Partition, KafkaError] = {}
    for topic in call.request["topics"]:
        topic_id = bytes(topic["topic_id"])
        for partition in topic["partitions"]:
            place = topic_id.hex(), partition["partition_index"]
            members.add_partition(key, place)
            if routes.find(topic_id, place[1]) is None:
                is_topic = routes.find(topic_id, 0) is not None
                unknown[place] = (
                    KafkaError.UNKNOWN_TOPIC_OR_PARTITION
                    if is_topic
                    else KafkaError.UNKNOWN_TOPIC_ID
                )
    for topic in call.request["forgotten_topics_data"]:
        for index in topic["partitions"]:
            members.drop_partition(key, (bytes(topic["topic_id"]).hex(), index))
    return unknown


def _entry(partition: int) -> dict[str, Any]:
    return {
        "partition_index": partition, "error_code": KafkaError.NONE, "records": b"",
        "acknowledge_error_code": KafkaError.NONE, "acquired_records": [],
    }  # fmt: skip


def _acquire(call: Call, member: ShareMember) -> Steps:
    """Acquire records, waiting for some. Returns them by partition, as [first, last, deliveries],
    how long they are locked, and the errors of partitions. While one of its topics may not be read,
    a member gets nothing.
    """
    request, services = call.request, call.services
    waits_ms = max(0, min(request["max_wait_ms"], WAIT_MAX_MS))
    until_ns = services.now_ns + waits_ms * 1_000_000
    wished = max(1, min(request["max_records"], RECORDS_MAX))
    pause_ns = FIRST_PAUSE_NS
    while True:
        asked = {**identity_of(call, member), "max_records": wished, "acknowledge": []}
        answer = yield call.ask(Api.SHARE_ACQUIRE, asked)
        if answer.code is ErrorCode.NOT_AUTHORIZED and (denied := _denied(call, member)):
            return {}, 0, denied
        if answer.code is not ErrorCode.OK:
            raise RefusedError(share_error(answer.code), answer.sentence)
        found = answer.json()
        if found["dead"]:
            yield from give_up(call, member, found["dead"])
        acquired: dict[Partition, list[list[int]]] = {}
        for topic_id, partition, first, last, count in found["acquired"]:
            acquired.setdefault((topic_id, partition), []).append([first, last, count])
        if acquired or services.now_ns >= until_ns:
            return acquired, found["lock_ms"], {}
        yield pause(services, min(pause_ns, max(1, until_ns - services.now_ns)))
        pause_ns = min(2 * pause_ns, LONGEST_PAUSE_NS)


def _denied(call: Call, member: ShareMember) -> dict[Partition, KafkaError]:
    """The errors of the partitions that the client's user may not read any more. Raises
    RefusedError if it is a topic of which the session has none.
    """
    routes, code = call.services.routes, KafkaError.TOPIC_AUTHORIZATION_FAILED
    names = {name for name in member.topics or () if not call.may(READ, TOPIC, name)}
    found = {
        place: code
        for place in member.partitions
        if (route := routes.find(bytes.fromhex(place[0]), place[1])) is not None
        and route.topic in names
    }
    if names and not found:
        raise RefusedError(code, f"a topic of this member may not be read: {min(names)[:249]!r}")
    return found


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
        answer = yield call.peer.ask(Api.FETCH, [fetch_messages.encode_fetch(asked)])
        if answer.code is not ErrorCode.OK:
            break
        ((found, batches),) = fetch_messages.decode_fetched(answer.body)
        if found.error:
            break
        following = offset
        if len(batches):
            try:
                codec = codec_of(call.services, route)
                converted = convert_outgoing(route, batches, room, codec, tail_cache(call.services))
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
        yield from acknowledge_runs(call, member, unread)
