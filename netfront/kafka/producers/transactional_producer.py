"""Transactional producers of Kafka clients: identity, sequences and offsets of the transaction.

Every transaction of the appliance has an epoch of its own, and sequences from 0. Clients that know
this (Kafka's transaction version 2: EndTxn 5, Produce 12) get the next epoch with the end of each
transaction. Older ones keep the epoch that they began with, and their sequences go on: the gateway
translates both (`TransactionalProducer`).

Owner: one gateway, in memory.

Invariants:
- A translated batch has a valid checksum only if it came with one.
- A producer's requests are its user's.
- An offset that was refused is not in `offsets`.
- At most PRODUCERS_MAX transactional ids are known here. Those without a transaction go first.
- Every one that has offsets is in `_pending`, so a consumer's question costs what they are, not
  what the known ids are. Some there have none any more, until the next question.
- Once `knows_left` is set, the offsets of every open transaction are pending, whoever asks first
  behind a restart: its producer or another consumer.

Crash: the coordinator has owner, epoch, offsets, and what a client of version 1 knows. The
transaction that was open goes on; with more than the coordinator keeps its commit aborts. Where the
next sequence of a client of version 1 is unknown, the first batch that comes has it, if nothing of
an open transaction is in that log. Otherwise it may be one that was sent before, and the client has
to abort (`UnknownSequenceError`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import orjson

from netfront.kafka.producers.transaction_offsets import TransactionOffsets
from netfront.kafka.records import batch_layout as layout
from netfront.kafka.records.batch_layout import KafkaHeader, write_kafka_header
from netfront.kafka.wire.definitions import Readable
from netfront.kafka.wire.plain_json import plain_json
from tailrace.format.record_batch.batch_header import SEQUENCE_MODULUS

PRODUCERS_MAX = 50_000
STAGED_MAX = 65_536
TOO_MUCH = "!"
"""Staged instead of a text that has more characters."""
Partition = tuple[bytes, int]


class UnknownSequenceError(Exception):
    """A batch whose place in its transaction cannot be known."""


class TransactionalProducer:
    """The owner of a transactional id, as its client knows it and as it is."""

    __slots__ = (
        "client_epoch", "client_producer_id", "following", "has_batches", "is_incomplete",
        "is_partial", "is_recovered", "is_staging", "is_version_2", "offsets", "offsets_until_ns",
        "owner", "producer_epoch", "producer_id", "sequences", "timeout_ms", "user", "was_aborted",
    )  # fmt: skip

    def __init__(
        self, producer_id: int, producer_epoch: int, owner: int, timeout_ms: int, user: str = ""
    ) -> None:
        """`user`: the user whose producer it is; "": the appliance has no users."""
        self.client_producer_id = self.producer_id = producer_id
        self.client_epoch = self.producer_epoch = producer_epoch
        """`client_producer_id`, `client_epoch`: what the client knows."""
        self.owner = owner
        self.timeout_ms = timeout_ms
        self.user = user
        self.is_version_2 = False
        self.has_batches = False
        self.was_aborted = False
        """The appliance has aborted the transaction; the client has yet to hear it."""
        self.sequences: dict[Partition, int] = {}
        """The client's sequence of the first batch of this transaction, by partition."""
        self.following: dict[Partition, int] = {}
        """The client's next sequence, by partition; of version 1."""
        self.is_partial = False
        """True if the next sequence of partitions outside `following` is unknown; else 0."""
        self.is_recovered = False
        """The transaction may have begun in an earlier process: see `restore`."""
        self.offsets = TransactionOffsets()
        """Those that the coordinator has acknowledged."""
        self.is_staging = False
        """The coordinator is being asked to keep more offsets."""
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
        self.following, self.is_partial = self._certain()
        self.is_recovered = False
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self.has_batches = self.was_aborted = self.is_incomplete = False
        self.sequences.clear()
        self.offsets.clear()
        if self.is_version_2:
            self.following, self.is_partial = {}, False
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

    # ---- what a restart of the gateway leaves ----------------------------------------------------

    def staged_text(self, offsets: TransactionOffsets) -> str:
        """The text that the coordinator keeps with this transaction: these offsets, and of version
        1 what the client knew when it began.
        """
        following = {} if self.is_version_2 else {**self.following, **self.sequences}
        return self._text(offsets.dump(), following, self.is_partial)

    def following_text(self) -> str:
        """The text for the next transaction."""
        return "" if self.is_version_2 else self._text([], *self._certain())

    def _text(self, offsets: list[Any], following: dict[Partition, int], is_partial: bool) -> str:
        places = [[topic.hex(), at, sequence] for (topic, at), sequence in following.items()]
        text = plain_json(
            [offsets, self.client_producer_id, self.client_epoch, places, is_partial]
        )  # fmt: skip
        return text if len(text) <= STAGED_MAX else TOO_MUCH

    def _certain(self) -> tuple[dict[Partition, int], bool]:
        """The sequences that follow this transaction, and whether those of other partitions are
        unknown: an earlier process may have had batches of them.
        """
        if not self.is_recovered:
            return self.following, self.is_partial
        seen = {place: at for place, at in self.following.items() if place in self.sequences}
        return seen, True

    def restore(self, text: str, identity: tuple[int, int]) -> bool:
        """Take up what an earlier process has left. False: `identity` is another owner's.

        The transaction counts as one with batches. Nobody can say that it has none: workers report
        an open transaction to the coordinator only when it is some time old.
        """
        self.is_recovered = self.has_batches = True
        if text == TOO_MUCH:
            self.is_incomplete = self.is_partial = True
        elif text:
            try:
                self._take_up(text)
            except (ValueError, TypeError, LookupError):  # another client has left it
                self.offsets.clear()
                self.is_incomplete = self.is_partial = True
        return identity == (self.client_producer_id, self.client_epoch)

    def _take_up(self, text: str) -> None:
        """Raises ValueError, TypeError or LookupError for a text that is not of `staged_text`."""
        offsets, client_producer_id, client_epoch, places, is_partial = orjson.loads(text)
        following = {(bytes.fromhex(topic), at): sequence for topic, at, sequence in places}
        self.offsets.restore(offsets)
        self.client_producer_id, self.client_epoch = client_producer_id, client_epoch
        self.following, self.is_partial = following, is_partial

    # ---- batches ---------------------------------------------------------------------------------

    def translate(
        self, partition: Partition, records: Readable, is_decided: Callable[[], bool]
    ) -> bytes | memoryview | bytearray:
        """Write the producer id, epoch and sequences of the appliance into record batches. Batches
        that are malformed, or of another producer, stay as they are, and are refused as such.
        `is_decided`: True if the partition's log has nothing of an open transaction, so none of
        these batches has been acknowledged. Raises UnknownSequenceError.
        """
        self.has_batches = True
        if self.is_version_2:
            self.sequences[partition] = 0
        if self.is_version_2 and (self.client_producer_id, self.client_epoch) == (
            self.producer_id, self.producer_epoch,
        ):  # fmt: skip
            return records
        if self.is_recovered and self.is_partial and partition not in self.following:
            if not is_decided():
                raise UnknownSequenceError
            if len(records) >= layout.HEADER_BYTES:
                self.following[partition] = layout.read_kafka_header(records, 0).base_sequence
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
        first = header.base_sequence
        if self.is_recovered:  # it may be any batch of the transaction, sent again
            first = self.following.get(partition, 0)
        first = self.sequences.setdefault(partition, first)
        following = (header.base_sequence + header.record_count) % SEQUENCE_MODULUS
        known = self.following.get(partition, 0)
        if (following - known) % SEQUENCE_MODULUS < SEQUENCE_MODULUS // 2:
            self.following[partition] = following
        return header._replace(
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            base_sequence=(header.base_sequence - first) % SEQUENCE_MODULUS,
        )


class TransactionalProducers:
    """The transactional ids whose producers use this gateway, by name."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, TransactionalProducer] = OrderedDict()
        self._left: dict[str, TransactionalProducer] = {}
        """Those with offsets of an earlier process, of which nothing was heard since."""
        self._pending: dict[str, TransactionalProducer] = {}
        """Those of `_known` that have offsets, or had some at the last question."""
        self.knows_left = False

    def get(self, transactional_id: str) -> TransactionalProducer | None:
        """The producer of an id; None: this gateway does not know it."""
        found = self._known.get(transactional_id)
        if found is not None:
            self._known.move_to_end(transactional_id)
        return found

    def put(self, transactional_id: str, producer: TransactionalProducer) -> None:
        """Remember the owner of an id."""
        self._left.pop(transactional_id, None)
        self._pending.pop(transactional_id, None)
        self._known[transactional_id] = producer
        self._known.move_to_end(transactional_id)
        self.note_offsets(transactional_id)
        if len(self._known) > PRODUCERS_MAX:
            idle = next(
                (name for name, one in self._known.items() if not one.is_busy),
                next(iter(self._known)),
            )
            del self._known[idle]
            self._pending.pop(idle, None)

    def note_offsets(self, transactional_id: str) -> None:
        """Note that an id may have got offsets."""
        found = self._known.get(transactional_id)
        if found is not None and found.offsets:
            self._pending[transactional_id] = found

    def leave(self, transactional_id: str, producer: TransactionalProducer) -> None:
        """Note the offsets that an earlier process has left."""
        if producer.offsets and transactional_id not in self._known:
            self._left[transactional_id] = producer

    def recover(self, transactional_id: str, producer: TransactionalProducer) -> None:
        """Remember an owner that was restored. What other consumers were told of its offsets
        meanwhile holds: those that were given up are not committed.
        """
        left = self._left.get(transactional_id)
        self.put(transactional_id, producer)
        transaction = producer.producer_id, producer.producer_epoch
        if left is not None and transaction == (left.producer_id, left.producer_epoch):
            producer.offsets_until_ns = left.offsets_until_ns
            if left.is_incomplete:
                producer.offsets.clear()
                producer.is_incomplete = True

    def pending_offsets(self, group: str, now_ns: int) -> set[tuple[str, int]]:
        """The (topic, partition)s of a group whose offsets wait for a transaction's end."""
        found: set[tuple[str, int]] = set()
        for producer in (*self._pending.values(), *self._left.values()):
            producer.drop_late_offsets(now_ns)
            found |= producer.offsets.places(group)
        for name in [name for name, producer in self._pending.items() if not producer.offsets]:
            del self._pending[name]
        return found
