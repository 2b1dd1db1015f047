"""Jumps of the wall clock, which retention must not count as elapsed time.

Segments and records carry wall clock timestamps, and their age is the wall clock's time minus the
timestamp. If the clock was set forward in between, that age is too large by the jump. Jumps forward
are therefore recorded (by comparison with the monotonic clock), and earlier timestamps are moved:

    set forward by L, to W      every timestamp <= W counts as timestamp + L
    set back by B               shrinks the last recorded jumps by B in total; the rest of B is
                                ignored, so that records stay longer

Timestamps between W - L and W were taken before the jump, too. A worker's timestamps never
decrease, so a worker that has seen a later time keeps it.

Owner: the flusher of one data directory; clock.json there. A worker reads the file at its start,
    and compares the clocks itself (`follow`).
Invariants:
- Within a boot of the host no record counts as older than it is, also after restarts.
- After another boot the wall clock is trusted, since the host's time off is unknown.
- At most JUMPS_MAX jumps are kept. Further ones are merged, so that records stay longer.
Crash: the file has a reading of both clocks, from which a successor finds a missing jump. A missing
    or damaged file is written again. A disk that refuses writes does not stop retention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from shm.runtime.elapsed_time import this_boot
from tailrace.format.directory import checked_json
from workers.segment.files import Files, read_whole, write_durably

logger = logging.getLogger(__name__)

CLOCK_FILE = "clock.json"
FORMAT_VERSION = 1
JUMP_US = 1_000_000
"""Least difference of the clocks that counts as a jump, since both clocks are slewed."""
JUMPS_MAX = 64


class WallJumps:
    """The recorded jumps of one data directory."""

    def __init__(
        self,
        files: Files,
        directory: str,
        wall_us: int,
        monotonic_ns: int,
        boot: Callable[[], int] = this_boot,
    ) -> None:
        self._files = files
        self._directory = directory
        self._boot = boot()
        self._anchor = wall_us, monotonic_ns
        """The last reading of both clocks."""
        self._jumps: list[tuple[int, int]] = []
        """(new time, size of the jump), us, in order. The first `observe` writes a jump found at
        the start, so that a start waits for no disk.
        """
        self._is_kept = False
        self._load()
        self.compare(wall_us, monotonic_ns)

    def _load(self) -> None:
        try:
            content: Any = checked_json.decode(
                read_whole(self._files, f"{self._directory}/{CLOCK_FILE}")
            )
            if content is None or content["format"] != FORMAT_VERSION:
                return
            jumps = [(int(to), int(by)) for to, by in content["jumps"]]
            wall_us, monotonic_ns, boot = (
                int(content[name]) for name in ("wall_us", "monotonic_ns", "boot")
            )
        except (OSError, KeyError, TypeError, ValueError):
            return
        self._jumps = jumps
        if 0 < boot == self._boot and monotonic_ns <= self._anchor[1]:
            self._anchor, self._is_kept = (wall_us, monotonic_ns), True

    def observe(self, wall_us: int, monotonic_ns: int) -> None:
        """Compare the clocks, record a jump, and write the file if it changed."""
        self.compare(wall_us, monotonic_ns)
        if not self._is_kept:
            self._keep()

    def compare(self, wall_us: int, monotonic_ns: int) -> None:
        """Compare the clocks and record a jump, without writing the file."""
        expected_us = self._anchor[0] + (monotonic_ns - self._anchor[1]) // 1_000
        difference_us = wall_us - expected_us
        self._anchor = wall_us, monotonic_ns
        if difference_us >= JUMP_US:
            self._note(wall_us, difference_us)
        elif difference_us <= -JUMP_US:
            self._shrink_jumps(-difference_us)

    def _note(self, to_us: int, by_us: int) -> None:
        self._is_kept = False
        self._jumps.append((to_us, by_us))
        while len(self._jumps) > JUMPS_MAX:
            (first_to, first_by), (to, by) = self._jumps[:2]
            self._jumps[:2] = [(max(first_to, to), first_by + by)]

    def _shrink_jumps(self, by_us: int) -> None:
        self._is_kept = False
        while by_us and self._jumps:
            to, forward_us = self._jumps.pop()
            if forward_us > by_us:
                self._jumps.append((to, forward_us - by_us))
            by_us = max(0, by_us - forward_us)

    def _keep(self) -> None:
        wall_us, monotonic_ns = self._anchor
        content = {
            "format": FORMAT_VERSION, "wall_us": wall_us, "monotonic_ns": monotonic_ns,
            "boot": self._boot, "jumps": [list(jump) for jump in self._jumps],
        }  # fmt: skip
        try:
            write_durably(self._files, self._directory, CLOCK_FILE, checked_json.encode(content))
        except OSError as error:  # such as a full disk: the next `observe` tries again
            logger.warning("wall_jumps_not_kept directory=%s error=%r", self._directory, str(error))
        else:
            self._is_kept = True

    def moved(self, stamp_us: int) -> int:
        """A timestamp corrected for later jumps of the clock. 0 means unknown and stays 0."""
        return moved_by(self._jumps, stamp_us)

    def all(self) -> list[list[int]]:
        """[new time, size of the jump] of each jump, for `moved_by` in another process."""
        return [list(jump) for jump in self._jumps]


def moved_by(jumps: Sequence[Sequence[int]], stamp_us: int) -> int:
    """A timestamp corrected for later ones of these jumps. 0 means unknown and stays 0."""
    return stamp_us and stamp_us + sum(by_us for to_us, by_us in jumps if stamp_us <= to_us)


def follow(
    jumps: WallJumps, wall_us: Callable[[], int], monotonic_ns: Callable[[], int]
) -> Callable[[int], int]:
    """`jumps.moved` as of now, for a process that does not own the file."""

    def moved(stamp_us: int) -> int:
        jumps.compare(wall_us(), monotonic_ns())
        return jumps.moved(stamp_us)

    return moved
