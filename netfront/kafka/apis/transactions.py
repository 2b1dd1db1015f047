"""Transactions of Kafka producers, on the transactions of the appliance.

InitProducerId makes the client the owner of its transactional id. AddPartitionsToTxn and
AddOffsetsToTxn need no work: a transaction has the partitions that its batches open. The offsets of
TxnOffsetCommit wait here, and travel with the commit, which decides all at once.

Every transaction of the appliance has an epoch of its own, and sequences from 0. Clients that know
this (Kafka's transaction version 2: EndTxn 5, Produce 12) get the next epoch with the end of each
transaction. Older ones keep the epoch that they began with, and their sequences go on: the gateway
translates both (`TransactionalProducer`).

Owner: one gateway, in memory.

Invariants:
- A request of another owner, or of an earlier one, is refused (PRODUCER_FENCED): what the client
  knows must be what it was last given.
- A translated batch has a valid checksum only if it came with one.
- At most PRODUCERS_MAX transactional ids are known here. Those without a transaction go first.
- A transaction commits with all offsets that were accepted for it, or aborts (`is_incomplete`).

Crash: the coordinator has owner and epoch, and the offsets are lost. The transaction that was open
aborts when its client wants to commit it. A client of version 2 goes on with the next one. An older
one is fenced when its transaction is not the first: it cannot be told from an earlier owner.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from netfront.kafka.apis.call import Call, RefusedError, Services
from netfront.kafka.apis.classic_groups import commit_error, has_members
from netfront.kafka.exchange.waiter import Steps
from netfront.kafka.groups.transaction_offsets import Committer, TransactionOffsets
from netfront.kafka.wire.codec import Readable
from netfront.kafka.wire.errors import KafkaError, coordinator_error
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import SEQUENCE_MODULUS
from tailrace.kafka_records import batch_layout as layout
from tailrace.kafka_records.batch_layout import KafkaHeader, write_kafka_header
from tailrace.protocol.frame import Api

PRODUCERS_MAX = 50_000
VERSION_2_PRODUCE = 12
VERSION_2_END = 5
MS = 1_000_000
COMMIT_PENDING_MS = 60_000
"""The least time for which a requested commit keeps its offsets pending."""
MEMBER_ERRORS = (
    ErrorCode.UNKNOWN_GROUP, ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER,
    ErrorCode.PARTITION_NOT_OWNED,
)  # fmt: skip
"""The member whose offsets a transaction has is no member any more, or has lost a partition."""
OUTCOMES = (ErrorCode.OK, ErrorCode.TRANSACTION_ABORTED, ErrorCode.INVALID_TRANSACTION)
"""Answers that may have the outcome of a transaction and the next one's producer id and epoch."""
Partition = tuple[bytes, int]


class TransactionalProducer:
    """The owner of a transactional id, as its client knows it and as it is."""

    __slots__ = (
        "client_epoch", "client_producer_id", "has_batches", "is_incomplete", "is_version_2",
        "offsets", "offsets_until_ns", "owner", "producer_epoch", "producer_id", "sequences",
        "timeout_ms", "was_aborted",
    )  # fmt: skip

    def __init__(self, producer_id: int, producer_epoch: int, owner: int, timeout_ms: int) -> None:
        self.client_producer_id = self.producer_id = producer_id
        self.client_epoch = self.producer_epoch = producer_epoch
        """`client_producer_id`, `client_epoch`: what the client knows."""
        self.owner = owner
        self.timeout_ms = timeout_ms
        self.is_version_2 = False
        self.has_batches = False
        self.was_aborted = False
        """The appliance has aborted the transaction; the client has yet to hear it."""
        self.sequences: dict[Partition, int] = {}
        """The client's sequence of the first batch of this transaction, by partition."""
        self.offsets = TransactionOffsets()
        self.offsets_until_ns = 0
        """The offsets are dropped then, with the transaction."""
        self.is_incomplete = False
        """Offsets of this transaction may be lost: it only aborts."""

    @property
    def is_busy(self) -> bool:
        """True if it has batches or offsets of a transaction."""
        return self.has_batches or bool(self.offsets)

    def begin(self, producer_id: int, producer_epoch: int) -> None:
        """Go on to the next transaction."""
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self.has_batches = self.was_aborted = self.is_incomplete = False
        self.sequences.clear()
        self.offsets.clear()
        if self.is_version_2:
            self.client_producer_id, self.client_epoch = producer_id, producer_epoch

    def note_aborted(self, producer_id: int, producer_epoch: int) -> None:
        """The appliance has aborted the transaction, and these are the next one's. The client gets
        them with the abort that it has to make.
        """
        is_version_2, self.is_version_2 = self.is_version_2, False
        self.begin(producer_id, producer_epoch)
        self.is_version_2 = is_version_2
        self.was_aborted = True

    def drop_late_offsets(self, now_ns: int) -> None:
        """Give up offsets whose transaction did not end within its timeout: nothing says that its
        client lives.
        """
        if self.offsets and now_ns >= self.offsets_until_ns:
            self.offsets.clear()
            self.is_incomplete = True

    def translate(self, partition: Partition, records: Readable) -> bytes | memoryview | bytearray:
        """Write the producer id, epoch and sequences of the appliance into record batches. Batches
        that are malformed, or of another producer, stay as they are, and are refused as such.
        """
        self.has_batches = True
        if self.is_version_2:
            self.sequences[partition] = 0
        if self.is_version_2 and (self.client_producer_id, self.client_epoch) == (
            self.producer_id, self.producer_epoch,
        ):  # fmt: skip
            return records
        out = bytearray(records)
        at = 0
        while at + layout.HEADER_BYTES <= len(out):
            end = at + layout.LENGTH_FROM + layout.length_at(out, at)
            header = layout.read_kafka_header(out, at)
            if header.magic != layout.MAGIC or not at + layout.HEADER_BYTES <= end <= len(out):
                break
            batch = out[at:end]
            with memoryview(batch) as view:
                is_whole = layout.crc_of(view) == header.crc
            if is_whole and (header.producer_id, header.producer_epoch) == (
                self.client_producer_id, self.client_epoch,
            ):  # fmt: skip
                write_kafka_header(batch, self._translated(partition, header))
                out[at:end] = batch
            at = end
        return out

    def _translated(self, partition: Partition, header: KafkaHeader) -> KafkaHeader:
        first = self.sequences.setdefault(partition, header.base_sequence)
        return header._replace(
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            base_sequence=(header.base_sequence - first) % SEQUENCE_MODULUS,
        )


class TransactionalProducers:
    """The transactional ids whose producers use this gateway, by name."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, TransactionalProducer] = OrderedDict()

    def get(self, transactional_id: str) -> TransactionalProducer | None:
        """The producer of an id; None: this gateway does not know it."""
        found = self._known.get(transactional_id)
        if found is not None:
            self._known.move_to_end(transactional_id)
        return found

    def put(self, transactional_id: str, producer: TransactionalProducer) -> None:
        """Remember the owner of an id."""
        self._known[transactional_id] = producer
        self._known.move_to_end(transactional_id)
        if len(self._known) > PRODUCERS_MAX:
            idle = next(
                (name for name, one in self._known.items() if not one.is_busy),
                next(iter(self._known)),
            )
            del self._known[idle]

    def pending_offsets(self, group: str, now_ns: int) -> set[tuple[str, int]]:
        """The (topic, partition)s of a group whose offsets wait for a transaction's end."""
        found: set[tuple[str, int]] = set()
        for producer in self._known.values():
            producer.drop_late_offsets(now_ns)
            found |= producer.offsets.places(group)
        return found


def producers_of(services: Services) -> TransactionalProducers:
    """The producers of this gateway."""
    found: TransactionalProducers = services.state.setdefault(
        "transactions", TransactionalProducers()
    )
    return found


def fenced(version: int, since: int) -> KafkaError:
    """The error for a producer that was replaced: an older one for older versions."""
    return KafkaError.PRODUCER_FENCED if version >= since else KafkaError.INVALID_PRODUCER_EPOCH


# ---- InitProducerId ------------------------------------------------------------------------------


def init_transactions(call: Call) -> Steps:
    """Make the client the owner of its transactional id."""
    request = call.request
    name, producers = request["transactional_id"], producers_of(call.services)
    known = producers.get(name)
    if request.get("producer_id", -1) >= 0 and known is not None:
        asked = request["producer_id"], request["producer_epoch"]
        if asked != (known.client_producer_id, known.client_epoch):
            raise RefusedError(fenced(call.version, 4))
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
        found["producer_id"], found["producer_epoch"], found["owner"], timeout_ms
    )
    producers.put(name, producer)
    return {
        "error_code": KafkaError.NONE,
        "producer_id": producer.client_producer_id,
        "producer_epoch": producer.client_epoch,
    }


# ---- the producer of a request -------------------------------------------------------------------


def find_producer(call: Call, name: str, identity: tuple[int, int], since: int) -> Steps:
    """Returns the TransactionalProducer of a request by (producer id, epoch). Raises RefusedError:
    it is not the owner. `since`: first version of its API with PRODUCER_FENCED.
    """
    producers = producers_of(call.services)
    known = producers.get(name)
    if known is None:
        recovered = yield from _recover(call, name, identity, since)
        known = producers.get(name)  # another request may have been faster
        if known is None:
            known = recovered
            producers.put(name, known)
    if identity != (known.client_producer_id, known.client_epoch):
        raise RefusedError(fenced(call.version, since))
    return known


def _recover(call: Call, name: str, identity: tuple[int, int], since: int) -> Steps:
    """Ask the coordinator, after a restart of this gateway. It does not know whether there were
    offsets.
    """
    answer = yield call.ask(Api.DESCRIBE_TRANSACTION, {"transactional_id": name})
    if answer.code is not ErrorCode.OK:
        raise RefusedError(coordinator_error(answer.code), answer.sentence)
    found = answer.json()
    if identity != (found["producer_id"], found["producer_epoch"]):
        raise RefusedError(fenced(call.version, since))
    producer = TransactionalProducer(*identity, found["owner"], found["timeout_ms"])
    producer.is_version_2 = True  # or its first transaction: nothing to translate yet
    producer.is_incomplete = True
    producer.has_batches = found["state"] != "empty"
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
        return _aborted(producer)
    return KafkaError.INVALID_PRODUCER_EPOCH


def _aborted(producer: TransactionalProducer) -> KafkaError:
    return (
        KafkaError.TRANSACTION_ABORTABLE if producer.is_version_2 else KafkaError.INVALID_TXN_STATE
    )


# ---- AddPartitionsToTxn, AddOffsetsToTxn ---------------------------------------------------------


def add_partitions(call: Call) -> Steps:
    """Accept partitions: their batches open the transaction there."""
    request, routes = call.request, call.services.routes
    error, found = yield from _error_of(call, 2)
    if found is not None and found.was_aborted:
        error = KafkaError.INVALID_TXN_STATE
    results = []
    for topic in request["v3_and_below_topics"]:
        entries = []
        for partition in topic["partitions"]:
            known = routes.find_by_name(topic["name"], partition) is not None
            code = error
            if code is KafkaError.NONE and not known:
                code = KafkaError.UNKNOWN_TOPIC_OR_PARTITION
            entries.append({"partition_index": partition, "partition_error_code": code})
        results.append({"name": topic["name"], "results_by_partition": entries})
    return {"results_by_topic_v3_and_below": results}


def _error_of(call: Call, since: int) -> Steps:
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


def add_offsets(call: Call) -> Steps:
    """Accept a group: its offsets travel with the commit."""
    error, _ = yield from _error_of(call, 2)
    return {"error_code": error}


def commit_offsets(call: Call) -> Steps:
    """TxnOffsetCommit: keep offsets until the transaction is committed."""
    request, group = call.request, call.request["group_id"]
    committer = Committer(
        request.get("member_id") or "", request.get("generation_id", -1),
        not has_members(call.services, group),
    )  # fmt: skip
    error, found = yield from _error_of(call, 99)
    if error is KafkaError.NONE and (committer.member_id or committer.epoch >= 0):
        transaction = found.producer_id, found.producer_epoch
        error = yield from _member_error(call, committer)
        if (found.producer_id, found.producer_epoch) != transaction:
            error = KafkaError.INVALID_PRODUCER_EPOCH
    else:
        committer = Committer("", -1, False)
    topics = []
    for topic in request["topics"]:
        entries = []
        for partition in topic["partitions"]:
            place = topic["name"], partition["partition_index"]
            code = error
            if code is KafkaError.NONE:
                code = _keep_offset(call, found, committer, place, partition)
            entries.append({"partition_index": place[1], "error_code": code})
        topics.append({"name": topic["name"], "partitions": entries})
    return {"topics": topics}


def _member_error(call: Call, committer: Committer) -> Steps:
    """Returns the KafkaError of a commit whose member is none of the group, or NONE.

    The gateway knows the members of classic groups, the process of groups all others: a commit
    without offsets asks it.
    """
    request = call.request
    group, instance_id = request["group_id"], request.get("group_instance_id")
    if not committer.is_of_coordinator:
        return commit_error(call.services, group, committer.member_id, instance_id, committer.epoch)
    if not committer.member_id or committer.epoch < 0:
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
    producer: TransactionalProducer,
    committer: Committer,
    place: tuple[str, int],
    partition: dict[str, Any],
) -> KafkaError:
    route = call.services.routes.find_by_name(*place)
    if route is None:
        return KafkaError.UNKNOWN_TOPIC_OR_PARTITION
    if not producer.offsets:
        producer.offsets_until_ns = call.services.now_ns + producer.timeout_ms * MS
    entry = [
        *place, partition["committed_offset"], partition.get("committed_leader_epoch", -1),
        partition["committed_metadata"] or "", route.topic_id.hex(),
    ]  # fmt: skip
    is_kept = producer.offsets.keep(call.request["group_id"], committer, place, entry)
    return KafkaError.NONE if is_kept else KafkaError.INVALID_REQUEST


# ---- EndTxn --------------------------------------------------------------------------------------


def end_transaction(call: Call) -> Steps:
    """Commit or abort."""
    request = call.request
    error, found = yield from _error_of(call, 2)
    if found is None:
        raise RefusedError(error)
    if call.version >= VERSION_2_END or found.is_incomplete:
        found.is_version_2 = call.version >= VERSION_2_END
    is_commit = bool(request["committed"])
    if found.was_aborted:
        following = found.producer_id, found.producer_epoch
        if is_commit:
            raise RefusedError(_aborted(found))
        found.begin(*following)
        return _ended(found)
    commits = is_commit and not found.is_incomplete
    asked: dict[str, Any] = {
        "transactional_id": request["transactional_id"], "owner": found.owner,
        "producer_id": found.producer_id, "producer_epoch": found.producer_epoch,
        "outcome": "commit" if commits else "abort", "is_empty": not found.has_batches,
    }  # fmt: skip
    if commits:
        asked["offsets"] = found.offsets.groups_json()
        pending_ms = max(found.timeout_ms, COMMIT_PENDING_MS)
        found.offsets_until_ns = call.services.now_ns + pending_ms * MS
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
            raise RefusedError(_aborted(found), "the transaction was aborted")
    if answer.code is ErrorCode.TRANSACTION_ABORTED:
        raise RefusedError(_aborted(found))
    if answer.code is ErrorCode.PRODUCER_FENCED:
        raise RefusedError(fenced(call.version, 2), answer.sentence)
    if answer.code in MEMBER_ERRORS and found.is_version_2:
        raise RefusedError(KafkaError.TRANSACTION_ABORTABLE, answer.sentence)
    raise RefusedError(coordinator_error(answer.code), answer.sentence)


def _ended(producer: TransactionalProducer) -> dict[str, Any]:
    return {
        "error_code": KafkaError.NONE,
        "producer_id": producer.client_producer_id,
        "producer_epoch": producer.client_epoch,
    }


# ---- DescribeTransactions, ListTransactions ------------------------------------------------------

STATES = {
    "empty": "Empty", "ongoing": "Ongoing", "committing": "PrepareCommit",
    "aborting": "PrepareAbort", "prepared": "PrepareCommit",
}  # fmt: skip


def describe_transactions(call: Call) -> Steps:
    """Describe transactional ids."""
    found = []
    for name in call.request["transactional_ids"]:
        answer = yield call.ask(Api.DESCRIBE_TRANSACTION, {"transactional_id": name})
        if answer.code is not ErrorCode.OK:
            code = coordinator_error(answer.code)
            if answer.code is ErrorCode.UNKNOWN_TRANSACTIONAL_ID:
                code = KafkaError.TRANSACTIONAL_ID_NOT_FOUND
            found.append({"error_code": code, "transactional_id": name})
            continue
        one = answer.json()
        begun_ms = -1
        if one["open_ms"] is not None:
            begun_ms = call.services.wall_us() // 1000 - one["open_ms"]
        found.append(
            {"error_code": KafkaError.NONE, "transactional_id": name,
             "transaction_state": STATES.get(one["state"], "Ongoing"),
             "transaction_timeout_ms": one["timeout_ms"], "transaction_start_time_ms": begun_ms,
             "producer_id": one["producer_id"], "producer_epoch": one["producer_epoch"]}
        )  # fmt: skip
    return {"transaction_states": found}


def list_transactions(call: Call) -> Steps:
    """List transactional ids by state, producer id and age."""
    request = call.request
    states, ids = set(request["state_filters"]), set(request["producer_id_filters"])
    age_ms = request.get("duration_filter", -1)
    listed, following = [], None
    while True:
        answer = yield call.ask(
            Api.LIST_TRANSACTIONS, {"next": following} if following is not None else {}
        )
        if answer.code is not ErrorCode.OK:
            raise RefusedError(coordinator_error(answer.code), answer.sentence)
        page = answer.json()
        for one in page["transactions"]:
            state = STATES.get(one["state"], "Ongoing")
            if (
                (not states or state in states)
                and (not ids or one["producer_id"] in ids)
                and (age_ms < 0 or (one["open_ms"] or 0) > age_ms)
            ):
                listed.append(
                    {"transactional_id": one["transactional_id"], "transaction_state": state,
                     "producer_id": one["producer_id"]}
                )  # fmt: skip
        following = page["next"]
        if following is None:
            break
    unknown = [name for name in states if name not in {*STATES.values(), "CompleteCommit",
               "CompleteAbort", "Dead", "PrepareEpochFence"}]  # fmt: skip
    return {
        "error_code": KafkaError.NONE, "unknown_state_filters": unknown,
        "transaction_states": listed,
    }  # fmt: skip
