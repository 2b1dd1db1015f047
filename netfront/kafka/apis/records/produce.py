"""Produce: batches of Kafka become batches of the log, and go to the workers as ours do.

Invariants:
- The producer's id, epoch and sequences reach the worker unchanged.
- Batches of a connection are passed to the front in the order of its requests: while one waits for
  credit, no later request is begun.
- A partition whose records cannot be converted is refused alone.
- A connection ends with a request without acknowledgements of which a partition is refused.
- A request whose records unpack to more than `converted_memory` allows is passed on in several
  steps, each of which is answered before the next one is converted.
- A repeated batch whose offset is forgotten is acknowledged when all that was appended before its
  repetition is durable. Then it is, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from netfront.kafka.apis.call import Call, DisconnectError, RefusedError
from netfront.kafka.apis.pause import pause
from netfront.kafka.apis.records.conversion import convert_incoming
from netfront.kafka.apis.records.converted_memory import ConvertedMemory
from netfront.kafka.apis.records.producer_codecs import note_codec
from netfront.kafka.apis.records.tail_cache import tail_cache
from netfront.kafka.apis.transactions.owner import aborted_error, find_writer, note_fenced
from netfront.kafka.exchange.waiter import Steps, Waiter
from netfront.kafka.producers.transactional_producer import (
    TransactionalProducer,
    UnknownSequenceError,
)
from netfront.kafka.records.batch_layout import HEADER_BYTES, read_kafka_header
from netfront.kafka.records.errors import KafkaRecordsError
from netfront.kafka.wire.definitions import Readable
from netfront.kafka.wire.errors import KafkaError, kafka_error
from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode, code_of
from tailrace.kernel import keep_message
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import PRODUCE_FRAMES_MAX, Api
from tailrace.protocol.produce_messages import (
    PRODUCE_BATCHES_MAX,
    ProduceBatches,
    ProducedEntry,
    ProduceEntry,
)

ACKS = (0, 1, -1)
TIMEOUT_MAX_MS = 600_000
EARLY = (ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.OUT_OF_ORDER_SEQUENCE)
"""Errors of batches of a transaction whose predecessor is being ended, and of those behind them."""
CONCURRENT_NS = 10_000_000_000
CONCURRENT_PAUSE_NS = 5_000_000
DURABLE_NS = 10_000_000_000
STORED = "is_stored"
"""Set in the entry of a partition with a batch that was appended before, at a forgotten offset."""


class Place(NamedTuple):
    """A partition of a request, before its records are converted."""

    route: Assignment
    entry: dict[str, Any]
    """Its entry in the response."""
    records: Any
    """Bytes of any kind."""


class Part(NamedTuple):
    """The batches of one partition of a request."""

    route: Assignment
    entry: dict[str, Any]
    """Its entry in the response."""
    batches: list[bytearray]
    sent: Readable = b""
    """The records as the client has sent them."""


class Group(NamedTuple):
    """Batches that go to the front in one request, each with its partition."""

    batches: list[tuple[Part, bytearray]]


def produce(call: Call) -> Steps:
    """Append records."""
    request = call.request
    acks = request["acks"]
    call.connection.is_blocked = True
    memory = ConvertedMemory(call.services)
    parts: list[Part] = []
    try:
        writer, error = yield from _writer(call)
        if acks not in ACKS:
            error = KafkaError.INVALID_REQUIRED_ACKS
        opened = 0 if writer is None else len(writer.sequences)
        topics, places = _places(call, error)
        for place in places:
            if memory.byte_count and memory.is_full:
                sent = yield from send_parts(call, parts, acks, request["timeout_ms"])
                yield from collect_results(call, sent, writer)
                parts = []
                memory.give_back()
            while memory.is_full:
                yield pause(call.services, CONCURRENT_PAUSE_NS)
            part = _converted(call, writer, place)
            if part is not None:
                parts.append(part)
                memory.add(sum(map(len, part.batches)))
        sent = yield from send_parts(call, parts, acks, request["timeout_ms"])
        if writer is not None and len(writer.sequences) > opened:
            # the first batches of a transaction wait for the end of the one before it
            yield from collect_results(call, sent, writer)
            sent = []
    finally:
        call.connection.is_blocked = False
        call.services.go_on(call.connection)
        memory.give_back()
    if not acks:
        yield from _end_if_refused(call, topics)
        return None
    yield from collect_results(call, sent, writer)
    for topic in topics:
        for entry in topic["partition_responses"]:
            if entry.pop(STORED, False) and entry["error_code"] == KafkaError.NONE:
                entry.update(error_code=KafkaError.DUPLICATE_SEQUENCE_NUMBER, base_offset=-1)
    return {"responses": topics}


def _end_if_refused(call: Call, topics: list[dict[str, Any]]) -> Steps:
    """Raise DisconnectError if a batch of a request without acknowledgements is refused: its client
    learns by the end of its connection that what it knows of the topics is wrong. The front has
    what the client has sent before.
    """
    entries = (entry for topic in topics for entry in topic["partition_responses"])
    refused = next((each for each in entries if each["error_code"] != KafkaError.NONE), None)
    if refused is not None:
        yield call.peer.ask(Api.PING, [])
        code = KafkaError(refused["error_code"])
        raise DisconnectError(f"a batch was refused with {code.name}, and acks is 0")


def _writer(call: Call) -> Steps:
    """Returns the transactional producer of the request, if it has one, and a KafkaError."""
    if call.request.get("transactional_id") is None:
        return None, KafkaError.NONE
    for topic in call.request["topic_data"]:
        for data in topic["partition_data"]:
            records = data["records"]
            if records is not None and len(records) >= HEADER_BYTES:
                header = read_kafka_header(records)
                try:
                    found = yield from find_writer(
                        call, (header.producer_id, header.producer_epoch)
                    )
                except RefusedError as refused:
                    return None, refused.code
                if found.was_aborted:
                    return None, aborted_error(found)
                return found, KafkaError.NONE
    return None, KafkaError.NONE


def send_parts(call: Call, parts: Sequence[Part], acks: int, timeout_ms: int) -> Steps:
    """Pass batches to the front within the credit. Returns the groups that are answered, each with
    its waiter.
    """
    sent: list[tuple[Group, Waiter]] = []
    for group in _groups(parts, call.services.settings["lane_bytes"] // 2):
        size = sum(len(batch) for _, batch in group.batches)
        while not call.peer.has_credit(size):
            yield call.peer.ask_for_credit(size)
        body = _body(group, acks, timeout_ms)
        if acks:
            sent.append((group, call.peer.ask(Api.PRODUCE, body)))
        else:
            call.peer.send_unanswered(Api.PRODUCE, body)
    return sent


def collect_results(
    call: Call, sent: Sequence[tuple[Group, Waiter]], writer: TransactionalProducer | None
) -> Steps:
    """Note the results. A batch that came before the end of the transaction before it is sent once
    more, after a pause.
    """
    until_ns = call.services.now_ns + CONCURRENT_NS
    while sent:
        later: list[tuple[Part, bytearray]] = []
        early_parts: set[int] = set()
        for group, waiter in sent:
            answer = yield waiter
            if answer.code is not ErrorCode.OK:
                results = [ProducedEntry(answer.code, 0, -1, -1, -1)] * len(group.batches)
            else:
                results = produce_messages.decode_produced_batches(answer.body[0])
            for (part, batch), result in zip(group.batches, results, strict=True):
                keep_message(batch)  # its memory is another batch's once nobody sees it
                is_early = result.error in EARLY and call.services.now_ns < until_ns
                if writer is not None and (is_early or id(part) in early_parts):
                    early_parts.add(id(part))
                    later.append((part, batch))
                else:
                    yield from _note(call, part, result, writer)
        sent = []
        if later:
            yield pause(call.services, CONCURRENT_PAUSE_NS)
            parts = [Part(part.route, part.entry, [batch], part.sent) for part, batch in later]
            request = call.request
            sent = yield from send_parts(call, parts, request["acks"], request["timeout_ms"])


def _places(call: Call, error: KafkaError) -> tuple[list[dict[str, Any]], list[Place]]:
    """The response's entries, and the partitions that are not refused."""
    routes, by_id = call.services.routes, call.version >= 13
    topics, places = [], []
    for topic in call.request["topic_data"]:
        entries = []
        for data in topic["partition_data"]:
            index = data["index"]
            entry: dict[str, Any] = {
                "index": index, "error_code": KafkaError.NONE, "base_offset": -1,
                "log_append_time_ms": -1, "log_start_offset": -1,
            }  # fmt: skip
            entries.append(entry)
            if error is not KafkaError.NONE:
                entry["error_code"] = error
                continue
            route = (
                routes.find(topic["topic_id"], index)
                if by_id
                else routes.find_by_name(topic["name"], index)
            )
            if route is None or route.delay_of:
                missing = by_id and not routes.knows(topic["topic_id"])
                entry["error_code"] = (
                    KafkaError.UNKNOWN_TOPIC_ID
                    if missing
                    else KafkaError.UNKNOWN_TOPIC_OR_PARTITION
                )
                continue
            places.append(Place(route, entry, data["records"] or b""))
        topics.append(
            {"name": topic.get("name"), "topic_id": topic.get("topic_id"),
             "partition_responses": entries}
        )  # fmt: skip
    return topics, places


def _converted(call: Call, writer: TransactionalProducer | None, place: Place) -> Part | None:
    """The batches of a partition. None: they are refused."""
    route, entry, records = place
    if writer is not None:
        is_decided = partial(call.services.front.log_bounds.is_decided, route)
        try:
            records = writer.translate((route.topic_id, route.partition), records, is_decided)
        except UnknownSequenceError:
            entry.update(
                error_code=KafkaError.UNKNOWN_PRODUCER_ID,
                error_message="the place of this batch in its transaction is not known "
                "after restarts of the gateway: abort the transaction, and begin another",
            )
            return None
    try:
        now_us = call.services.wall_us()
        batches = [b.data for b in convert_incoming(route, records, now_us, call.version)]
    except KafkaRecordsError as refused:
        entry.update(error_code=refused.code, error_message=str(refused))
        if refused.record_index is not None:
            entry["record_errors"] = [
                {
                    "batch_index": refused.record_index,
                    "batch_index_error_message": str(refused),
                }
            ]
        return None
    note_codec(call.services, route, records)
    return Part(route, entry, batches, records)


def _groups(parts: Sequence[Part], bytes_max: int) -> list[Group]:
    """Batches in groups that credit can be given for."""
    groups: list[Group] = []
    size = 0
    for part in parts:
        for batch in part.batches:
            if (
                not groups
                or size + len(batch) > bytes_max
                or len(groups[-1].batches) >= PRODUCE_BATCHES_MAX
            ):
                groups.append(Group([]))
                size = 0
            groups[-1].batches.append((part, batch))
            size += len(batch)
    return groups


def _body(group: Group, acks: int, timeout_ms: int) -> list[Readable]:
    entries = [
        ProduceEntry(part.route.topic_id, part.route.partition, 0, len(batch))
        for part, batch in group.batches
    ]
    timeout_ms = max(0, min(timeout_ms, TIMEOUT_MAX_MS))
    head = produce_messages.encode_produce_batches(ProduceBatches(acks, timeout_ms, entries))
    batches: list[Readable] = [memoryview(batch) for _, batch in group.batches]
    if len(batches) > PRODUCE_FRAMES_MAX:
        batches = [b"".join(batches)]
    return [head, *batches]


def _note(
    call: Call, part: Part, result: ProducedEntry, writer: TransactionalProducer | None
) -> Steps:
    """Note the result of a batch in its partition's entry: the first offset, or the first error."""
    entry = part.entry
    if entry["error_code"] != KafkaError.NONE:
        return
    if result.error:
        code = code_of(result.error)
        error = kafka_error(result.error)
        if code is ErrorCode.UNKNOWN_SEQUENCE:
            if result.flags & produce_messages.PRODUCED_DUPLICATE:
                if (yield from _is_durable(call, part.route, result.base_offset)):
                    entry[STORED] = True
                    return
                error = KafkaError.REQUEST_TIMED_OUT
            else:
                # Java's producer takes a new epoch if this is known, else it repeats the batch.
                entry["log_start_offset"] = call.services.front.log_bounds.shown_offsets(
                    part.route
                )[0]
        if writer is not None and code is ErrorCode.PRODUCER_FENCED:
            error = yield from note_fenced(call, writer)
        entry.update(error_code=error, base_offset=-1, error_message=ERROR_TABLE[code].meaning)
        return
    if entry["base_offset"] < 0:
        entry["base_offset"] = result.base_offset
        if len(part.sent) and len(part.batches) == 1:
            tail_cache(call.services).add(
                part.route, result.base_offset, part.sent, part.batches[0]
            )
        if part.route.settings.get("message.timestamp.type") == "LogAppendTime":
            entry["log_append_time_ms"] = result.append_time_us // 1000


def _is_durable(call: Call, route: Assignment, end: int) -> Steps:
    """Wait until the records below `end` are durable. Returns False if that takes too long."""
    until_ns = call.services.now_ns + DURABLE_NS
    while call.services.front.log_bounds.shown_offsets(route)[1] < end:
        if call.services.now_ns >= until_ns:
            return False
        yield pause(call.services, CONCURRENT_PAUSE_NS)
    return True
