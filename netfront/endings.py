"""Which sessions have ended: those whose connection seems gone, once libzmq cannot reach it any more.

Descriptors tell of connections that come and go, and one can be mistaken for another (see `Peers.meet`); libzmq's own table cannot, but needs a moment to
forget a connection that has ended. So a connection that seems gone is looked at again until it cannot be reached, or has been reached so often that it
must live.

Owner: one front; pure, but for `is_reachable`.
Invariants: a session that can be reached is never named as ended; one that cannot is, at the next look; a look asks for AT_ONCE at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from workers.timing_wheel import NEVER_NS

LOOK_NS = 20_000_000
LOOKS_MAX = 50
"""Reached so often, a second long, it lives."""
AT_ONCE = 256


class Endings:
    """Identities whose connection seems gone."""

    def __init__(self) -> None:
        self._looks: dict[bytes, int] = {}
        """Identity -> how often it could be reached all the same; the one that was looked at last is last."""
        self.look_at_ns = NEVER_NS
        """When `take` next has something to do."""

    def doubt(self, identities: Iterable[bytes], now_ns: int) -> None:
        """Their connections seem to have ended."""
        self._looks.update(dict.fromkeys(identities, 0))
        self.look_at_ns = now_ns if self._looks else NEVER_NS

    def take(self, is_reachable: Callable[[bytes], bool], now_ns: int) -> list[bytes]:
        """Identities whose connection is gone; they are not asked for again."""
        ended = []
        waiting = len(self._looks)
        for identity in list(islice(self._looks, AT_ONCE)):
            looks = self._looks.pop(identity)
            if not is_reachable(identity):
                ended.append(identity)
            elif looks < LOOKS_MAX:
                self._looks[identity] = looks + 1
        self.look_at_ns = NEVER_NS if not self._looks else now_ns if waiting > AT_ONCE else now_ns + LOOK_NS
        return ended
