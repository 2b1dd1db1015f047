"""Password checks: argon2id in a thread of its own, for it takes tens of milliseconds.

Owner: one gateway. The thread starts with the first password.

Invariants:
- The loop never waits for a check.
- At most WAITING_MAX checks wait, WAITING_OF_HOST_MAX of them from one host. Others are refused.
- A password that was right is known by a keyed hash of it, as long as its user has it, so that a
  client that comes back needs no other check. A wrong one is always checked, and takes as long as
  that of an unknown user.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from queue import SimpleQueue

from netfront.kafka.exchange.waiter import Waiter
from shm.rights.passwords import is_password

logger = logging.getLogger(__name__)

WAITING_MAX = 256
WAITING_OF_HOST_MAX = 32
KNOWN_MAX = 10_000
Check = Callable[[str, str], bool]


class PasswordChecks:
    """Checks passwords beside the loop."""

    def __init__(self, ring: Callable[[], None], check: Check = is_password) -> None:
        """`ring` wakes the loop, which then calls `step`."""
        self._ring = ring
        self._check = check
        self._key = os.urandom(32)
        self._known: OrderedDict[str, bytes] = OrderedDict()
        """Keyed hash of the right password, by its argon2id hash."""
        self._waiting: Counter[str] = Counter()
        """Checks that wait, by host."""
        self._asked: SimpleQueue[tuple[Waiter, str, str, str]] = SimpleQueue()
        self._done: deque[tuple[Waiter, str, str, str, bool]] = deque()
        self._thread: threading.Thread | None = None

    def check(self, password: str, stored: str, host: str) -> Waiter:
        """The waiter gets True, False, or None when too many checks wait. `stored`: "" for an
        unknown user.
        """
        waiter = Waiter()
        known = self._known.get(stored)
        if known is not None and hmac.compare_digest(known, self._keyed(password)):
            waiter.complete(True)
            return waiter
        total = sum(self._waiting.values())
        if total >= WAITING_MAX or self._waiting[host] >= WAITING_OF_HOST_MAX:
            waiter.complete(None)
            return waiter
        self._waiting[host] += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="passwords", daemon=True)
            self._thread.start()
        self._asked.put((waiter, password, stored, host))
        return waiter

    def step(self) -> int:
        """Complete the checks that are done. Return how many."""
        count = 0
        while self._done:
            count += 1
            waiter, password, stored, host, is_right = self._done.popleft()
            self._waiting[host] -= 1
            if not self._waiting[host]:
                del self._waiting[host]
            if is_right:
                self._known[stored] = self._keyed(password)
                if len(self._known) > KNOWN_MAX:
                    self._known.popitem(last=False)
            waiter.complete(is_right)
        return count

    def _keyed(self, password: str) -> bytes:
        return hmac.digest(self._key, password.encode("utf-8", "surrogatepass"), "sha256")

    def _work(self) -> None:
        while True:
            waiter, password, stored, host = self._asked.get()
            try:
                is_right = self._check(password, stored)
            except Exception as error:
                logger.error("password_check_failed error=%r", str(error))
                is_right = False
            self._done.append((waiter, password, stored, host, is_right))
            self._ring()
