"""Password checks: argon2id in a thread of its own, for it takes tens of milliseconds.

Owner: one gateway. The thread starts with the first password.

Invariants:
- The loop never waits for a check, and none is refused: a connection has one at a time, so as many
  wait as there are connections. A client whose check takes too long is closed without an answer, as
  every one that does not log in, and tries again.
- Hosts take turns, so one that sends many passwords keeps no other host waiting for more than its
  own.
- Equal passwords of one user from one host are checked once while they wait. A check begins only
  while a login waits for it.
- A password that was right is known by a keyed hash of it, as long as its user has it, so that a
  client that comes back needs no other check. A wrong one is always checked, and takes as long as
  that of an unknown user.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from netfront.kafka.exchange.waiter import Waiter
from shm.rights.client_hosts import network_of
from shm.rights.passwords import is_password

logger = logging.getLogger(__name__)

KNOWN_MAX = 10_000
Check = Callable[[str, str], bool]


class Asked(NamedTuple):
    """A password to check. Equal ones are one check."""

    user: str
    stored: str
    """Hash of the user's password; "": the user is unknown."""
    keyed: bytes


class _Waiting:
    """A check that waits or runs, and those who wait for it."""

    __slots__ = ("asked", "password", "waiters")

    def __init__(self, asked: Asked, password: str) -> None:
        self.asked = asked
        self.password = password
        self.waiters: dict[Waiter, None] = {}


class PasswordChecks:
    """Checks passwords beside the loop."""

    def __init__(self, ring: Callable[[], None], check: Check = is_password) -> None:
        """`ring` wakes the loop, which then calls `step`."""
        self._ring = ring
        self._check = check
        self._key = os.urandom(32)
        self._known: OrderedDict[str, bytes] = OrderedDict()
        """Keyed hash of the right password, by its argon2id hash."""
        self._hosts: OrderedDict[str, OrderedDict[Asked, _Waiting]] = OrderedDict()
        """Checks that wait, the oldest first, by host; the host whose turn is next comes first."""
        self._running: _Waiting | None = None
        self._running_host = ""
        self._begun: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._done: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def check(self, user: str, password: str, stored: str, host: str) -> Waiter:
        """The waiter gets True or False. `stored`: "" for an unknown user. `forget` drops it."""
        waiter, host = Waiter(), network_of(host)
        asked = Asked(user, stored, self._keyed(password))
        if self._is_known(asked):
            waiter.complete(True)
            return waiter
        running = self._running
        if running is not None and running.asked == asked and self._running_host == host:
            running.waiters[waiter] = None
            return waiter
        checks = self._hosts.setdefault(host, OrderedDict())
        if asked not in checks:
            checks[asked] = _Waiting(asked, password)
        checks[asked].waiters[waiter] = None
        self._begin_next()
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """Drop a check whose client is gone, unless it runs already or another one waits for it."""
        if waiter.is_done:
            return
        if self._running is not None and waiter in self._running.waiters:
            del self._running.waiters[waiter]
            return
        for host, checks in self._hosts.items():
            for asked, check in checks.items():
                if waiter in check.waiters:
                    del check.waiters[waiter]
                    if not check.waiters:
                        del checks[asked]
                    if not checks:
                        del self._hosts[host]
                    return

    def step(self) -> int:
        """Complete the check that is done, and begin the next one. Return how many are done."""
        count = 0
        while not self._done.empty():
            count += 1
            is_right = self._done.get()
            check, self._running = self._running, None
            assert check is not None
            if is_right:
                self._known[check.asked.stored] = check.asked.keyed
                if len(self._known) > KNOWN_MAX:
                    self._known.popitem(last=False)
            self._begin_next()
            for waiter in list(check.waiters):
                waiter.complete(is_right)
        return count

    def _begin_next(self) -> None:
        """Give the thread the oldest check of the host whose turn it is."""
        while self._running is None and self._hosts:
            host, checks = self._hosts.popitem(last=False)
            _, check = checks.popitem(last=False)
            if checks:
                self._hosts[host] = checks
            if self._is_known(check.asked):  # it was right for another host meanwhile
                for waiter in list(check.waiters):
                    waiter.complete(True)
                continue
            self._running, self._running_host = check, host
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="passwords", daemon=True)
                self._thread.start()
            self._begun.put((check.password, check.asked.stored))

    def _is_known(self, asked: Asked) -> bool:
        known = self._known.get(asked.stored)
        return known is not None and hmac.compare_digest(known, asked.keyed)

    def _keyed(self, password: str) -> bytes:
        return hmac.digest(self._key, password.encode("utf-8", "surrogatepass"), "sha256")

    def _work(self) -> None:
        while True:
            password, stored = self._begun.get()
            try:
                is_right = self._check(password, stored)
            except Exception as error:
                logger.error("password_check_failed error=%r", str(error))
                is_right = False
            self._done.put(is_right)
            self._ring()
