"""The share consumers of a fuzzed program, held against the model of their queue.

Owner: one ProgramRun (`tests.fuzz.program.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from tailrace import ShareConsumer
from tailrace.aio import AsyncShareConsumer
from tailrace.core.errors import InvalidRecordError, InvalidRequestError, TailraceError
from tests.fuzz.program.calls import PATIENCE_S, Fuse
from tests.fuzz.program.clients import LOOPED, NOTHING, BodyError, Client
from tests.fuzz.program.loops import run_loop, run_loop_async
from tests.fuzz.program.model import Place, expect
from tests.fuzz.program.operations import Operation
from tests.fuzz.program.queue_model import QueueReader, Word
from tests.fuzz.program.world import World

KINDS: dict[str, Any] = {"ShareConsumer": ShareConsumer, "AsyncShareConsumer": AsyncShareConsumer}


class QueueClient(Client):
    """A share consumer."""

    def __init__(
        self,
        run: World,
        slot: str,
        kind: str,
        group: str,
        names: tuple[str, ...],
        settings: dict[str, Any],
        deserializes: bool,
    ) -> None:
        super().__init__(run, slot, kind)
        self._deserializer = Fuse()
        self._records: list[Any] = []
        self._is_subscribed = False
        self._names: set[str] = set()
        """The topics whose records may come."""
        self._place_in_loop: Place | None = None
        self._has_asked = False
        if deserializes:
            settings = {**settings, "value_deserializer": self._deserialize}
        is_implicit = settings["share_acknowledgement_mode"] == "implicit"
        self.model = QueueReader(slot, run.queue, is_implicit)
        self.client = KINDS[kind](
            bootstrap=run.address,
            group_id=run.name(group),
            auto_offset_reset="earliest",
            **settings,
        )
        self.subscribe(Operation(slot, "subscribe"), names)

    def _deserialize(self, value: bytes) -> bytes:
        self._deserializer.burn()
        return value

    def allows(self, error: TailraceError) -> bool:
        return (
            super().allows(error)
            or (isinstance(error, InvalidRequestError) and not self._is_subscribed)
            or (isinstance(error, InvalidRecordError) and self._deserializer.has_failed)
        )

    def _place(self, record: Any) -> Place:
        return record.topic_id, record.partition, record.offset

    def _take(self, records: list[Any], *, in_loop: bool) -> None:
        for record in records:
            key = self.run.short[str(record.topic)], record.partition
            self.run.see(key, record.topic_id, record.offset, record.value, self.slot)
            expect(key[0] in self._names, f"{self.slot}: {key[0]} is not subscribed")
            self.model.delivered(self._place(record), record.delivery_count, in_loop=in_loop)
        self._records = [*self._records, *records][-8:]

    def _read(
        self, operation: Operation, call: Callable[[], Any], *, patience_s: float | None = None
    ) -> Any:
        self._deserializer.has_failed = False
        found = self.make(operation, call, patience_s=patience_s)
        if isinstance(self.error, InvalidRecordError):
            error = self.error
            assert error.key is not None
            assert error.first_offset is not None
            ids = self.run.topics.creations[self.run.short[error.key.topic]]
            self.model.failed_on((ids[-1], error.key.partition, error.first_offset))
        return found

    def poll(self, operation: Operation, timeout_ms: int, count: int | None) -> None:
        """`poll`."""
        found = self._read(operation, lambda: self.client.poll(timeout_ms, count))
        if self.was_cut_off:
            self.model.may_have_asked()
            return
        self.model.asks()
        if found is not NOTHING:
            self._take(found, in_loop=False)

    # ---- loops ---------------------------------------------------------------------------------

    def loop(self, operation: Operation, count: int, body: str, end: str) -> None:
        """`for record in consumer`, left by `break` or by an exception of its body."""
        self._place_in_loop, self._has_asked = None, False
        call, turn = run_loop_async if self.is_async else run_loop, partial(self._turn, body)
        found = self._read(
            operation, lambda: call(self.client, count, end, turn), patience_s=PATIENCE_S
        )
        self._ends_loop(found, self._place_in_loop)

    def _ends_loop(self, found: Any, place: Place | None) -> None:
        is_left = found is LOOPED or isinstance(self.error, BodyError)
        if not is_left:
            self.model.may_have_asked()
        if place is not None and found is LOOPED:
            self.model.leaves_loop(place, by_break=True)
        elif place is not None and isinstance(self.error, BodyError):
            self.model.leaves_loop(place, by_break=False)
        elif place is not None:
            self.model.is_cut_off_in_loop(place)

    def _in_loop(self, record: Any) -> None:
        """The body begins: the loop was asked for this record."""
        if self._place_in_loop is not None:
            self.model.asks_on(self._place_in_loop)
        if not self._has_asked or Word.SILENT in self.model.words.values():
            self._has_asked = True
            self.model.asks()
        self._take([record], in_loop=True)
        self._place_in_loop = self._place(record)

    def _in_body(self, records: list[Any]) -> None:
        """A poll in the body of a loop has returned."""
        self.model.asks()
        self._take(records, in_loop=False)

    def _turn(self, body: str, record: Any) -> Generator[Any, Any, None]:
        self._in_loop(record)
        if body == "poll":
            self._in_body((yield self.client.poll(0, 2)))
        elif body == "commit":
            self.model.commits(is_certain=False)
            yield self.client.commit()
            self.model.commits(is_certain=True)

    # ---- acknowledging -------------------------------------------------------------------------

    def acknowledge(self, operation: Operation, number: int, outcome: str) -> None:
        """`acknowledge`, of a record that was read; perhaps of a topic that is deleted."""
        if not self._records:
            return
        record = self._records[number % len(self._records)]
        place = self._place(record)
        if place in self.model.said:
            return  # said again before it is sent, the last word counts: which is sent is not known
        is_held = place in self.model.words and self.run.is_current(place[0])
        try:
            found = self.make(operation, lambda: self.client.acknowledge(record, outcome))
        except AssertionError:
            if is_held and not self.run.queue.job(place).may_be_done:
                raise
            return
        if found is None and is_held:
            self.model.acknowledges(place, outcome)
        elif found is None:
            self.model.has_acknowledged = True
            others = [
                other
                for other in self.model.words
                if self.run.is_current(other[0])
                and other[1:] == place[1:]
                and self._is_of(other, record)
            ]
            expect(not others, f"{operation}: a deleted topic's record was said, {others} is meant")

    def _is_of(self, place: Place, record: Any) -> bool:
        return place[0] in self.run.topics.creations[self.run.short[str(record.topic)]]

    def commit(self, operation: Operation) -> None:
        """`commit`."""
        found = self.make(operation, self.client.commit)
        self.model.commits(is_certain=found is not NOTHING)

    # ---- the group -----------------------------------------------------------------------------

    def subscribe(self, operation: Operation, names: tuple[str, ...]) -> None:
        """`subscribe`."""
        topics = [self.run.name(name) for name in names]
        self._names.update(names)  # a call that fails has perhaps begun
        if self.make(operation, lambda: self.client.subscribe(topics)) is None:
            self._is_subscribed, self._names = True, set(names)

    def unsubscribe(self, operation: Operation) -> None:
        """`unsubscribe`: releases what is not accepted."""
        self.make(operation, self.client.unsubscribe)
        if self.was_cut_off:
            self.make(Operation(self.slot, "unsubscribe"), self.client.unsubscribe)
            self.run.queue.lost_sight()
        self._is_subscribed = False
        self.model.closed()

    def fail_deserializer(self, _operation: Operation, count: int, is_error: bool) -> None:
        """Have the deserializer raise."""
        self._deserializer.arm(count, is_end=not is_error)

    def close(self, operation: Operation, _how: str = "") -> None:
        """`close`: releases what is not accepted."""
        self.is_open = False
        self.make(operation, self.client.close)
        if self.was_cut_off:
            self.make(Operation(self.slot, "close"), self.client.close)
            self.was_cut_off = True
            self.run.queue.lost_sight()
        self.model.closed()
