"""A front in memory that keeps a log as a worker does: what it has by its sequence is answered as
before, what is out of order is refused.

Owner: one test.
Invariants: each partition's log has each (producer id, epoch, sequence) once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tailrace import Producer
from tailrace.client.connections.runtime import Runtime
from tailrace.core.error_codes import ErrorCode
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import Api, decode_request_header
from tests.conformance.interrupts import outside
from tests.kit.peers.scripted_front import MS, Asked, ScriptedFront, _Socket


class LoggingFront(ScriptedFront):
    """See the module's docstring. `is_holding`: answers to PRODUCE wait until `answer_all`.
    `batch_rows_max`: batches with more records are refused as too large.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.is_holding = False
        self.batch_rows_max: int | None = None
        self.logs: dict[int, list[bytes]] = {}
        self._known: dict[tuple[int, int, int, int], int] = {}
        """(partition, producer id, epoch, sequence) -> offset."""
        self._next: dict[tuple[int, int, int], int] = {}

    def take(self, socket: _Socket, frames: list[bytes]) -> None:
        with outside():
            self._take(socket, frames)

    def _take(self, socket: _Socket, frames: list[bytes]) -> None:
        if socket is not self._socket:
            return
        header = decode_request_header(frames[0])
        if header.api == Api.PING:
            self._reply(header.api, 1, header.correlation_id, ErrorCode.OK, b"")
            return
        super().take(socket, frames)
        if header.api != Api.PRODUCE:
            return
        body = memoryview(b"".join(frames[2:]))
        asked = Asked(header.version, header.correlation_id, frames[1:])
        results = []
        for batch in asked.batches:
            results.append(self._append(batch.partition, batch.header, body[: batch.byte_count]))
            body = body[batch.byte_count :]
        if asked.acks:
            self.asked[-1].results = results  # type: ignore[attr-defined]
            if not self.is_holding:
                self.answer_all()

    def _append(
        self, partition: int, header: Any, data: memoryview
    ) -> produce_messages.ProducedEntry:
        log = self.logs.setdefault(partition, [])
        identity = partition, header.producer_id, header.producer_epoch
        known = self._known.get((*identity, header.base_sequence))
        if header.producer_id >= 0 and known is not None:
            return produce_messages.ProducedEntry(0, 0, 0, known, 5)
        if header.producer_id >= 0 and header.base_sequence != self._next.get(identity, 0):
            return produce_messages.ProducedEntry(ErrorCode.OUT_OF_ORDER_SEQUENCE, 0, 0, -1, 5)
        if self.batch_rows_max is not None and header.record_count > self.batch_rows_max:
            return produce_messages.ProducedEntry(ErrorCode.RECORD_TOO_LARGE, 0, 0, -1, 5)
        offset = len(log)
        self._known[*identity, header.base_sequence] = offset
        self._next[identity] = header.base_sequence + header.record_count
        rows = pa.ipc.read_record_batch(
            pa.ipc.read_message(pa.py_buffer(bytes(data))), DEFAULT_SCHEMA
        )
        log += rows.column("value").to_pylist()
        return produce_messages.ProducedEntry(0, 0, 0, offset, 5)

    def answer_all(self) -> None:
        """Answer what waits for it, in order."""
        while self.asked:
            asked = self.asked.pop(0)
            results: list[produce_messages.ProducedEntry] = asked.results  # type: ignore[attr-defined]
            self._reply(
                Api.PRODUCE,
                2,
                asked.correlation_id,
                ErrorCode.OK,
                produce_messages.encode_produced_batches(results),
            )


class DrivenProducer:
    """A producer of one thread on a clock of the test's own: where it sleeps, time passes and the
    front answers.
    """

    def __init__(self, front: LoggingFront, **settings: Any) -> None:
        self.front = front
        self.now_ns = 1_000_000_000
        runtime = Runtime(
            lambda: self.now_ns,
            lambda _: front.connect(),
            self._sleep,
            lambda: 0.5,
            has_threads=False,
        )
        self.producer = Producer("tcp://127.0.0.1:1", runtime=runtime, **settings)

    def _sleep(self, _fds: Sequence[int], timeout_ns: int) -> None:
        self.now_ns += max(MS // 10, timeout_ns)
        with outside():
            self.front.answer_all()

    def turn(self, milliseconds: float = 0) -> None:
        """Time passes; what can be done then is done, as by the helper thread."""
        self.now_ns += int(milliseconds * MS)
        sender = self.producer._sender_thread
        with sender.lock:
            sender.run_once()
        sender.make_callbacks()
