"""Check of backups in their target, without a restore.

Owner: reads the target, and marks damaged objects where it may write.

Invariants: each object is read once, however many backups name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from appliance.backup.errors import BackupError
from appliance.backup.manifest import Manifest, Part
from appliance.backup.target.object_store import ObjectStore


class Finding(NamedTuple):
    """Damage of a backup."""

    backup_id: str
    text: str


def verify(
    store: ObjectStore, backup_ids: list[str], advance: Callable[[int], None]
) -> Iterator[Finding]:
    """Read everything that these backups name, and yield what is damaged. `advance` is called
    with the bytes of each object that was read.
    """
    checked: dict[str, str] = {}
    yield from _check(store, backup_ids, advance, checked)
    damaged = [name for name, text in checked.items() if text]
    try:
        store.mark_damaged(damaged, [name for name, text in checked.items() if not text])
    except (BackupError, OSError) as error:
        if damaged:
            yield Finding(
                backup_ids[-1],
                f"the damaged objects cannot be marked, so the next backup takes them for whole "
                f"({error}): run `tailrace backup verify` as a user who may write the target.",
            )


def _check(
    store: ObjectStore,
    backup_ids: list[str],
    advance: Callable[[int], None],
    checked: dict[str, str],
) -> Iterator[Finding]:
    """Yield what is damaged. `checked` gets each object's name with its damage, or ""."""
    for backup_id in backup_ids:
        try:
            manifest = store.manifest(backup_id)
        except BackupError as error:
            yield Finding(backup_id, str(error))
            continue
        for stored in manifest.objects:
            if stored.name not in checked:
                try:
                    store.verify(stored)
                    checked[stored.name] = ""
                except (BackupError, OSError) as error:
                    checked[stored.name] = str(error)
                advance(stored.size)
            if checked[stored.name]:
                yield Finding(backup_id, checked[stored.name])
        yield from (Finding(backup_id, text) for text in _gaps(manifest))


def _gaps(manifest: Manifest) -> Iterator[str]:
    """Contradictions within a manifest."""
    for entry in manifest.partitions:
        name = f"{entry.topic}-{entry.partition}"
        following = entry.segments[0].base if entry.segments else entry.end
        for segment in entry.segments:
            if segment.base != following:
                yield f"{name}: offsets {following} to {segment.base - 1} are missing."
            if sum(part.length for part in segment.parts) != segment.size:
                yield f"{name}: segment {segment.base} is not whole."
            following = segment.end
        if following != entry.end:
            yield f"{name} ends at offset {following}, not {entry.end}."
    for part in _parts(manifest):
        if not 0 <= part.number < len(manifest.objects) or (
            part.start + part.length > manifest.objects[part.number].size
        ):
            yield "the manifest names bytes that no object has."
            return


def _parts(manifest: Manifest) -> Iterator[Part]:
    yield from manifest.databases.values()
    for entry in manifest.partitions:
        small = [entry.metadata, entry.checkpoint, entry.pending]
        for segment in entry.segments:
            yield from segment.parts
            small += [segment.producers, segment.offset_index, segment.transactions]
        for bucket in entry.buckets:
            yield from bucket.parts
        yield from (part for part in small if part is not None)
