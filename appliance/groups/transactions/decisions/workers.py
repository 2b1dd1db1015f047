"""The workers as the coordinator sees them. `appliance.groups.agent.worker_link` has the lanes.

Owner: none; an interface.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Workers(Protocol):
    """All workers of the appliance."""

    def request(self) -> None:
        """Ask for the lanes and a block of producer ids. A second call has no effect."""

    def send(self, payloads: Sequence[bytes]) -> None:
        """Send DECISIONS to each worker that was fed. The others get them with their feed."""

    def is_feed_due(self) -> bool:
        """True when a worker waits for its feed."""

    def feed(self, payloads: Sequence[bytes]) -> None:
        """Feed each worker that waits for it: these DECISIONS replace what it knew."""

    def settled_through(self) -> int:
        """The ordinal up to which every worker has carried out the decisions."""

    def show_progress(self, decided: int, carried_out: int) -> None:
        """Show readers the newest durable decision, and up to which all are carried out."""

    def unfinished(self) -> Collection[int]:
        """Ordinals below that some worker has not finished."""

    def pending_on(self, ordinal: int) -> list[str]:
        """Names of the workers that have not carried out this decision."""
