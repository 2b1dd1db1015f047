"""EndTxn: commit or abort, with the offsets that wait."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.transactions.owner import aborted_error, fenced, producer_or_error
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.producers.transactional_producer import TransactionalProducer
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

VERSION_2_END = 5
MS = 1_000_000
COMMIT_PENDING_MS = 60_000
"""The least time for which a requested commit keeps its offsets pending."""
OFFSET_ERRORS = (
    ErrorCode.UNKNOWN_GROUP, ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER,
    ErrorCode.PARTITION_NOT_OWNED, ErrorCode.OFFSET_OUT_OF_RANGE,
)  # fmt: skip
"""The member whose offsets a transaction has is no member any more, or has lost a partition; or an
offset is beyond its log. The transaction is aborted then.
"""
OUTCOMES = (ErrorCode.OK, ErrorCode.TRANSACTION_ABORTED, ErrorCode.INVALID_TRANSACTION)
"""Answers that may have the outcome of a transaction and the next one's producer id and epoch."""


def end_transaction(call: Call) -> Steps:
    """Commit or abort."""
    request = call.request
    error, found = yield from producer_or_error(call, 2)
    if found is None and error is KafkaError.PRODUCER_FENCED and call.version >= VERSION_2_END:
        return (yield from _repeated(call))
    if found is None:
        raise RefusedError(error)
    if call.version >= VERSION_2_END or found.is_recovered:
        found.is_version_2 = call.version >= VERSION_2_END
    is_commit = bool(request["committed"])
    if found.was_aborted:
        following = found.producer_id, found.producer_epoch
        if is_commit:
            raise RefusedError(aborted_error(found))
        found.begin(*following)
        return _ended(found)
    commits = is_commit and not found.is_incomplete
    asked: dict[str, Any] = {
        "transactional_id": request["transactional_id"], "owner": found.owner,
        "producer_id": found.producer_id, "producer_epoch": found.producer_epoch,
        "outcome": "commit" if commits else "abort", "is_empty": not found.has_batches,
        "staged": found.following_text(),
    }  # fmt: skip
    if commits:
        asked["offsets"] = found.offsets.groups_json()
        pending_ms = max(found.timeout_ms, COMMIT_PENDING_MS)
        found.offsets_until_ns = call.services.now_ns + pending_ms * MS
    answer = yield call.ask(Api.END_TRANSACTION, asked)
    if commits and answer.code is ErrorCode.OFFSET_OUT_OF_RANGE:
        del asked["offsets"]
        asked["outcome"] = "abort"
        answer = yield call.ask(Api.END_TRANSACTION, asked)
    following = answer.json() if answer.code in OUTCOMES else {}
    if "producer_id" in following:
        # An earlier commit of this transaction, which had all its offsets, may have gone through.
        outcome = asked["outcome"] if answer.code is ErrorCode.OK else following.get("outcome")
        if (outcome == "commit") is is_commit:
            found.begin(following["producer_id"], following["producer_epoch"])
            return _ended(found)
        if is_commit:
            found.note_aborted(following["producer_id"], following["producer_epoch"])
            raise RefusedError(aborted_error(found), "the transaction was aborted")
    if answer.code is ErrorCode.TRANSACTION_ABORTED:
        raise RefusedError(aborted_error(found))
    if answer.code is ErrorCode.PRODUCER_FENCED:
        raise RefusedError(fenced(call.version, 2), answer.sentence)
    if answer.code in OFFSET_ERRORS and found.is_version_2:
        raise RefusedError(KafkaError.TRANSACTION_ABORTABLE, answer.sentence)
    raise RefusedError(coordinator_error(answer.code), answer.sentence)


def _repeated(call: Call) -> Steps:
    """Answer an end that was decided before: its answer was lost with the connection or with the
    gateway. Raises RefusedError: the producer is not the owner, or it was decided otherwise.
    """
    request = call.request
    name = request["transactional_id"]
    identity = request["producer_id"], request["producer_epoch"]
    answer = yield call.ask(Api.DESCRIBE_TRANSACTION, {"transactional_id": name})
    if answer.code is not ErrorCode.OK:
        raise RefusedError(coordinator_error(answer.code), answer.sentence)
    current = answer.json()
    if identity == (current["producer_id"], current["producer_epoch"]):
        raise RefusedError(KafkaError.PRODUCER_FENCED)
    asked = {
        "transactional_id": name, "owner": current["owner"], "producer_id": identity[0],
        "producer_epoch": identity[1], "outcome": "commit" if request["committed"] else "abort",
    }  # fmt: skip
    answer = yield call.ask(Api.END_TRANSACTION, asked)
    if answer.code is ErrorCode.TRANSACTION_ABORTED:
        raise RefusedError(KafkaError.TRANSACTION_ABORTABLE, answer.sentence)
    if answer.code is not ErrorCode.OK:
        raise RefusedError(KafkaError.PRODUCER_FENCED, answer.sentence)
    following = answer.json()
    return {
        "error_code": KafkaError.NONE, "producer_id": following["producer_id"],
        "producer_epoch": following["producer_epoch"],
    }  # fmt: skip


def _ended(producer: TransactionalProducer) -> dict[str, Any]:
    return {
        "error_code": KafkaError.NONE,
        "producer_id": producer.client_producer_id,
        "producer_epoch": producer.client_epoch,
    }
