"""The producer of a request: the owner of its transactional id, or another one that is refused."""

from __future__ import annotations

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.shared_state import producers_of
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.producers.transactional_producer import TransactionalProducer
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

VERSION_2_PRODUCE = 12
MS = 1_000_000


def fenced(version: int, since: int) -> KafkaError:
    """The error for a producer that was replaced: an older one for older versions."""
    return KafkaError.PRODUCER_FENCED if version >= since else KafkaError.INVALID_PRODUCER_EPOCH


def find_producer(call: Call, name: str, identity: tuple[int, int], since: int) -> Steps:
    """Returns the TransactionalProducer of a request by (producer id, epoch). Raises RefusedError:
    it is not the owner, or another user's. `since`: first version of its API with PRODUCER_FENCED.
    """
    producers = producers_of(call.services)
    known = producers.get(name)
    if known is None:
        recovered = yield from _recover(call, name, identity, since)
        known = producers.get(name)  # another request may have been faster
        if known is None:
            known = recovered
            producers.recover(name, known)
    if identity != (known.client_producer_id, known.client_epoch):
        raise RefusedError(fenced(call.version, since))
    if call.user != known.user:
        raise _not_its_user(call, name)
    return known


def _not_its_user(call: Call, name: str) -> RefusedError:
    return RefusedError(
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        f"the producer of {name[:249]!r} belongs to another user than {call.user}: begin one of "
        "your own with InitProducerId",
    )


def _recover(call: Call, name: str, identity: tuple[int, int], since: int) -> Steps:
    """Ask the coordinator, after a restart of this gateway."""
    answer = yield call.ask(Api.DESCRIBE_TRANSACTION, {"transactional_id": name})
    if answer.code is not ErrorCode.OK:
        raise RefusedError(coordinator_error(answer.code), answer.sentence)
    found = answer.json()
    producer = TransactionalProducer(
        found["producer_id"], found["producer_epoch"], found["owner"], found["timeout_ms"],
        call.user,
    )  # fmt: skip
    if not producer.restore(found["staged"], identity):
        raise RefusedError(fenced(call.version, since))
    if call.user:  # the coordinator compares the user if it is asked for an owner
        asked = {"transactional_id": name, "owner": found["owner"]}
        answer = yield call.ask(Api.DESCRIBE_TRANSACTION, asked)
        if answer.code is ErrorCode.NOT_AUTHORIZED:
            raise _not_its_user(call, name)
        if answer.code is ErrorCode.PRODUCER_FENCED:
            raise RefusedError(fenced(call.version, since))
        if answer.code is not ErrorCode.OK:
            raise RefusedError(coordinator_error(answer.code), answer.sentence)
    producer.offsets_until_ns = call.services.now_ns + producer.timeout_ms * MS
    return producer


def find_writer(call: Call, identity: tuple[int, int]) -> Steps:
    """Returns the TransactionalProducer of a Produce request. Raises RefusedError."""
    found = yield from find_producer(call, call.request["transactional_id"], identity, 99)
    if call.version >= VERSION_2_PRODUCE:
        found.is_version_2 = True
    return found


def note_fenced(call: Call, producer: TransactionalProducer) -> Steps:
    """A batch was refused with PRODUCER_FENCED: its transaction was aborted, or the owner is
    another. Returns the KafkaError.
    """
    name = call.request["transactional_id"]
    answer = yield call.ask(
        Api.DESCRIBE_TRANSACTION, {"transactional_id": name, "owner": producer.owner}
    )
    if answer.code is not ErrorCode.OK:
        return KafkaError.INVALID_PRODUCER_EPOCH
    found = answer.json()
    if (found["producer_id"], found["producer_epoch"]) != (
        producer.producer_id, producer.producer_epoch,
    ):  # fmt: skip
        producer.note_aborted(found["producer_id"], found["producer_epoch"])
        return aborted_error(producer)
    return KafkaError.INVALID_PRODUCER_EPOCH


def aborted_error(producer: TransactionalProducer) -> KafkaError:
    return (
        KafkaError.TRANSACTION_ABORTABLE if producer.is_version_2 else KafkaError.INVALID_TXN_STATE
    )


def producer_or_error(call: Call, since: int) -> Steps:
    """Returns (KafkaError, producer or None) of a request with a transactional id."""
    request = call.request
    prefix = "v3_and_below_" if "v3_and_below_transactional_id" in request else ""
    name = str(request[f"{prefix}transactional_id"])
    identity = int(request[f"{prefix}producer_id"]), int(request[f"{prefix}producer_epoch"])
    try:
        found = yield from find_producer(call, name, identity, since)
    except RefusedError as error:
        return error.code, None
    return KafkaError.NONE, found
