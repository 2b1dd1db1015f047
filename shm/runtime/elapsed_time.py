"""Elapsed time: counts up while the host runs, over restarts of its processes, whatever is done to
the wall clock.

Everything that expires (groups, committed offsets, leases, segments) is stamped with it, or
compared by it. The wall clock is for people.

    elapsed = what a mark on the disk says + what the monotonic clock has counted since the mark was made       in the same boot of the host
              what a mark on the disk says + what the monotonic clock has counted since this process began      in another boot

How long a host was off is not known without the wall clock, so that time does not count: what
expires lives longer, never shorter (docs/adr/0026).

Owner: one process for each mark; it keeps the mark where its state is, in the transaction of that
    state.
Invariants: elapsed time never goes back within a boot; two processes of one boot that began with
    the same mark read the same time. A mark of this boot is exact however old it is; one of another
    boot lacks what passed after it was made.
Crash: a mark that was not kept costs the time since the one before, and only when the host itself
    has been started anew.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

NS_PER_MS = 1_000_000
US_PER_MS = 1_000
BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
MARK_EVERY_MS = 60_000
"""So old a mark may be before another is worth a row in a transaction that is made anyway."""
MARK_ALONE_MS = 600_000
"""So old before it is worth a transaction of its own."""
MARK_NAMES = ("elapsed_ms", "elapsed_monotonic_ns", "elapsed_boot")
_BITS = (1 << 62) - 1


class Mark(NamedTuple):
    """Elapsed time at one reading of the monotonic clock, in one boot of the host."""

    elapsed_ms: int
    monotonic_ns: int
    boot: int

    def rows(self) -> list[tuple[str, int]]:
        """Return the names and whole numbers that a database stores."""
        return list(zip(MARK_NAMES, self, strict=True))

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[str, int]]) -> Mark | None:
        """The mark among these; None: there is none."""
        kept = dict(rows)
        return cls(*(kept[name] for name in MARK_NAMES)) if kept.keys() >= set(MARK_NAMES) else None


def this_boot() -> int:
    """A number that no other boot of any host has; 0 where the kernel does not say."""
    try:
        with open(BOOT_ID_FILE, encoding="ascii") as file:
            return int(file.read().replace("-", ""), 16) & _BITS
    except (OSError, ValueError):
        return 0


class ElapsedTime:
    """See the module's docstring."""

    def __init__(self, mark: Mark | None, now_ns: int, boot: Callable[[], int] = this_boot) -> None:
        """`mark`: the last one that was kept; None: time begins now."""
        self._boot = boot()
        is_of_this_boot = (
            mark is not None and 0 < mark.boot == self._boot and mark.monotonic_ns <= now_ns
        )
        self._is_kept = is_of_this_boot
        if mark is None:
            mark = Mark(0, now_ns, self._boot)
        self._mark = mark if is_of_this_boot else Mark(mark.elapsed_ms, now_ns, self._boot)

    def ms(self, now_ns: int) -> int:
        """Elapsed time at this reading of the monotonic clock."""
        return self._mark.elapsed_ms + max(0, now_ns - self._mark.monotonic_ns) // NS_PER_MS

    def mark_due(self, now_ns: int, after_ms: int = MARK_EVERY_MS) -> Mark | None:
        """The mark to keep now; None: the one that was kept is good for a while yet."""
        elapsed_ms = self.ms(now_ns)
        if self._is_kept and elapsed_ms - self._mark.elapsed_ms < after_ms:
            return None
        return Mark(
            elapsed_ms,
            self._mark.monotonic_ns + (elapsed_ms - self._mark.elapsed_ms) * NS_PER_MS,
            self._boot,
        )

    def kept(self, mark: Mark) -> None:
        """The mark that `mark_due` returned is on the disk."""
        self._mark, self._is_kept = mark, True
