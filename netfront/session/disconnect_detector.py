"""Disconnect detector: finds sessions whose connection libzmq cannot reach any more.

Descriptors report connections that close, but may be mistaken for their successors (see
`Connections.identify`). libzmq's own table is right, but takes a moment to forget a closed
connection. So a suspected connection is probed until it cannot be reached, or was reached
PROBES_MAX times.

Owner: one front; pure, except for `is_reachable`.

Invariants:
- A reachable session is never reported as ended.
- An unreachable suspect is reported at its next probe.
- One call probes at most AT_ONCE identities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from shm.runtime.timing_wheel import NEVER_NS

PROBE_INTERVAL_NS = 20_000_000
PROBES_MAX = 50
"""Successful probes, over one second, after which a connection counts as alive."""
AT_ONCE = 256


class DisconnectDetector:
    """Identities whose connection may have ended."""

    def __init__(self) -> None:
        self._probes: dict[bytes, int] = {}
        """Number of successful probes by identity, the last probed one last."""
        self.probe_at_ns = NEVER_NS
        """Time when `take` next has work."""

    def suspect(self, identities: Iterable[bytes], now_ns: int) -> None:
        """Add identities whose connection may have ended."""
        self._probes.update(dict.fromkeys(identities, 0))
        self.probe_at_ns = now_ns if self._probes else NEVER_NS

    def take(self, is_reachable: Callable[[bytes], bool], now_ns: int) -> list[bytes]:
        """Probe suspects. Return, and forget, those that cannot be reached."""
        ended = []
        waiting = len(self._probes)
        for identity in list(islice(self._probes, AT_ONCE)):
            probes = self._probes.pop(identity)
            if not is_reachable(identity):
                ended.append(identity)
            elif probes < PROBES_MAX:
                self._probes[identity] = probes + 1
        self.probe_at_ns = (
            NEVER_NS
            if not self._probes
            else now_ns
            if waiting > AT_ONCE
            else now_ns + PROBE_INTERVAL_NS
        )
        return ended
