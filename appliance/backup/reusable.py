"""The previous backup without what its target has lost: what a backup may take over unread.

Owner: pure.

Invariants:
- Every part that is left is of a sound object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.backup.manifest import Manifest, Part, PartitionEntry, SegmentEntry, StoredObject

Key = tuple[str, int, int]
"""Topic id, partition, base offset of a segment."""


def reusable(
    previous: Manifest, is_sound: Callable[[StoredObject], bool]
) -> tuple[Manifest, set[Key]]:
    """Return the manifest without segments, files and sidecars whose objects are not sound, and
    the whole segments among these.
    """
    sound = [is_sound(stored) for stored in previous.objects]
    if all(sound):
        return previous, set()

    def kept(part: Part | None) -> Part | None:
        return part if part is not None and sound[part.number] else None

    def segment(found: SegmentEntry) -> SegmentEntry:
        return found._replace(
            producers=kept(found.producers),
            offset_index=kept(found.offset_index),
            transactions=kept(found.transactions),
        )

    def partition(entry: PartitionEntry) -> PartitionEntry:
        return entry._replace(
            metadata=kept(entry.metadata),
            segments=[segment(each) for each in entry.segments if all(map(kept, each.parts))],
            checkpoint=kept(entry.checkpoint),
            pending=kept(entry.pending),
            buckets=[each for each in entry.buckets if all(map(kept, each.parts))],
        )

    lost = {
        (entry.topic_id, entry.partition, each.base)
        for entry in previous.partitions
        for each in entry.segments
        if each.is_whole and not all(map(kept, each.parts))
    }
    left = replace(
        previous,
        databases={name: part for name, part in previous.databases.items() if kept(part)},
        partitions=[partition(entry) for entry in previous.partitions],
    )
    return left, lost
