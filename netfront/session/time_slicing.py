"""Time slicing: runs long requests in short slices, sessions in turn, so that none blocks the loop.

A task is a generator that yields its cost since the last yield, in units. One unit is about the
cost of checking one partition (2 to 4 us). A small request runs at once. If that is not enough, it
starts again when its session's turn comes.

Owner: one front.

Invariants:
- One loop step spends at most UNITS_PER_STEP and a single yield of one task more.
- At most STARTED_MAX tasks hold partial responses, one for each session.
- Waiting tasks hold only their requests' bytes, bounded for each session and in all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from netfront.session.sessions import Session
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import WireError

UNITS_PER_STEP = 1_024
UNITS_AT_ONCE = 128
"""Units of a request that is tried without waiting."""
UNITS_OF_A_FILE = 24
"""Cost of opening or searching a file."""
SMALL_BYTES = 16 << 10
STARTED_MAX = 8
SESSION_TASKS_MAX = 64
SESSION_BYTES_MAX = 4 << 20
TASKS_MAX = 4_096
BYTES_MAX = 64 << 20


@dataclass(slots=True)
class Task:
    """A request in progress. `on_error` answers it if the work fails."""

    session: Session
    size_bytes: int
    make: Callable[[], Iterator[int]]
    """Creates the work: once for the immediate try, and again if that was not enough."""
    on_error: Callable[[Exception], None]
    work: Iterator[int] = iter(())


class TimeSlicer:
    """All tasks of a front."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Task]] = {}
        """Tasks that are not started, by session number. Sessions are in the order of their turns.
        """
        self._queued_of: dict[int, tuple[int, int]] = {}
        """(Number of tasks, bytes of their requests) by session number."""
        self._started: deque[Task] = deque()
        self._count = 0
        self._bytes = 0
        self._units_left = UNITS_PER_STEP

    def __len__(self) -> int:
        return self._count

    @property
    def is_spent(self) -> bool:
        """True if this step's units are spent. No more requests are read in it."""
        return self._units_left <= 0

    def spend(self, units: int) -> None:
        """Count units of work done elsewhere in this step."""
        self._units_left -= units

    def begin(self, task: Task, *, try_now: bool) -> None:
        """Run a task at once, or queue it.

        Raises WireError at a limit. Errors of the work go to `on_error`.
        """
        number = task.session.number
        queued = self._queued_of.get(number)
        if try_now and queued is None and self._units_left > 0 and task.size_bytes <= SMALL_BYTES:
            task.work = task.make()
            if self._advance(task, min(UNITS_AT_ONCE, self._units_left)):
                return
        count, byte_count = queued or (0, 0)
        if count >= SESSION_TASKS_MAX or byte_count + task.size_bytes > SESSION_BYTES_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{count} long requests of this connection are in progress: wait for responses",
            )
        if self._count >= TASKS_MAX or self._bytes + task.size_bytes > BYTES_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{self._count} long requests of all connections are in progress: retry shortly",
            )
        task.work = task.make()
        self._count += 1
        self._bytes += task.size_bytes
        self._queued_of[number] = count + 1, byte_count + task.size_bytes
        self._waiting.setdefault(number, deque()).append(task)

    def step(self) -> int:
        """Run this step's slice and start the next step's account.

        Return the number of tasks that moved.
        """
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
            elif task.session.number in self._queued_of:
                self._started.append(task)
        self._units_left = UNITS_PER_STEP
        return moved

    def forget_session(self, session: Session) -> None:
        """Remove the tasks of a session that has ended."""
        queued = self._queued_of.pop(session.number, None)
        if queued is not None:
            self._count -= queued[0]
            self._bytes -= queued[1]
            self._waiting.pop(session.number, None)
            self._started = deque(task for task in self._started if task.session is not session)

    def _next(self) -> Task | None:
        """Return the next task. A waiting one is started while fewer than STARTED_MAX are, if its
        session has none started.
        """
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
        """Spend about `units` on a task. Return True if it is done, or failed and was answered."""
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
        queued = self._queued_of.get(task.session.number)
        if queued is None:
            return  # its session has ended meanwhile
        self._count -= 1
        self._bytes -= task.size_bytes
        if queued[0] > 1:
            self._queued_of[task.session.number] = queued[0] - 1, queued[1] - task.size_bytes
        else:
            del self._queued_of[task.session.number]
