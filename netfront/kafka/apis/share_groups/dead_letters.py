"""Dead letters of share groups: records at the delivery limit that a Kafka client would get.

The topic, the headers and the order of steps are those of our own consumers
(`tailrace.group.dead_letter_queue`).

Invariants:
- A record is acknowledged once it is in the dead-letter topic, on the disk. If that fails its lock
  expires, and the member that acquires it next tries again.

Crash: a record is there once more if the gateway ends between both steps, and is never missing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from netfront.kafka.apis.call import Call
from netfront.kafka.apis.cluster.topic_creation import wait_for_route
from netfront.kafka.apis.records.conversion import convert_outgoing
from netfront.kafka.apis.records.produce import Part, collect_results, send_parts
from netfront.kafka.apis.records.tail_cache import tail_cache
from netfront.kafka.apis.share_groups.acknowledgements import acknowledge_runs
from netfront.kafka.apis.share_groups.sessions import ShareMember
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.records.compression import CompressionError
from netfront.kafka.records.errors import KafkaRecordsError
from netfront.kafka.wire.errors import KafkaError
from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError, error_for
from tailrace.format.record_batch.batch_header import checksum_seed
from tailrace.kernel import batches_from_kafka
from tailrace.kernel.reference_kafka import RecordFault
from tailrace.protocol import fetch_messages
from tailrace.protocol.fetch_messages import FetchEntry, FetchRequest
from tailrace.protocol.frame import Api

if TYPE_CHECKING:
    from netfront.kafka.records.single_records import KafkaRecord
    from tailrace.client.topics.topic_metadata import TopicInfo

logger = logging.getLogger(__name__)

READ_MAX_BYTES = 4 << 20
PRODUCE_TIMEOUT_MS = 30_000
REPORTED_MAX = 1_000
"""Partitions whose last failure is known. The one that failed first is forgotten."""
ATTEMPTS_MAX = 3
"""Attempts to prepare the topic, which another client may be creating."""
_FAILURES = (TailraceError, KafkaRecordsError, RecordFault, CompressionError)


def give_up(call: Call, member: ShareMember, runs: list[list[Any]]) -> Steps:
    """Write the records of runs (topic id, partition, first, last, deliveries) as dead letters, and
    acknowledge those that are written.
    """
    written: list[list[Any]] = []
    for topic_id, partition, first, last, count in runs:
        try:
            done = yield from _write(call, bytes.fromhex(topic_id), partition, (first, last), count)
        except _FAILURES as error:
            _report(call, topic_id, partition, first, str(error))
            continue
        if done:
            _reported(call).pop((call.request["group_id"], topic_id, partition), None)
        written += [[topic_id, partition, offset, offset, "accept"] for offset in done]
    if written:
        yield from acknowledge_runs(call, member, written)


def _reported(call: Call) -> dict[tuple[str, str, int], str]:
    """The last failure of each (group, topic id, partition)."""
    found: dict[tuple[str, str, int], str] = call.services.state.setdefault("unwritten", {})
    return found


def _report(call: Call, topic_id: str, partition: int, offset: int, reason: str) -> None:
    """Log the failure of a partition; once until it changes, or letters are written again."""
    known, place = _reported(call), (call.request["group_id"], topic_id, partition)
    if known.get(place) == reason:
        return
    known[place] = reason
    if len(known) > REPORTED_MAX:
        del known[next(iter(known))]
    logger.error(
        "kafka_dead_letter_not_written group=%s topic_id=%s partition=%d offset=%d reason=%r",
        *place, offset, reason,
    )  # fmt: skip


def _write(call: Call, topic_id: bytes, partition: int, span: tuple[int, int], count: int) -> Steps:
    """Returns the offsets that are done. Raises one of _FAILURES."""
    from tailrace.client.topics.topic_metadata import topics_from_metadata

    route = call.services.routes.find(topic_id, partition)
    if route is None:
        return []
    answer = yield from _ask(call, Api.METADATA, {"topics": [route.topic]})
    info = topics_from_metadata(answer, route.topic)[route.topic]
    target = yield from _target(call, info, partition)
    records: list[KafkaRecord] = yield from _read(call, route, span)
    parts: list[tuple[int, Part]] = []
    for record in records:
        letter = _letter(call, route, record, info, count)
        entry = {"error_code": KafkaError.NONE, "base_offset": -1}
        parts.append((record.offset, Part(target, entry, [_fitting(call, target, letter)])))
    sent = yield from send_parts(call, [part for _, part in parts], -1, PRODUCE_TIMEOUT_MS)
    yield from collect_results(call, sent, None)
    done = set(range(span[0], span[1] + 1)) - {record.offset for record in records}
    for offset, part in parts:
        code = part.entry["error_code"]
        if code is KafkaError.NONE:
            done.add(offset)
            logger.warning(
                "kafka_dead_letter group=%s partition=%s-%d offset=%d deliveries=%d",
                call.request["group_id"], route.topic, partition, offset, count,
            )  # fmt: skip
        else:
            _report(call, topic_id.hex(), partition, offset, part.entry.get("error_message", code))
    return sorted(done)


def _ask(call: Call, api: Api, value: dict[str, Any]) -> Steps:
    """The response's JSON, as our client's requests return it. Raises TailraceError."""
    answer = yield call.ask(api, value)
    if answer.code is not ErrorCode.OK:
        raise error_for(answer.code, answer.sentence)
    return answer.json()


def _target(call: Call, info: TopicInfo, partition: int) -> Steps:
    """The route of a partition of the dead-letter topic, which is made if it is missing. Raises
    TailraceError.
    """
    from tailrace.group.dead_letter_queue import dead_letter_topic, prepare

    name, routes = dead_letter_topic(info), call.services.routes
    for _ in range(ATTEMPTS_MAX):
        # Its steps are those of the client, which pass the waiters of `_ask` on.
        prepared: Any = prepare(cast(Any, lambda api, value: _ask(call, api, value)), info)
        count = yield from prepared
        yield from wait_for_route(call, name)
        found = routes.find_by_name(name, partition if partition < (count or 0) else 0)
        if count is not None and found is not None:
            return found
    raise error_for(ErrorCode.UNKNOWN_TOPIC, f"topic {name!r} is not there yet")


def _read(call: Call, route: Assignment, span: tuple[int, int]) -> Steps:
    """The records of a span of offsets. Raises TailraceError, KafkaRecordsError, RecordFault."""
    from netfront.kafka.records.single_records import records_of

    found: list[KafkaRecord] = []
    offset, end = span[0], span[1] + 1
    while offset < end:
        one = FetchEntry(route.topic_id, route.partition, -1, offset, READ_MAX_BYTES, 0)
        asked = FetchRequest(0, 1, READ_MAX_BYTES, call.peer.received_bytes, [one])
        answer = yield call.peer.ask(Api.FETCH, [fetch_messages.encode_fetch(asked)])
        if answer.code is not ErrorCode.OK:
            raise error_for(answer.code, answer.sentence)
        ((entry, batches),) = fetch_messages.decode_fetched(answer.body)
        if entry.error:
            raise error_for(ErrorCode(entry.error), f"offset {offset} cannot be read")
        following = entry.resume_offset
        if len(batches):
            converted = convert_outgoing(
                route, batches, READ_MAX_BYTES, "none", tail_cache(call.services)
            )
            found += [
                record
                for record in records_of(converted.records, len(converted.records))
                if offset <= record.offset < end
            ]
            following = max(converted.next_offset, 0 if converted.is_cut else following)
        if following <= offset:
            break
        offset = following
    return found


def _letter(
    call: Call, route: Assignment, record: KafkaRecord, info: TopicInfo, count: int
) -> Iterator[bytes]:
    """The encoded dead letter; the next ones are for one that is too large: without its value, then
    its key, then the sender's headers.
    """
    from netfront.kafka.records.single_records import encoded_record
    from tailrace.core.records import Record
    from tailrace.group.dead_letter_queue import PREFIX, DeadLetter, added_headers

    reason = (
        f"delivered {count} times, as often as group.share.delivery.count.limit allows, and not "
        "accepted"
    )
    origin = Record(
        route.topic, route.partition, record.offset, record.timestamp_ms, 0, None, None, [], 0
    )
    added: list[tuple[str, bytes | None]] = [
        *added_headers(DeadLetter(origin, info, call.request["group_id"], reason, count))
    ]
    yield encoded_record(record.key, record.value, record.headers + added)
    added.append((PREFIX + "is_cut", b"true"))
    yield encoded_record(record.key, None, record.headers + added)
    yield encoded_record(None, None, record.headers + added)
    yield encoded_record(None, None, added)


def _fitting(call: Call, target: Assignment, letters: Iterator[bytes]) -> bytearray:
    """The batch of the first form that the topic takes. Raises the kernel's errors."""
    now_us = call.services.wall_us()
    failure: Exception | None = None
    for record in letters:
        try:
            (batch,) = batches_from_kafka(
                record, 1, now_us // 1000, now_us, target.schema_id, -1, -1, -1,
                checksum_seed(target.topic_id, target.partition),
                int(target.settings["max.message.bytes"]), False,
            )  # fmt: skip
        except RecordFault as error:
            failure = error
            continue
        return batch
    assert failure is not None
    raise failure
