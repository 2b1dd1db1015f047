"""The well-behaved client beside the fuzzer, in a process of its own: a record each few
milliseconds, read back, each once and in order.

Run as `python -P -m tests.fuzz.connections.witness ADDRESS TOPIC`; it prints `ready`, goes on until
its standard input ends, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from tailrace import Consumer, Producer
from tailrace.core.errors import TailraceError
from tailrace.core.records import RecordMetadata
from tests.kit.processes import HANG_LIMIT_S

PAUSE_S = 0.004
CATCH_UP_S = 60.0


class Witness:
    """See the module's docstring."""

    def __init__(self, address: str, topic: str) -> None:
        self._address = address
        self._topic = topic
        self._stop = threading.Event()
        self._is_sent = threading.Event()
        self._ack_ns: list[int] = []
        self._offsets: dict[int, int] = {}
        """Number -> offset that was acknowledged."""
        self._failures: list[str] = []
        self._sent = 0

    def _produce(self) -> None:
        with Producer(
            self._address, acks="all", delivery_timeout_ms=120_000, max_block_ms=120_000
        ) as producer:
            while not self._stop.is_set():
                number, started_ns = self._sent, time.monotonic_ns()

                def done(
                    metadata: RecordMetadata | None,
                    error: TailraceError | None,
                    number: int = number,
                    started_ns: int = started_ns,
                ) -> None:
                    if error is not None or metadata is None or metadata.offset is None:
                        self._failures.append(f"record {number} was not acknowledged: {error}")
                    else:
                        self._ack_ns.append(time.monotonic_ns() - started_ns)
                        self._offsets[number] = metadata.offset

                producer.send(self._topic, b"%d" % number, partition=0, on_delivery=done)
                self._sent += 1
                if number == 0:
                    producer.flush(HANG_LIMIT_S)
                    print("ready", flush=True)
                self._stop.wait(PAUSE_S)
            producer.flush(120)
        self._is_sent.set()

    def _consume(self) -> int:
        expected, deadline_s = 0, float("inf")
        with Consumer(
            self._topic, bootstrap=self._address, auto_offset_reset="earliest"
        ) as consumer:
            while time.monotonic() < deadline_s:
                if self._is_sent.is_set():
                    if expected > max(self._offsets, default=-1):
                        break
                    deadline_s = min(deadline_s, time.monotonic() + CATCH_UP_S)
                try:
                    records = consumer.poll(timeout_ms=100)
                except TailraceError as error:
                    if not error.retriable:
                        raise
                    continue
                for record in records:
                    if (
                        record.value != b"%d" % expected
                        or self._offsets.get(expected, record.offset) != record.offset
                    ):
                        self._failures.append(
                            f"offset {record.offset} holds {record.value!r} where {expected} "
                            "belongs"
                        )
                        expected = int(record.value or b"-1")
                    expected += 1
        if expected <= max(self._offsets, default=-1):
            self._failures.append(
                f"only {expected} of {len(self._offsets)} acknowledged records can be read"
            )
        return expected

    def run(self) -> dict[str, object]:
        found: list[int] = []

        def guarded(work: object) -> None:
            try:
                found.append(work() or 0)  # type: ignore[operator]
            except Exception as error:
                self._failures.append(f"{type(error).__name__}: {error}")
                self._is_sent.set()

        threads = [
            threading.Thread(target=guarded, args=(work,))
            for work in (self._produce, self._consume)
        ]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        self._stop.set()
        for thread in threads:
            thread.join()
        times = sorted(self._ack_ns) or [0]
        return {
            "sent": self._sent, "acknowledged": len(self._offsets), "read": max(found, default=0),
            "failures": self._failures[:10],
            "p50_ms": times[len(times) // 2] / 1e6, "p99_ms": times[len(times) * 99 // 100] / 1e6,
            "max_ms": times[-1] / 1e6,
        }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(Witness(sys.argv[1], sys.argv[2]).run()), flush=True)
