"""Jumps of the wall clock, so that retention does not take a time that was set for a time that has
passed.

Segments and records are stamped with the wall clock's time, and a stamp's age is what the wall
clock says now, less the stamp. Where the clock was set forward between the two, that is too much,
by the jump. So jumps forward are noted (found by comparing with the monotonic clock), and a stamp
from before one is moved forward by it:

    set forward by L, to W                 every stamp <= W is taken as stamp + L
    set back by B                          takes back what was noted last, up to B; beyond that nothing is noted: records stay longer

Stamps between W - L and W were made before the jump, too: a worker's never go back, so that one
that has seen a later time stays at it.

Owner: the flusher of one data directory; clock.json there.
Invariants: within a boot of the host nothing is taken for older than it is, over restarts too.
    After another boot the wall clock is taken at its word: nothing else says how long the host was
    off. At most JUMPS_MAX jumps are kept; two that are more become one, which only makes records
    stay longer.
Crash: the file has a reading of both clocks, so that a successor finds a jump that it does not have
    yet. One that is missing or damaged is made anew. A disk that takes no write does not keep
    retention from freeing it.
"""  # noqa: E501

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from shm.runtime.elapsed_time import this_boot
from tailrace.format import checked_json
from workers.segment.files import Files, read_whole, write_durably

logger = logging.getLogger(__name__)

CLOCK_FILE = "clock.json"
FORMAT_VERSION = 1
JUMP_US = 1_000_000
"""What differs by less is no jump: both clocks are steered."""
JUMPS_MAX = 64


class WallJumps:
    """See the module's docstring."""

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
        """(to what the clock was set, by how much forward), us, in order. What is found at
        the start is written by the first `observe`: a start waits for no disk.
        """
        self._is_kept = False
        self._load()
        self._compare(wall_us, monotonic_ns)

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
        """Compare the clocks, note a jump, and write down what is new."""
        self._compare(wall_us, monotonic_ns)
        if not self._is_kept:
            self._keep()

    def _compare(self, wall_us: int, monotonic_ns: int) -> None:
        expected_us = self._anchor[0] + (monotonic_ns - self._anchor[1]) // 1_000
        difference_us = wall_us - expected_us
        self._anchor = wall_us, monotonic_ns
        if difference_us >= JUMP_US:
            self._note(wall_us, difference_us)
        elif difference_us <= -JUMP_US:
            self._revoke_lease(-difference_us)

    def _note(self, to_us: int, by_us: int) -> None:
        self._is_kept = False
        self._jumps.append((to_us, by_us))
        while len(self._jumps) > JUMPS_MAX:
            (first_to, first_by), (to, by) = self._jumps[:2]
            self._jumps[:2] = [(max(first_to, to), first_by + by)]

    def _revoke_lease(self, by_us: int) -> None:
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
        except OSError as error:  # a full disk, for example: it is tried again with the next look
            logger.warning("wall_jumps_not_kept directory=%s error=%r", self._directory, str(error))
        else:
            self._is_kept = True

    def moved(self, stamp_us: int) -> int:
        """A stamp of the wall clock's, as it would be had the clock never been set forward behind
        it. 0, not known, stays 0.
        """
        return stamp_us and stamp_us + sum(
            by_us for to_us, by_us in self._jumps if stamp_us <= to_us
        )
