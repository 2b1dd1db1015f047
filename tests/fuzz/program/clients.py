"""The clients of a fuzzed program: what they have in common, and its producers. Each operation is a
public call.

Owner: one ProgramRun (`tests.fuzz.program.run`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from tailrace import Producer
from tailrace.aio import AsyncProducer
from tailrace.core.errors import (
    ClientClosedError,
    DeliveryTimeoutError,
    TailraceError,
)
from tests.fuzz.program.calls import CUT_OFF, Fuse, Planted
from tests.fuzz.program.model import Finding
from tests.fuzz.program.operations import Operation
from tests.fuzz.program.world import Sent, World

KINDS: dict[str, Any] = {"Producer": Producer, "AsyncProducer": AsyncProducer}
DELIVERY_TIMEOUT_MS = 60_000
DELIVERY_TIMEOUT_OF_DELETED_MS = 4_000
NOTHING: Any = object()
"""The result of a call that was cut off, or that an error has ended."""
LOOPED: Any = object()
"""The result of a loop."""


class BodyError(Planted):
    """Raised by the body of a loop."""


class Client:
    """Common part of all clients of a program."""

    def __init__(self, run: World, slot: str, kind: str) -> None:
        self.run = run
        self.slot = slot
        self.is_async = kind.startswith("Async")
        self.client: Any = None
        self.is_open = True
        self.was_cut_off = False
        """The last call was ended by a signal, a cancellation, or an exception of the program."""
        self.error: Exception | None = None
        """The error of the last call."""

    def make(
        self, operation: Operation, call: Callable[[], Any], *, patience_s: float | None = None
    ) -> Any:
        """Make a call. NOTHING where it was cut off, or has ended by an error that may be."""
        calls = self.run.calls
        calls.is_async = self.is_async
        self.was_cut_off, self.error = False, None
        try:
            return calls.make(operation, call, patience_s=patience_s)
        except CUT_OFF:
            self.was_cut_off = True
        except Planted as error:
            self.error = error
        except TailraceError as error:
            self.error = error
            if not self.allows(error):
                raise Finding(f"{operation} raises {type(error).__name__}: {error}") from error
        return NOTHING

    def allows(self, error: TailraceError) -> bool:
        """True for what the world's faults explain."""
        return self.run.allows(error)

    def step(self, operation: Operation) -> None:
        """Carry out an operation."""
        getattr(self, operation.name)(operation, *operation.arguments)


# ---- producers -----------------------------------------------------------------------------------


_lives = itertools.count()


async def _awaited(handle: Any) -> Any:
    return await handle


class ProducerClient(Client):
    """A producer."""

    def __init__(self, run: World, slot: str, kind: str, settings: dict[str, Any]) -> None:
        super().__init__(run, slot, kind)
        self._life = f"{slot}.{next(_lives)}"
        self._numbers = itertools.count()
        self._callback = Fuse()
        self._is_durable = settings["acks"] == "all"
        timeout_ms = DELIVERY_TIMEOUT_OF_DELETED_MS if run.has_deletions else DELIVERY_TIMEOUT_MS
        self.client = KINDS[kind](
            run.address, delivery_timeout_ms=timeout_ms, max_block_ms=timeout_ms, **settings
        )
        self._waiting: list[Sent] = []

    def _delivered(self, _metadata: Any, _error: Any) -> None:
        self._callback.burn()

    def send(
        self,
        operation: Operation,
        topic: str,
        partition: int | None,
        key: str | None,
        count: int,
        size: int,
    ) -> None:
        """Send records."""
        if partition is not None and partition >= self.run.partitions[topic]:
            partition = 0
        for _ in range(count):
            number = next(self._numbers)
            value = f"{self._life}-{number}-".encode().ljust(size, b".")
            creation = len(self.run.topics.creations[topic])
            sent = Sent(
                value, self._life, number, topic, partition, key, creation,
                is_durable=self._is_durable,
            )  # fmt: skip
            self.run.sent[value] = sent
            handle = self.make(operation, partial(self._send, sent))
            if handle is not NOTHING:
                sent.handle = handle
                self._waiting.append(sent)
            elif self.is_async and self.was_cut_off:
                sent.is_withdrawn = True

    def _send(self, sent: Sent) -> Any:
        return self.client.send(
            self.run.name(sent.topic),
            sent.value,
            sent.key and sent.key.encode(),
            partition=sent.partition,
            on_delivery=self._delivered,
        )

    def allows(self, error: TailraceError) -> bool:
        if self.is_async and self.run.has_deletions and isinstance(error, DeliveryTimeoutError):
            return True  # the event loop stands still while other clients make their calls
        return super().allows(error) or (isinstance(error, ClientClosedError) and not self.is_open)

    def fail_callback(self, _operation: Operation, count: int = 2) -> None:
        """Have on_delivery raise."""
        self._callback.arm(count, is_end=False)

    def wait(self, operation: Operation) -> None:
        """Wait for the records that were sent."""
        while self._waiting:
            sent = self._waiting[0]
            metadata = self.make(operation, partial(self._outcome, sent))
            if self.was_cut_off:
                return
            self._waiting.pop(0)
            if metadata is not NOTHING:
                sent.place = metadata.partition, metadata.offset

    def _outcome(self, sent: Sent) -> Any:
        return _awaited(sent.handle) if self.is_async else sent.handle.result(None)

    def flush(self, operation: Operation) -> None:
        """Send everything."""
        self.make(operation, self.client.flush)

    def close(self, operation: Operation, _how: str = "") -> None:
        """Close, and look at what became of each record."""
        for _ in range(3):
            if self.make(operation, self.client.close) is not NOTHING:
                break
            operation = Operation(operation.slot, operation.name)
        self.is_open = False
        self.wait(Operation(operation.slot, "wait"))
