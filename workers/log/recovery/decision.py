"""Decision table of a log's recovery, and the facts from outside its files that it depends on.

`decide` is about the place where a walk over the newest segment ended. "Elsewhere": the journal or
an undrained ring has the batch that belongs there. "Durable": the place was once on disk, by a
checkpoint, an earlier run's partition table, or the header of an intact batch after it.

    ending   elsewhere  durable     action
    SEALED   -          -           BEGIN_NEW_SEGMENT
    CLEAN    no         yes         QUARANTINE
    CLEAN    otherwise              APPEND after the last batch
    TORN     yes        -           CUT after the last intact batch
    TORN     no         no          CUT, and report the bytes
    TORN     no         yes         QUARANTINE

- QUARANTINE of a CLEAN ending: the file was cut. Offsets up to the known durable end are reported
  as lost.
- QUARANTINE of a TORN ending: keep the file and a copy of the range, report it, and continue after
  it. Readers get an error for the range.
- CUT of a batch that is elsewhere: it is written again.
- CUT of other bytes: they were never synced and never acknowledged as durable.

Owner: pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tailrace.format.crc32c import Readable
from tailrace.format.segments.segment import Ending


class Action(Enum):
    BEGIN_NEW_SEGMENT = 1
    APPEND = 2
    CUT = 3
    QUARANTINE = 4


def decide(ending: Ending, *, elsewhere: bool, durable: bool) -> Action:
    """Return the action of the table above."""
    if ending is Ending.SEALED:
        return Action.BEGIN_NEW_SEGMENT
    if durable and not elsewhere:
        return Action.QUARANTINE
    return Action.APPEND if ending is Ending.CLEAN else Action.CUT


@dataclass(frozen=True, slots=True)
class Hints:
    """Facts from outside the files."""

    elsewhere: frozenset[int] = frozenset()
    """Base offsets of batches in the journal or a ring."""
    journaled: Mapping[int, Readable] = field(default_factory=dict)
    """Batches in the journal, by base offset. A batch found in a segment is rewritten there: a
    failed sync leaves pages that look clean.
    """
    durable_below: int = 0
    """Offsets below this were durable, by a partition table found in memory."""
    end_limit: int | None = None
    """Batches from this offset on are ignored. Their disk had failed, and the page cache may differ
    from the disk.
    """
    quarantine: str = ""
    """Directory for copies of damaged ranges."""
    may_have_holes: bool = False
    """True after power loss under durability=memory. Unsynced batches after a hole are then no sign
    of corruption, since pages are written in any order.
    """
