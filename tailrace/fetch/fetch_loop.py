"""Reading the assigned partitions: where each begins, what is asked for, and waiting until one of them has something.

Owner: one Consumer, one thread.
Invariants: partitions take turns, batch by batch; an error of a partition is raised only when nothing that came before it is left to hand out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tailrace.connection import Connection
from tailrace.errors import CorruptBatchError, InvalidRequestError, OffsetOutOfRangeError, UnknownTopicError
from tailrace.fetcher import Fetcher, PartitionCursor, corrupt_error
from tailrace.held_back import HeldBack
from tailrace.offset_lookup import At
from tailrace.records import TopicPartition
from tailrace.settings import ConsumerSettings


class Reading:
    """See the module's docstring."""

    def __init__(
        self,
        connection: Connection,
        settings: ConsumerSettings,
        now_ns: Callable[[], int],
        offsets: Callable[[Iterable[TopicPartition], At], dict[TopicPartition, int]],
        unread: Callable[[TopicPartition], int | None],
    ) -> None:
        """`offsets`: asks the appliance for an offset of each of some partitions. `unread`: the first of a partition that was taken and not handed out."""
        self._connection = connection
        self._settings = settings
        self._now_ns = now_ns
        self._offsets = offsets
        self.fetcher = Fetcher(connection, settings, now_ns)
        self._cursors: dict[TopicPartition, PartitionCursor] = {}
        self._held_back = HeldBack(offsets, unread, now_ns)
        self.topics_may_go = False
        """Whether a topic that is not there (any more) is no error: the group will say what is to be read."""
        self.wake_fd = -1
        """Readable when whoever waits for records is to look at something else first; -1: never."""
        self._turn = 0

    @property
    def cursors(self) -> dict[TopicPartition, PartitionCursor]:
        """One of each assigned partition; an assignment puts another dict there."""
        return self._cursors

    @cursors.setter
    def cursors(self, cursors: dict[TopicPartition, PartitionCursor]) -> None:
        self._cursors = cursors
        self._held_back.arm(cursors)

    def sought(self) -> None:
        """A cursor was moved by its user: what comes after it in the order of keys waits anew."""
        self._held_back.sought()

    def ask_ahead(self) -> None:
        """Take in what has come and ask for more: the next answer comes while the caller works on what it has."""
        self._connection.process()
        self.fetcher.begin(self._cursors.values())

    def decide_positions(self, cursors: Iterable[PartitionCursor]) -> None:
        """Give every cursor without a position one, as auto_offset_reset says."""
        undecided = {
            cursor.key: cursor for cursor in cursors if cursor.position is None and cursor.error is None and not cursor.from_committed
        }
        from_beginning = [key for key, cursor in undecided.items() if cursor.begins_at_earliest]
        if from_beginning:
            for key, offset in self._offsets(from_beginning, "earliest").items():
                undecided.pop(key).seek(offset)
        if not undecided:
            return
        reset = self._settings.auto_offset_reset
        if reset == "none":
            for cursor in undecided.values():
                cursor.error = OffsetOutOfRangeError(
                    f"{cursor.key.topic}-{cursor.key.partition} has no position and auto_offset_reset is none; seek first"
                )
            return
        try:
            offsets = self._offsets(undecided, reset)
        except UnknownTopicError:
            if not self.topics_may_go:
                raise
            return
        for key, offset in offsets.items():
            undecided[key].seek(offset)

    def step(self, fetcher: Fetcher, cursors: Iterable[PartitionCursor], deadline_ns: int) -> None:
        """Ask for more, take in what came, wait for something until `deadline_ns`."""
        connection = self._connection
        connection.process()
        fetcher.begin(cursors)
        connection.process()
        now_ns = self._now_ns()
        connection.tick(now_ns)
        connection.check_reachable(now_ns)
        if any(cursor.buffered or cursor.error is not None for cursor in cursors if not cursor.is_paused):
            return
        tick_ns = connection.next_tick_ns()
        wait_ns = min(deadline_ns, tick_ns if tick_ns is not None else deadline_ns) - now_ns
        if cursors and not fetcher.is_waiting and connection.is_ready:
            wait_ns = min(wait_ns, 10_000_000)
        if wait_ns > 0:
            connection.wait(wait_ns, self.wake_fd)
            connection.process()

    def advance(self, deadline_ns: int | None) -> bool:
        """Until something can be handed out, or the time is up. Raises the error of a partition that has nothing left before it."""
        if not self.cursors:
            raise InvalidRequestError("nothing is assigned: name topics at construction, or call assign()")
        return self.look(deadline_ns, None)

    def look(self, deadline_ns: int | None, is_interrupted: Callable[[], bool] | None) -> bool:
        """`advance`, also without any partition; it ends when `is_interrupted`, too."""
        while True:
            cursors = list(self.cursors.values())
            self.decide_positions(cursors)
            self._held_back.look()
            until_ns = deadline_ns if deadline_ns is not None else self._now_ns() + 1_000_000_000
            self.step(self.fetcher, cursors, until_ns)
            active = [cursor for cursor in cursors if not cursor.is_paused]
            if any(cursor.buffered for cursor in active):
                return True
            for cursor in active:
                if cursor.error is not None:
                    self.raise_or_reset(cursor)
            if deadline_ns is not None and self._now_ns() >= deadline_ns:
                return False
            if is_interrupted is not None and is_interrupted():
                return False

    def raise_or_reset(self, cursor: PartitionCursor) -> None:
        """Raise the cursor's error, once; or have its position decided anew, where auto_offset_reset allows it. A position behind damage is asked for."""
        error = cursor.error
        assert error is not None
        if isinstance(error, OffsetOutOfRangeError) and self._settings.auto_offset_reset != "none":
            cursor.seek(None)
            return
        cursor.error = None
        if isinstance(error, UnknownTopicError) and self.topics_may_go:
            return
        if isinstance(error, CorruptBatchError) and error.next_offset is None and error.first_offset is not None:
            behind = self._offsets([cursor.key], {"behind": error.first_offset})[cursor.key]
            raise corrupt_error(cursor.key, error.first_offset, behind, error.detail) from None
        raise error

    def next_cursor(self) -> PartitionCursor | None:
        """The cursor whose batch comes next: partitions take turns, batch by batch. None: nothing is buffered."""
        cursors = [cursor for cursor in self.cursors.values() if cursor.buffered and not cursor.is_paused]
        if not cursors:
            return None
        self._turn += 1
        return cursors[self._turn % len(cursors)]
