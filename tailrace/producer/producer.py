"""The producer: takes records, and returns futures of their acknowledgements.

Records in batches belong to the sender (`tailrace.producer.sending.sender_thread`).

Invariants:
- Every record is completed exactly once: it is delivered, or its future has an error.
- Records of a partition keep the order of their `send` calls.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from tailrace.client.config.from_context import FromContext
from tailrace.client.config.kafka_names import RenamedProducerMethods
from tailrace.client.config.setting_fields import build, documented, merged
from tailrace.client.config.settings import ProducerOptions, ProducerSettings
from tailrace.client.connections.runtime import SYSTEM, Runtime
from tailrace.client.connections.steps import Steps, call_json, operation, run, steps_of
from tailrace.client.records.attached_records import AttachesRecords
from tailrace.client.records.delay_changes import cancels_of, reschedules_of, without_ids
from tailrace.client.records.partitioners import DefaultPartitioner, chosen_by
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.client.tracing.setting import spans_of
from tailrace.core import fork
from tailrace.core.errors import InvalidTransactionError, RequestTimeoutError, TailraceError
from tailrace.core.records import ConsumerGroupMetadata, Headers, OffsetAndMetadata, Record
from tailrace.core.schedule.recurrence import Recurrence
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.transaction_branches import (
    FinishedBranch,
    PreparedTransaction,
    TransactionBranch,
)
from tailrace.core.validation import name_of, timeout_s_of
from tailrace.kernel import FastPathSender, fast_send
from tailrace.producer.batches.producer_batch import OnDelivery, ProducerBatch
from tailrace.producer.frame_appender import FrameAppender
from tailrace.producer.futures import FrameFuture, RecordFuture
from tailrace.producer.record_appender import Outgoing, RecordAppender, takes_fast_path
from tailrace.producer.record_validation import Delay
from tailrace.producer.routes import ProducerMetadata
from tailrace.producer.sending.producer_id import MakeIdentity
from tailrace.producer.sending.sender_thread import SenderThread
from tailrace.producer.transactions.block import TransactionBlock
from tailrace.producer.transactions.branches.identity import BranchIdentity
from tailrace.producer.transactions.branches.state import BranchState
from tailrace.producer.transactions.branches.writer import BranchWriter
from tailrace.producer.transactions.identity import TransactionalIdentity
from tailrace.producer.transactions.state import TransactionState
from tailrace.producer.transactions.two_phase import TwoPhaseTransactions
from tailrace.protocol.frame import Api

if TYPE_CHECKING:
    from tailrace.batch.frames import Frame
    from tailrace.client.tracing.send_spans import SendSpans
    from tailrace.client.tracing.spans import Spans

T = TypeVar("T")
EXIT_TIMEOUT_S = 30.0
FAILED_BLOCK_TIMEOUT_S = 5.0
"""Timeout of `close` at the end of a `with` block that raised."""
CALLBACK_ROUNDS_MAX = 10
"""`close` delivers what callbacks send in answer to each other, so many times in a row."""
_live_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


@atexit.register
def close_at_exit() -> None:
    """Deliver what unclosed producers have sent, within EXIT_TIMEOUT_S for all together."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for producer in list(_live_producers):
        producer.close(timeout=max(0.0, deadline - time.monotonic()))


@documented(ProducerSettings)
class Producer(FastPathSender, FromContext, RenamedProducerMethods):
    """Sends records to topics. A context manager. Any number of threads may share one.

        with tailrace.Producer("tcp://127.0.0.1:7420") as producer:
            future = producer.send("orders", b"{...}", key=b"customer 7")
            future.result(timeout=5)             # RecordMetadata(topic, partition, offset, timestamp)
            producer.send_arrow("flights", frame)

        with tailrace.Producer("tcp://127.0.0.1:7420", transactional_id="billing") as producer:
            with producer.transaction():         # all of it is read, or nothing
                producer.send("orders", b"{...}")
                producer.send("ledger", b"{...}")

    `send` only adds the record to a batch. It returns a future, which can also be awaited. `flush`,
    `close` and the end of the `with` block wait until everything was acknowledged. Settings are
    keyword arguments, with Kafka's names. Every method of a closed producer raises
    ClientClosedError, except `close` and `metrics`.
    """  # noqa: E501

    def __init__(
        self,
        bootstrap: str | Sequence[str] | Mapping[str, Any] | None = None,
        *,
        runtime: Runtime = SYSTEM,
        **settings: Unpack[ProducerOptions],
    ) -> None:
        """`bootstrap`: the address, or a dict of settings with Kafka's names
        (`{"bootstrap.servers": "localhost:7420", "linger.ms": 5}`). It does not block: the first
        `send` waits for the appliance. `runtime`: the clock and the network, for tests. Raises
        InvalidSettingError.
        """
        first = (
            bootstrap
            if isinstance(bootstrap, Mapping) or bootstrap is None
            else {"bootstrap": bootstrap}
        )
        self.settings = build(ProducerSettings, merged(first, settings))
        spans = spans_of(self.settings)
        partitioner = chosen_by(self.settings.partitioner)
        transactional_id, branch = self.settings.transactional_id, self.settings.transaction_branch
        state = None if transactional_id is None else TransactionState(transactional_id)
        branch_state = None if branch is None else BranchState(branch)
        make_identity: MakeIdentity | None = None
        if state is not None:
            make_identity = partial(TransactionalIdentity, state, runtime.monotonic_ns)
        elif branch_state is not None:
            make_identity = partial(BranchIdentity, branch_state, runtime.monotonic_ns)
        self._sender_thread = SenderThread(
            self.settings, self._on_keyless_batch, runtime, make_identity
        )
        self._sender_thread.accumulator.notifies_every_batch = (
            isinstance(partitioner, DefaultPartitioner) and partitioner.notifies_every_batch
        )
        self._metadata = ProducerMetadata(
            self.settings,
            self._sender_thread,
            self._call,
            caches_partitions=takes_fast_path(self.settings),
            by_murmur2=type(partitioner) is DefaultPartitioner,
        )
        self._records = RecordAppender(
            self.settings, self._sender_thread, self._metadata, partitioner
        )
        self._transactions: TwoPhaseTransactions | None = None
        self._branch: BranchWriter | None = None
        self._begin_send, self._finish_send = self._records.begin, self._records.finish
        if state is not None:
            self._transactions = TwoPhaseTransactions(self.settings, self._sender_thread, state)
            self._begin_send = self._transactions.begin_send(self._records.begin)
        elif branch_state is not None:
            self._branch = BranchWriter(self._sender_thread, branch_state)
            self._begin_send = self._branch.begin_send(self._records.begin)
        self._send_spans: SendSpans | None = None
        if spans is not None:
            self._send_spans = self._make_send_spans(spans)
        self._frames = FrameAppender(
            self.settings, self._sender_thread, self._metadata, self._records
        )
        self._begin_fast_sends(self._metadata.known, self._sender_thread.lock)
        _live_producers.add(self)
        fork.add(self)

    def _make_send_spans(self, spans: Spans) -> SendSpans:
        from tailrace.client.tracing.send_spans import SendSpans

        made = SendSpans(spans)
        self._begin_send = made.begin_send(self._begin_send)
        self._finish_send = made.finish_send(self._finish_send)
        return made

    def after_fork(self) -> None:
        """Make every `send` raise ClientClosedError, in a child process."""
        self._metadata.forget_all()
        self._sender_thread.after_fork()

    # ---- sending ---------------------------------------------------------------------------------

    @fast_send(RecordFuture)
    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Headers = None,
        partition: int | None = None,
        timestamp: datetime | int | None = None,
        *,
        on_delivery: OnDelivery | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        repeat: Recurrence | None = None,
    ) -> RecordFuture:
        """Add one record to its partition's batch. The batch is sent when it is full, or
        `linger_ms` after its first record. Returns at once. If `buffer_memory` is full or the topic
        is not known yet, it waits for at most `max_block_ms`.

        `value` and `key` are bytes (text is taken as UTF-8), or what the serializers take. On a
        typed topic `value` is a dict of column -> value. `headers`: a list of (str, bytes).
        `partition`: a number. None chooses by the key, and the producer's choice for records
        without a key. `timestamp`: a datetime (UTC where it has no time zone) or int milliseconds
        since 1970, None for now. `on_delivery(metadata, error)` is called with the outcome, in the
        thread that finds it. On a topic with `delay.enabled`, `deliver_at` (a datetime with a time
        zone) or `deliver_after` delays the delivery, and `repeat` repeats it from then on. The
        metadata of a delayed record has a `delay_id` and no offset.

        Raises UnknownTopicError, PartitionOutOfRangeError, InvalidRecordError, SchemaMismatchError,
        RecordTooLargeError, DelayNotEnabledError, NotReachableError, and BufferExhaustedError when
        `buffer_memory` stayed full. The future has later errors.
        """
        begun = self._begin_send(
            topic,
            value,
            key,
            headers,
            partition,
            timestamp,
            on_delivery,
            deliver_at,
            deliver_after,
            repeat,
        )
        return self._run_steps(self._finish_send(begun)) if isinstance(begun, Outgoing) else begun

    @operation
    def send_arrow(
        self,
        topic: str,
        frame: Frame,
        *,
        key_column: str | None = None,
        partition: int | None = None,
        timestamp: datetime | int | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        delay_column: str | None = None,
    ) -> Steps[FrameFuture]:
        """Send the rows of a frame as columns. `frame`: a pyarrow Table or RecordBatch,
        a pandas or polars frame (a LazyFrame is collected), a duckdb relation, or anything else
        with `__arrow_c_stream__` or `__arrow_c_array__`.

        It must have the columns of the topic's schema. Types are cast where that is safe. On a
        topic of the default schema it has `value`, and may have `key`, `timestamp` and `headers`.
        Rows go to partitions by the hash of `key_column`, whose values are taken as text or bytes.
        Without that, all go to `partition`, or to one partition of the producer's choice. Their
        order is kept within each partition. `timestamp`: of rows without such a column.
        `deliver_at` or `deliver_after` delay all rows. `delay_column` names a column of timestamps
        or durations with each row's delay. The topic's schema does not have it.

        Each batch has at most 1 MiB (and no more than `max_request_size` and the topic's
        max.message.bytes), whatever `batch_size` says.

        Raises what `send` does, and SchemaMismatchError.
        """
        if self._transactions is not None:
            self._transactions.check_send()
        elif self._branch is not None:
            self._branch.check_send()
        delay = Delay(deliver_at, deliver_after, None)
        append = self._frames.append(
            topic, frame, key_column, partition, timestamp, delay, delay_column
        )
        if self._send_spans is not None:
            append = self._send_spans.send_arrow(topic, frame, append)
        return (yield from append)

    @operation
    def flush(self, timeout: float | None = None) -> Steps[None]:
        """Send everything now, and wait until every record sent before has an outcome. The records'
        futures have their errors. Raises RequestTimeoutError after `timeout` seconds (None: no
        limit but the records' delivery_timeout_ms).
        """
        timeout_s = timeout_s_of(timeout)
        sender_thread = self._sender_thread
        deadline_ns = None if timeout_s is None else sender_thread.now_ns() + int(timeout_s * 1e9)
        batches = sender_thread.do(self._close_batches)
        is_ended = yield from sender_thread.ended(batches, deadline_ns)
        if not is_ended:
            raise RequestTimeoutError(f"not everything was acknowledged within {timeout} s")
        yield from sender_thread.received(
            None if deadline_ns is None else max(0.0, (deadline_ns - sender_thread.now_ns()) / 1e9)
        )

    def _last_steps(self, timeout_s: float | None) -> Steps[None]:
        """Abort what is open, and deliver what was accepted, before `stop`.

        Records are refused from now on, so that no record is accepted without an outcome. Those of
        callbacks are taken: `flush`, and again while callbacks have sent more, CALLBACK_ROUNDS_MAX
        times at most.
        """
        sender_thread = self._sender_thread
        sender_thread.do(sender_thread.begin_closing)
        if self._transactions is not None:
            yield from self._transactions.abandon(timeout_s)
        deadline_ns = None if timeout_s is None else sender_thread.now_ns() + int(timeout_s * 1e9)
        for round_number in range(CALLBACK_ROUNDS_MAX + 1):
            if round_number == CALLBACK_ROUNDS_MAX:
                sender_thread.do(sender_thread.seal)
            yield from steps_of(Producer.flush)(
                self,
                None
                if deadline_ns is None
                else max(0.0, (deadline_ns - sender_thread.now_ns()) / 1e9),
            )
            yield from sender_thread.called_back(deadline_ns)
            if sender_thread.do(sender_thread.seal_if_done):
                return

    def _close_batches(self) -> list[ProducerBatch]:
        self._sender_thread.check_usable()
        batches = self._sender_thread.accumulator.incomplete()
        self._sender_thread.close_all()
        return batches

    # ---- transactions ----------------------------------------------------------------------------

    @operation
    def init_transactions(
        self, timeout: float | None = None, *, keep_prepared: bool = False
    ) -> Steps[PreparedTransaction | None]:
        """Become the owner of the transactional id: the producer that had it is fenced, and what it
        had open is aborted. Returns when readers of committed records see what it committed. The
        first `begin_transaction` does it too; a second call does nothing.

        A prepared transaction of the id is kept with `keep_prepared`, and returned: decide it with
        `complete_transaction`, `commit_transaction` or `abort_transaction`. Otherwise
        InvalidTransactionError is raised.

        Waits for at most `timeout` seconds (None: max_block_ms). Raises RequestTimeoutError,
        NotReachableError.
        """
        return (
            yield from self._transactional().initialize(
                timeout_s_of(timeout), keeps_prepared=bool(keep_prepared)
            )
        )

    @operation
    def begin_transaction(self) -> Steps[None]:
        """Open a transaction. Raises InvalidTransactionError if one is open, ProducerFencedError if
        another producer has taken over the transactional id; the first call raises what
        `init_transactions` does.
        """
        yield from self._transactional().begin()

    @operation
    def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        group_metadata: ConsumerGroupMetadata | str,
    ) -> Steps[None]:
        """Commit the offsets of a consumer group with the transaction, and only with it. `offsets`:
        for each partition the next offset to read, as `consumer.positions()` has them.
        `group_metadata`: `consumer.group_metadata()`, by which the commit is refused if the
        partitions have gone to another member. The consumer has enable_auto_commit=False.

        Returns at once: the offsets go with `commit_transaction`. Raises InvalidTransactionError,
        TransactionAbortedError, CommitFailedError, InvalidRequestError.
        """
        yield from self._transactional().send_offsets(offsets, group_metadata)

    @operation
    def send_acknowledgements_to_transaction(
        self,
        share_consumer: AttachesRecords,
        records: Record | Iterable[Record],
        outcome: str = "accept",
    ) -> Steps[None]:
        """Acknowledge records of a share consumer with the transaction, and only with it: "accept",
        or "release". The commit is refused if one of them is not locked by `share_consumer` any
        more. After an abort its next call releases them, unless they are passed to a transaction
        before. Until the transaction ends, `acknowledge` refuses them.

        Returns at once: the acknowledgements go with `commit_transaction`. Raises
        InvalidTransactionError, TransactionAbortedError, LockLostError, InvalidRequestError (also
        for "reject": send the dead letter in the transaction, and accept the record).
        """
        yield from self._transactional().send_acknowledgements(share_consumer, records, outcome)

    @operation
    def cancel_delays(
        self, delay_ids: str | Iterable[str], *, topic: str | None = None
    ) -> Steps[dict[str, TailraceError | None]]:
        """Cancel delayed records with the transaction, and only with it: a delay_id, or several.
        Until the commit they are pending, and listed. They are not delivered while the transaction
        is open, and at once if they fell due before an abort. Returns for each id None, or the
        error: UnknownDelayError after its delivery, another one while an open transaction has
        changed it. `topic`: ids of other topics are refused.

        Raises InvalidTransactionError, TransactionAbortedError, InvalidRequestError. After any
        other error, such as RequestTimeoutError, the transaction can only be aborted.
        """
        changes = cancels_of(delay_ids)
        return without_ids((yield from self._transactional().change_delays(changes, topic)))

    @operation
    def reschedule_delays(
        self, dues: Mapping[str, datetime], *, topic: str | None = None
    ) -> Steps[dict[str, str | TailraceError]]:
        """Change the due times of delayed records with the transaction: delay_id -> datetime with a
        time zone. Returns for each its new id, which is valid from the commit on, or the error. In
        all else like `cancel_delays`. Of several changes of a record the last counts.
        """
        changes = reschedules_of(dues)
        return (yield from self._transactional().change_delays(changes, topic))

    @operation
    def create_transaction_branches(self, count: int) -> Steps[list[TransactionBranch]]:
        """Make `count` branches of the open transaction, for producers of other processes:
        `Producer(address, transaction_branch=branch)` writes in this transaction. Each such
        producer has a branch of its own, also if several are given the same TransactionBranch: so
        a task that is repeated may use its branch again. `commit_transaction` names the finished
        branches that count, and all others are aborted with it.

        Raises InvalidTransactionError, TransactionAbortedError, ProducerFencedError,
        RequestTimeoutError, InvalidRequestError.
        """
        return (yield from self._transactional().create_branches(count))

    @operation
    def finish_branch(self, timeout: float | None = None) -> Steps[FinishedBranch]:
        """Send everything, wait for the acknowledgements, and finish this producer's branch: it
        takes no more records. The result is for the owner's `commit_transaction`, and can be
        pickled. Waits for at most `timeout` seconds (None: for the records' outcomes). A second
        call returns the same.

        Raises TransactionAbortedError if a record failed or the transaction has ended,
        ProducerFencedError if its owner was fenced, RequestTimeoutError (call it again), and
        InvalidTransactionError for a producer without `transaction_branch`.
        """
        self._sender_thread.check_usable()
        if self._branch is None:
            raise InvalidTransactionError(
                "this producer writes no branch: give it one, as in "
                "Producer(address, transaction_branch=branch)"
            )
        return (yield from self._branch.finish(timeout_s_of(timeout)))

    @operation
    def commit_transaction(
        self,
        timeout: float | None = None,
        *,
        branches: Iterable[FinishedBranch] | None = None,
    ) -> Steps[None]:
        """Send everything, wait for the acknowledgements, and commit the transaction: all its
        records and offsets, durably. Waits for at most `timeout` seconds (None: for the records'
        outcomes, and then max_block_ms). `branches`: the finished branches that are committed with
        it; other branches of it are aborted. A transaction with branches needs it, [] if none
        counts.

        Raises TransactionAbortedError if that cannot be: a record failed, the transaction was
        aborted by its timeout or an operator, or its offsets were refused. Then call
        `abort_transaction`, and repeat the transaction. Raises RequestTimeoutError while the
        outcome is not known: call it again, which finds it out and commits nothing twice. Raises
        ProducerFencedError if another producer has taken over the transactional id.
        """
        yield from self._transactional().commit(timeout_s_of(timeout), branches)

    @operation
    def prepare_transaction(
        self,
        tag: str = "",
        timeout: float | None = None,
        *,
        branches: Iterable[FinishedBranch] | None = None,
    ) -> Steps[PreparedTransaction]:
        """Send everything, wait for the acknowledgements, and prepare the transaction: it takes no
        more records, and waits for the decision of another system, durably, whatever restarts. Then
        call `commit_transaction` or `abort_transaction`, or have another producer of the id do it
        (`init_transactions(keep_prepared=True)`, `complete_transaction`), or decide it by its id
        (`Admin.commit_transaction`). Closing the producer leaves it prepared. `tag`: a text that
        lists and successors show. `branches`: as in `commit_transaction`, named now.

        Raises what `commit_transaction` does. After RequestTimeoutError call it again, with the
        same tag, or `abort_transaction`.
        """
        return (yield from self._transactional().prepare(tag, timeout_s_of(timeout), branches))

    @operation
    def complete_transaction(
        self, prepared: PreparedTransaction | None, timeout: float | None = None
    ) -> Steps[bool]:
        """Commit the prepared transaction of the id if it is `prepared`, otherwise abort it.
        `prepared`: what the other system has recorded as committed; None: nothing. True: `prepared`
        is committed, now or before. False: what was prepared is aborted, or nothing was prepared.

        Raises InvalidTransactionError if `prepared` is not prepared now, and was aborted or is not
        known any more.
        """
        return (yield from self._transactional().complete(prepared, timeout_s_of(timeout)))

    @operation
    def abort_transaction(self, timeout: float | None = None) -> Steps[None]:
        """Abort the open transaction: none of its records and offsets will be read as committed.
        Records without an acknowledgement fail with TransactionAbortedError. Waits for at most
        `timeout` seconds (None: max_block_ms).

        Raises RequestTimeoutError without an answer; call it again. Raises InvalidTransactionError
        while the outcome of a commit is not known, and ProducerFencedError.
        """
        yield from self._transactional().abort(timeout_s_of(timeout))

    def transaction(self) -> TransactionBlock:
        """A block that is one transaction: `with producer.transaction():` begins it, commits it at
        the end, and aborts it when the block raises. It raises what `begin_transaction` and
        `commit_transaction` do. After TransactionAbortedError it is aborted already. The finished
        branches that count are set within:
        `with producer.transaction() as transaction: transaction.branches = [...]`.
        """
        return TransactionBlock(self._transactional(), self._run_steps)

    def _transactional(self) -> TwoPhaseTransactions:
        self._sender_thread.check_usable()
        if self._branch is not None:
            raise InvalidTransactionError(
                "this producer writes a branch of another producer's transaction, which it can "
                "neither commit nor abort: call finish_branch(), and give the result to its owner"
            )
        if self._transactions is None:
            raise InvalidTransactionError(
                "this producer has no transactional_id: give it one, as in "
                'Producer(address, transactional_id="billing-1")'
            )
        return self._transactions

    # ---- metadata and the end --------------------------------------------------------------------

    @operation
    def partitions_for(self, topic: str) -> Steps[list[int]]:
        """The topic's partition numbers, ascending. Raises UnknownTopicError,
        InvalidRequestError.
        """
        self._sender_thread.check_usable()
        route = yield from self._metadata.of(name_of("topic", topic))
        return list(range(len(route.queues)))

    def metrics(self) -> dict[str, int]:
        """Counters since construction (records_sent, batches_sent, requests_sent, bytes_sent,
        retries, errors, epoch_bumps), and present values: buffered_bytes, batches_in_flight.
        """
        with self._sender_thread.lock:
            return self._sender_thread.metrics()

    def close(self, timeout: float | None = None) -> None:
        """Flush for at most `timeout` seconds (None: no limit but the records'
        delivery_timeout_ms), then end. Records without an outcome by then fail with
        ClientClosedError, which says if they may be stored. An open transaction is aborted. A
        second call does nothing.

        From its beginning on, `send` raises ClientClosedError in other threads, and nothing of it
        is stored. Callbacks may send.
        """
        timeout_s = timeout_s_of(timeout)
        if self._sender_thread.is_stopped or self._sender_thread.forked:
            return
        try:
            self._run_steps(self._last_steps(timeout_s))
        except TailraceError:
            pass  # `stop` fails the records that were not delivered
        finally:
            self._sender_thread.stop()

    def __enter__(self) -> Self:
        self._sender_thread.check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # After an exception a long wait has no use. Sent records may still arrive.
        self.close(timeout=None if kind is None else FAILED_BLOCK_TIMEOUT_S)

    def _run_steps(self, steps: Steps[T], /) -> T:
        try:
            result = run(steps, self._sender_thread.sleep_until)
        finally:
            self._sender_thread.end_wait()
        self._sender_thread.make_callbacks()
        return result

    def _call(
        self, api: Api, request: dict[str, Any], start_ns: int | None
    ) -> Steps[dict[str, Any]]:
        """Make a request about topics, with the timeout max_block_ms since `start_ns`."""
        sender_thread = self._sender_thread
        return call_json(
            sender_thread.connection,
            api,
            request,
            self.settings.max_block_ms,
            start_ns=start_ns,
            guard=sender_thread.use_connection,
        )

    def _on_keyless_batch(self, info: TopicInfo) -> None:
        """Let the partitioner choose another partition for records without a key."""
        partitioner = self._records.partitioner
        if isinstance(partitioner, DefaultPartitioner):
            name = info.delay_of or info.name
            self._metadata.forget_keyless(name)
            partitioner.on_batch_sent(name, len(info.partitions))
