"""TxnOffsetCommit: the offsets wait for the commit of their transaction.

Invariants:
- The producer keeps offsets after the coordinator has them. All others are refused and forgotten.
- What the commit would refuse for itself is refused here: a group that cannot be, an offset that no
  log can have, long metadata. A refusal at the commit leaves the transaction open.
- An offset beyond the log is kept: its records may come until the commit, or the transaction may be
  aborted. Else the commit aborts it.
- Of a producer one request waits for the coordinator, whose text has the offsets of all before it.
"""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call
from netfront.kafka.apis.cluster.leader_epochs import OF_DELETED
from netfront.kafka.apis.groups.classic_groups import (
    commit_error,
    has_members,
    is_group_name,
    is_possible_member,
)
from netfront.kafka.apis.groups.group_offsets import METADATA_MAX, is_of_deleted_topic, our_epoch
from netfront.kafka.apis.shared_state import producers_of
from netfront.kafka.apis.transactions.end import MS
from netfront.kafka.apis.transactions.owner import aborted_error, fenced, producer_or_error
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.producers.transaction_offsets import Committer, TransactionOffsets
from netfront.kafka.producers.transactional_producer import TransactionalProducer
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

VERSION_2_OFFSETS = 5
OFFSET_MAX = 1 << 62
"""The largest offset that the process of groups takes."""


def commit_offsets(call: Call) -> Steps:
    """TxnOffsetCommit: keep offsets until the transaction is committed."""
    request, group = call.request, call.request["group_id"]
    error, found = yield from producer_or_error(call, 99)
    if error is KafkaError.NONE and not is_group_name(group):
        error = KafkaError.INVALID_GROUP_ID
    if found is not None and call.version >= VERSION_2_OFFSETS:
        found.is_version_2 = True
    if error is KafkaError.NONE and found.was_aborted:
        error = aborted_error(found)  # they would be the next transaction's
    committer = Committer(  # behind the question: members may have come or gone meanwhile
        request.get("member_id") or "", request.get("generation_id", -1),
        not has_members(call.services, group),
    )  # fmt: skip
    if error is KafkaError.NONE and (committer.member_id or committer.epoch >= 0):
        transaction = found.producer_id, found.producer_epoch
        error = yield from _member_error(call, committer)
        if (found.producer_id, found.producer_epoch) != transaction:
            error = KafkaError.INVALID_PRODUCER_EPOCH
    else:
        committer = Committer("", -1, False)
    if error is KafkaError.NONE and found.is_staging:
        error = KafkaError.COORDINATOR_LOAD_IN_PROGRESS  # it asks again
    offsets = TransactionOffsets() if found is None else found.offsets.copy()
    topics, is_kept = [], False
    for topic in request["topics"]:
        entries = []
        for partition in topic["partitions"]:
            place = topic["name"], partition["partition_index"]
            code = error
            if code is KafkaError.NONE:
                code = _keep_offset(call, offsets, committer, place, partition)
                is_kept = is_kept or code is KafkaError.NONE
            entries.append({"partition_index": place[1], "error_code": code})
        topics.append({"name": topic["name"], "partitions": entries})
    if is_kept:
        error = yield from _stage(call, found, offsets)
        for entry in (entry for topic in topics for entry in topic["partitions"]):
            if entry["error_code"] is KafkaError.NONE:
                entry["error_code"] = error
    return {"topics": topics}


def _stage(call: Call, producer: TransactionalProducer, offsets: TransactionOffsets) -> Steps:
    """Leave the offsets with the coordinator, for a restart of this gateway. The producer has them
    from then on. Returns a KafkaError.
    """
    transaction = producer.producer_id, producer.producer_epoch
    producer.is_staging = True
    try:  # it may end here: its connection was closed
        answer = yield call.ask(
            Api.END_TRANSACTION,
            {"transactional_id": call.request["transactional_id"], "owner": producer.owner,
             "producer_id": transaction[0], "producer_epoch": transaction[1], "outcome": "stage",
             "staged": producer.staged_text(offsets)},
        )  # fmt: skip
    finally:
        producer.is_staging = False
    if (producer.producer_id, producer.producer_epoch) != transaction:
        return KafkaError.INVALID_PRODUCER_EPOCH
    if answer.code is ErrorCode.TRANSACTION_ABORTED:
        found = answer.json()
        producer.note_aborted(found["producer_id"], found["producer_epoch"])
        return aborted_error(producer)
    if answer.code is ErrorCode.PRODUCER_FENCED:
        return fenced(call.version, 99)
    if answer.code is ErrorCode.OK:
        if not producer.offsets:
            producer.offsets_until_ns = call.services.now_ns + producer.timeout_ms * MS
        producer.offsets = offsets
        producers_of(call.services).note_offsets(call.request["transactional_id"])
    return coordinator_error(answer.code)


def _member_error(call: Call, committer: Committer) -> Steps:
    """Returns the KafkaError of a commit whose member is none of the group, or NONE.

    The gateway knows the members of classic groups, the process of groups all others: a commit
    without offsets asks it.
    """
    request = call.request
    group, instance_id = request["group_id"], request.get("group_instance_id")
    if not committer.is_of_coordinator:
        return commit_error(call, group, committer.member_id, instance_id, committer.epoch)
    if not is_possible_member(committer.member_id) or committer.epoch < 0:
        return KafkaError.UNKNOWN_MEMBER_ID
    answer = yield call.ask(
        Api.COMMIT_OFFSETS,
        {"group": group, "kind": "classic", "offsets": [], "member_id": committer.member_id,
         "member_epoch": committer.epoch, "instance_id": instance_id},
    )  # fmt: skip
    if answer.code is ErrorCode.FENCED_MEMBER:
        return KafkaError.ILLEGAL_GENERATION
    return coordinator_error(answer.code)


def _keep_offset(
    call: Call,
    offsets: TransactionOffsets,
    committer: Committer,
    place: tuple[str, int],
    partition: dict[str, Any],
) -> KafkaError:
    route = call.services.routes.find_by_name(*place)
    if route is None:
        return KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    offset, metadata = partition["committed_offset"], partition["committed_metadata"] or ""
    if len(metadata.encode("utf-8", "replace")) > METADATA_MAX:
        return KafkaError.OFFSET_METADATA_TOO_LARGE
    if not 0 <= offset <= OFFSET_MAX:
        return KafkaError.OFFSET_OUT_OF_RANGE
    epoch = our_epoch(call, place, partition)
    if epoch == OF_DELETED or is_of_deleted_topic(call, place, committer.member_id):
        return KafkaError.ILLEGAL_GENERATION  # its consumer joins again, and asks where to begin
    entry = [*place, offset, epoch, metadata, route.topic_id.hex()]
    is_kept = offsets.keep(call.request["group_id"], committer, place, entry)
    return KafkaError.NONE if is_kept else KafkaError.INVALID_REQUEST
