"""Long work for one request in short slices, sessions in turn, so that no request holds the loop.

A task is a generator that yields what it has cost since it last did, in units: one unit is about what looking at one partition takes (2 to 4 us). What is
small is done at once; what is not begins anew when its session's turn comes.

Owner: one front. Invariants: in one turn of the loop no more than UNITS_PER_STEP and one task's single yield are spent; at most STARTED_MAX tasks hold
    half-made answers, one of each session; waiting tasks hold their requests' bytes only, and are bounded for each session and in all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from netfront.sessions import Session
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import WireError

UNITS_PER_STEP = 1_024
UNITS_AT_ONCE = 128
"""Of a request that is tried without waiting."""
UNITS_OF_A_FILE = 24
"""What opening or searching a file costs."""
SMALL_BYTES = 16 << 10
STARTED_MAX = 8
SESSION_TASKS_MAX = 64
SESSION_BYTES_MAX = 4 << 20
TASKS_MAX = 4_096
BYTES_MAX = 64 << 20


@dataclass(slots=True)
class Task:
    """A request that is being worked on. `on_error` answers it when the work fails."""

    session: Session
    size_bytes: int
    make: Callable[[], Iterator[int]]
    """Makes the work: once to try it at once, and again if that was not enough."""
    on_error: Callable[[Exception], None]
    work: Iterator[int] = iter(())


class Slices:
    """Every task of a front."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Task]] = {}
        """Session number -> tasks of it that are not started; sessions in the order of their turns."""
        self._held: dict[int, tuple[int, int]] = {}
        """Session number -> (how many tasks it has here, the bytes of their requests)."""
        self._started: deque[Task] = deque()
        self._count = 0
        self._bytes = 0
        self._units_left = UNITS_PER_STEP

    def __len__(self) -> int:
        return self._count

    @property
    def is_spent(self) -> bool:
        """Whether this turn's units are gone: read no more requests in it."""
        return self._units_left <= 0

    def spend(self, units: int) -> None:
        """Work of this turn that was done elsewhere."""
        self._units_left -= units

    def begin(self, task: Task, *, try_now: bool) -> None:
        """Do it now, or in turns. Raises WireError when too much is waiting; what the work itself raises goes to `on_error`."""
        number = task.session.number
        held = self._held.get(number)
        if try_now and held is None and self._units_left > 0 and task.size_bytes <= SMALL_BYTES:
            task.work = task.make()
            if self._advance(task, min(UNITS_AT_ONCE, self._units_left)):
                return
        count, byte_count = held or (0, 0)
        if count >= SESSION_TASKS_MAX or byte_count + task.size_bytes > SESSION_BYTES_MAX:
            raise WireError(ErrorCode.TOO_MANY_REQUESTS, f"{count} long requests of this connection are under way; wait for some answers")
        if self._count >= TASKS_MAX or self._bytes + task.size_bytes > BYTES_MAX:
            raise WireError(ErrorCode.TOO_MANY_REQUESTS, f"{self._count} long requests of all connections are under way; ask again shortly")
        task.work = task.make()
        self._count += 1
        self._bytes += task.size_bytes
        self._held[number] = count + 1, byte_count + task.size_bytes
        self._waiting.setdefault(number, deque()).append(task)

    def step(self) -> int:
        """This turn's slice; returns how many tasks moved. Begins the next turn's account."""
        moved = 0
        units, self._units_left = self._units_left, UNITS_PER_STEP
        if not self._count:
            return 0
        units = max(units, UNITS_PER_STEP // 4)
        while units > 0 and (task := self._next()) is not None:
            moved += 1
            before = self._units_left
            is_done = self._advance(task, min(units, UNITS_PER_STEP // STARTED_MAX))
            units -= before - self._units_left
            if is_done:
                self._end(task)
            elif task.session.number in self._held:
                self._started.append(task)
        self._units_left = UNITS_PER_STEP
        return moved

    def forget_session(self, session: Session) -> None:
        """The client is gone."""
        held = self._held.pop(session.number, None)
        if held is not None:
            self._count -= held[0]
            self._bytes -= held[1]
            self._waiting.pop(session.number, None)
            self._started = deque(task for task in self._started if task.session is not session)

    def _next(self) -> Task | None:
        """The task whose turn it is: one that waits is started while fewer than STARTED_MAX are, of a session that has none."""
        if self._waiting and len(self._started) < STARTED_MAX:
            busy = {task.session.number for task in self._started}
            number = next((number for number in self._waiting if number not in busy), None)
            if number is not None:
                tasks = self._waiting.pop(number)
                task = tasks.popleft()
                if tasks:
                    self._waiting[number] = tasks  # behind the others
                return task
        return self._started.popleft() if self._started else None

    def _advance(self, task: Task, units: int) -> bool:
        """Spend about `units` on it. True: it is done, or has failed and was answered."""
        try:
            while units > 0:
                cost = next(task.work)
                units -= cost
                self._units_left -= cost
        except StopIteration:
            return True
        except Exception as error:
            task.on_error(error)
            return True
        return False

    def _end(self, task: Task) -> None:
        held = self._held.get(task.session.number)
        if held is None:
            return  # its session ended while it was at work
        self._count -= 1
        self._bytes -= task.size_bytes
        if held[0] > 1:
            self._held[task.session.number] = held[0] - 1, held[1] - task.size_bytes
        else:
            del self._held[task.session.number]
