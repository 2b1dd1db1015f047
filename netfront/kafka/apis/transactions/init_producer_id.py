"""InitProducerId: an id for idempotent producers, and the next epoch of one."""

from __future__ import annotations

from typing import Any

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.shared_state import producers_of
from netfront.kafka.apis.transactions.owner import find_producer
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.producers.transactional_producer import TransactionalProducer
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

TWO_PHASES = "transactions of two phases (KIP-939) are not served to Kafka clients"


def init_producer_id(call: Call) -> Steps:
    """Give a producer id and epoch."""
    request = call.request
    if (request.get("producer_id", -1) == -1) != (request.get("producer_epoch", -1) == -1):
        raise RefusedError(
            KafkaError.INVALID_REQUEST, "give a producer's id and its epoch, or neither"
        )
    if request.get("keep_prepared_txn"):
        raise RefusedError(KafkaError.UNSUPPORTED_VERSION, TWO_PHASES)
    if request.get("enable2_pc"):  # Kafka's answer where it is not switched on
        raise RefusedError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, TWO_PHASES)
    if request["transactional_id"] is not None:
        return (yield from init_transactions(call))
    asked: dict[str, Any] = {}
    if request.get("producer_id", -1) >= 0:
        asked = {name: request[name] for name in ("producer_id", "producer_epoch")}
    answer = yield call.ask(Api.INIT_PRODUCER_ID, asked)
    if answer.code is not ErrorCode.OK:
        raise RefusedError(coordinator_error(answer.code), answer.sentence)
    found = answer.json()
    return {
        "error_code": KafkaError.NONE,
        "producer_id": found["producer_id"],
        "producer_epoch": found["producer_epoch"],
    }


def init_transactions(call: Call) -> Steps:
    """Make the client the owner of its transactional id."""
    request = call.request
    name, producers = request["transactional_id"], producers_of(call.services)
    if request.get("producer_id", -1) >= 0:
        yield from _check_identity(call, name)
    limit_ms = call.services.settings["transaction.max.timeout.ms"]
    timeout_ms = request["transaction_timeout_ms"]
    if not 0 < timeout_ms <= limit_ms:
        raise RefusedError(KafkaError.INVALID_TRANSACTION_TIMEOUT)
    answer = yield call.ask(
        Api.INIT_TRANSACTIONS,
        {"transactional_id": name, "timeout_ms": timeout_ms, "client_id": call.client_id},
    )
    if answer.code in (ErrorCode.NOT_READY, ErrorCode.INVALID_TRANSACTION):
        raise RefusedError(KafkaError.CONCURRENT_TRANSACTIONS, answer.sentence)
    if answer.code is not ErrorCode.OK:
        raise RefusedError(coordinator_error(answer.code), answer.sentence)
    found = answer.json()
    producer = TransactionalProducer(
        found["producer_id"], found["producer_epoch"], found["owner"], timeout_ms, call.user
    )
    producers.put(name, producer)
    return {
        "error_code": KafkaError.NONE,
        "producer_id": producer.client_producer_id,
        "producer_epoch": producer.client_epoch,
    }


def _check_identity(call: Call, name: str) -> Steps:
    """A client that goes on with its producer id and epoch must be the owner; this gateway may have
    been restarted since it became that. An id that has expired is begun anew. Raises RefusedError.
    """
    identity = call.request["producer_id"], call.request["producer_epoch"]
    try:
        yield from find_producer(call, name, identity, 4)
    except RefusedError as refused:
        if refused.code is not coordinator_error(ErrorCode.UNKNOWN_TRANSACTIONAL_ID):
            raise
