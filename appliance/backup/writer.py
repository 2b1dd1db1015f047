"""Writer of one backup: puts bytes into objects, and names what the target has already.

Small pieces of a backup (metadata, snapshots, the new ends of active segments) share one object,
the pack. So a backup of a thousand partitions makes one object instead of a thousand.

Owner: one backup.

Invariants:
- A part of an earlier backup is taken over without reading it.
- The parts of a segment are merged as it grows. Their number is logarithmic in its size, and so is
  the number of times that a byte is sent.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from typing import IO

from appliance.backup.errors import BackupError
from appliance.backup.manifest import Manifest, Part, StoredObject
from appliance.backup.target.object_store import PIECE_BYTES, ObjectStore

OWN_OBJECT_BYTES = 1 << 20
"""Pieces of at least this size are objects of their own."""
MERGED_MAX_BYTES = 4 << 20
"""Parts of at least this size are not merged."""
PACK_MEMORY_BYTES = 32 << 20
_PACK = StoredObject("pack", 0)


class BackupWriter:
    """Collects the objects of one backup."""

    def __init__(self, store: ObjectStore, previous: Manifest | None, *, may_share: bool) -> None:
        """`previous`: the newest backup of the target. `may_share`: see `LocalTarget.share`."""
        self._store = store
        self._previous = previous
        self._may_share = may_share
        self.objects: list[StoredObject] = []
        self.sent_bytes = 0
        self._numbers: dict[str, int] = {}
        self._pack: IO[bytes] | None = None
        self._pack_number = -1
        self._pack_size = 0

    # ---- parts of the previous backup ------------------------------------------------------------

    def kept(self, part: Part) -> Part:
        """A part of the previous backup, as one of this."""
        assert self._previous is not None, "only the previous backup has parts"
        return part._replace(number=self._number_of(self._previous.objects[part.number]))

    def _number_of(self, stored: StoredObject) -> int:
        number = self._numbers.get(stored.name)
        if number is None:
            number = self._numbers[stored.name] = len(self.objects)
            self.objects.append(stored)
        return number

    # ---- new parts -------------------------------------------------------------------------------

    def add_small(self, data: bytes, previous: Part | None) -> Part:
        """A small file, or the part of the previous backup if that has the same content."""
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        if previous is not None and (previous.digest, previous.length) == (digest, len(data)):
            return self.kept(previous)
        return self._add_to_pack([data], len(data))._replace(digest=digest)

    def add_range(self, fd: int, start: int, length: int) -> Part:
        """Bytes of an open file. Raises BackupError, OSError."""
        if length < OWN_OBJECT_BYTES:
            return self._add_to_pack(_pieces_of(fd, start, length), length)
        return self._add_object(fd, start, length, None)

    def add_file(self, fd: int, path: str, size: int) -> Part:
        """All of an open file that never changes. Raises BackupError, OSError."""
        if size < OWN_OBJECT_BYTES:
            return self._add_to_pack(_pieces_of(fd, 0, size), size)
        return self._add_object(fd, 0, size, (fd, path) if self._may_share else None)

    def grown(self, fd: int, parts: list[Part], old_size: int, size: int) -> list[Part]:
        """The parts of a file that has grown to `size` bytes; `parts` of the previous backup hold
        its first `old_size`. Raises BackupError, OSError.
        """
        kept, length = list(parts), size - old_size
        if not length:
            return [self.kept(part) for part in kept]
        while kept and kept[-1].length < min(2 * length, MERGED_MAX_BYTES):
            length += kept.pop().length
        return [*map(self.kept, kept), self.add_range(fd, size - length, length)]

    def _add_object(self, fd: int, start: int, length: int, share: tuple[int, str] | None) -> Part:
        stored, sent = self._store.put(lambda: _pieces_of(fd, start, length), share)
        self.sent_bytes += sent
        return Part(self._number_of(stored), 0, length)

    def _add_to_pack(self, pieces: list[bytes] | Iterator[bytes], length: int) -> Part:
        if self._pack is None:
            self._pack = tempfile.SpooledTemporaryFile(PACK_MEMORY_BYTES)  # noqa: SIM115 - `close`
            self._pack_number = len(self.objects)
            self.objects.append(_PACK)
        part = Part(self._pack_number, self._pack_size, length)
        for piece in pieces:
            self._pack.write(piece)
        self._pack_size += length
        return part

    def finish(self) -> None:
        """Store the pack. Raises BackupError, OSError."""
        pack = self._pack
        if pack is None:
            return

        def pieces() -> Iterator[bytes]:
            pack.seek(0)
            while piece := pack.read(PIECE_BYTES):
                yield piece

        stored, sent = self._store.put(pieces)
        self.objects[self._pack_number] = stored
        self.sent_bytes += sent
        self.close()

    def close(self) -> None:
        """Drop the pack's temporary file."""
        if self._pack is not None:
            self._pack.close()
            self._pack = None


def _pieces_of(fd: int, start: int, length: int) -> Iterator[bytes]:
    end = start + length
    while start < end:
        piece = os.pread(fd, min(PIECE_BYTES, end - start), start)
        if not piece:
            raise BackupError("a file became shorter while it was read; run the backup again.")
        yield piece
        start += len(piece)
