"""Objects and manifests of a target, named by content and encrypted if there is a key.

Layout of a target:

    tailrace-backup.json     format, the appliance whose backups these are, a check of the key
    objects/ab/ab12...       objects; the name is the SHA-256 of the content, with a key its HMAC
    backups/<id>.json        manifests (`appliance.backup.manifest`), written last
    damaged/ab12...          marks of damaged objects, empty; the next backup sends these again
    lock, reading            (`appliance.backup.target.local_target`)

Invariants:
- The name of an object, and of a manifest, is checked against its content when all of it is read.
- A manifest is written when all its objects are durable.
- A mark of damage is removed when the object was sent again and is durable, or is removed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from appliance.backup.encryption import Cipher, plain_size
from appliance.backup.errors import BackupError
from appliance.backup.manifest import (
    FORMAT,
    NO_CRC,
    READ_FORMATS,
    Manifest,
    Part,
    StoredObject,
)
from appliance.backup.target.local_target import LocalTarget
from appliance.backup.target.url_target import UrlTarget
from tailrace.format.crc32c import crc32c
from tailrace.format.directory import checked_json

MARKER = "tailrace-backup.json"
OBJECTS = "objects"
BACKUPS = "backups"
DAMAGED = "damaged"
PIECE_BYTES = 4 << 20
_NAME = re.compile(r"[0-9a-f]{64}")
_BACKUP_ID = re.compile(r"[0-9]{8}-[0-9TZ.]{10,40}")


def open_target(place: str) -> LocalTarget | UrlTarget:
    """The target of this directory or URL. Raises BackupError."""
    if place.startswith("file://"):
        place = place.removeprefix("file://")
    return UrlTarget(place) if "://" in place or "::" in place else LocalTarget(place)


class ObjectStore:
    """A target with its encryption."""

    def __init__(self, target: LocalTarget | UrlTarget, cipher: Cipher | None) -> None:
        self.target = target
        self._cipher = cipher
        self._checked: set[str] = set()
        self._sizes: dict[str, int] = {}
        """Name -> bytes in the target, since `begin`."""
        self._marked: set[str] = set()
        self._mended: list[str] = []
        """Marked objects that were sent again."""

    # ---- the target ------------------------------------------------------------------------------

    def begin(self, instance: str) -> None:
        """Make the target, or check that it is of this appliance and key. The target is locked.
        Raises BackupError, OSError.
        """
        if not self.target.exists(MARKER):
            if not self.target.is_empty():
                raise BackupError(
                    f"{self.target} is not empty and holds no backups of Tailrace; choose another "
                    "place."
                )
            content = {
                "format": FORMAT,
                "instance": instance,
                "key_check": self._cipher.key_check if self._cipher else "",
            }
            self.target.put(MARKER, [checked_json.encode(content)])
        if self.check() != instance:
            raise BackupError(
                f"{self.target} holds the backups of another appliance; choose another place. (A "
                "restored appliance is another one.)"
            )
        self._note_format()
        self.target.prepare((OBJECTS, BACKUPS))
        self.target.remove_temporaries()
        self._sizes = {
            path.rpartition("/")[2]: size for path, size in self.target.sizes(OBJECTS).items()
        }
        self._read_marks()

    def _note_format(self) -> None:
        """Note that there will be manifests of this format: earlier versions refuse the target."""
        content = self._marker()
        if content["format"] != FORMAT:
            self.target.put(MARKER, [checked_json.encode({**content, "format": FORMAT})])

    def _marker(self) -> dict[str, Any]:
        """The content of the marker. Raises BackupError."""
        try:
            content = checked_json.decode(self.target.read(MARKER, 0, 1 << 20))
        except (FileNotFoundError, NotADirectoryError):
            raise BackupError(f"there are no backups of Tailrace at {self.target}.") from None
        if not isinstance(content, dict):
            raise BackupError(f"{self.target}/{MARKER} is damaged.")
        return content

    def check(self) -> str:
        """Check format and key. Returns the identity of the appliance. Raises BackupError."""
        content = self._marker()
        if content.get("format") not in READ_FORMATS:
            raise BackupError(
                f"the backups at {self.target} have format {content.get('format')}; this version "
                f"of Tailrace reads format 1 to {FORMAT}. Install the version that made them, or a "
                "later one."
            )
        key_check = content.get("key_check", "")
        if key_check and self._cipher is None:
            raise BackupError(f"the backups at {self.target} are encrypted: name --key-file.")
        if not key_check and self._cipher is not None:
            raise BackupError(
                f"the backups at {self.target} are not encrypted: leave --key-file out, or choose "
                "another place."
            )
        if self._cipher is not None and key_check != self._cipher.key_check:
            raise BackupError(f"the backups at {self.target} were encrypted with another key.")
        return str(content.get("instance", ""))

    # ---- manifests -------------------------------------------------------------------------------

    def backup_ids(self) -> list[str]:
        """Names of the backups, the oldest first."""
        names = (name.removeprefix(f"{BACKUPS}/") for name in self.target.names(BACKUPS))
        ids = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return sorted(each for each in ids if _BACKUP_ID.fullmatch(each))

    def manifest(self, backup_id: str) -> Manifest:
        """A backup's manifest. Raises BackupError if it is missing or damaged."""
        name = f"{BACKUPS}/{backup_id}.json"
        size = self.target.size(name) if _BACKUP_ID.fullmatch(backup_id) else None
        if size is None:
            raise BackupError(
                f"there is no backup {backup_id} at {self.target}; `tailrace backup list` shows "
                "them."
            )
        if self._cipher is None:
            data = self.target.read(name, 0, size)
        else:
            data = b"".join(
                self._cipher.decrypted(
                    name,
                    lambda start, length: self.target.read(name, start, length),
                    size, 0, plain_size(size),
                )
            )  # fmt: skip
        found = Manifest.decode(data, backup_id)
        if found.backup_id != backup_id:
            raise BackupError(f"the manifest {backup_id} is that of {found.backup_id}: renamed.")
        return found

    def newest(self) -> Manifest | None:
        """The newest backup with an intact manifest."""
        for backup_id in reversed(self.backup_ids()):
            try:
                return self.manifest(backup_id)
            except BackupError:
                continue
        return None

    def put_manifest(self, manifest: Manifest) -> None:
        """Write a manifest, when its objects are durable. Raises BackupError, OSError."""
        self.target.sync()
        name, data = f"{BACKUPS}/{manifest.backup_id}.json", manifest.encode()
        pieces: Iterable[bytes] = [data]
        if self._cipher is not None:
            pieces = self._cipher.encrypted(name, pieces)
        self.target.put(name, pieces)
        self.target.sync()
        self._remove_marks(self._mended)
        self._mended = []

    # ---- damage ----------------------------------------------------------------------------------

    def is_sound(self, stored: StoredObject) -> bool:
        """True if an object was there with its size at `begin`, or was stored since, and is not
        marked as damaged.
        """
        size = self._sizes.get(stored.name)
        if size is not None and self._cipher is not None:
            size = plain_size(size)
        return size == stored.size and stored.name not in self._marked

    def mark_damaged(self, names: Iterable[str], intact: Iterable[str]) -> None:
        """Mark damaged objects, so that the next backup sends them again, and remove the marks of
        intact ones. Raises BackupError, OSError where the target cannot be written.
        """
        self._read_marks()
        for name in sorted(set(names) - self._marked):
            self.target.put(f"{DAMAGED}/{name}", [b""])
            self._marked.add(name)
        self._remove_marks(sorted(self._marked & set(intact)))
        self.target.sync()

    def _read_marks(self) -> None:
        self._marked = {path.rpartition("/")[2] for path in self.target.names(DAMAGED)}

    def _remove_marks(self, names: Iterable[str]) -> None:
        for name in names:
            self.target.remove(f"{DAMAGED}/{name}")
            self._marked.discard(name)

    # ---- objects ---------------------------------------------------------------------------------

    def put(
        self,
        pieces: Callable[[], Iterator[bytes]],
        share: tuple[int, str] | None = None,
    ) -> tuple[StoredObject, int]:
        """Store the content of `pieces`, which may be called twice. `share`: descriptor and path
        of a file that has this content and never changes. Returns the object and the bytes that
        were sent. Raises BackupError, OSError.
        """
        digest, size, crc = _digest(pieces())
        name = self._name_of(digest)
        path = _path(name)
        found = StoredObject(name, size, crc)
        if name not in self._marked and self._is_intact(found):
            return found, 0
        self.target.keep_lock()
        sent = size
        if self._cipher is not None:
            self.target.put(path, self._cipher.encrypted(name, _same(pieces(), digest)))
        elif share is not None and self.target.share(path, *share):
            sent = 0
        else:
            self.target.put(path, _same(pieces(), digest))
        self._sizes[name] = self.target.size(path) or 0
        if name in self._marked:
            self._mended.append(name)
        return found, sent

    def _is_intact(self, stored: StoredObject) -> bool:
        """True if the object is there with its content, which is read: it is what a killed backup
        has left, or a former one of the same content.
        """
        if self._stored_size(_path(stored.name)) != stored.size:
            return False
        try:
            self.verify(stored)
        except BackupError:
            return False
        return True

    def _stored_size(self, path: str) -> int | None:
        size = self.target.size(path)
        return size if size is None or self._cipher is None else plain_size(size)

    def _name_of(self, digest: bytes) -> str:
        return digest.hex() if self._cipher is None else self._cipher.name_of(digest)

    def read(self, stored: StoredObject, part: Part) -> Iterator[bytes]:
        """Yield the bytes of a part. All of the object is checked before, once, by its CRC if it
        has one. Raises BackupError.
        """
        if stored.name not in self._checked:
            if (part.start, part.length) == (0, stored.size):
                yield from self._checking(stored, is_thorough=False)
                return
            for _ in self._checking(stored, is_thorough=False):
                pass
        yield from self._pieces(stored, part.start, part.length)

    def verify(self, stored: StoredObject) -> None:
        """Read all of an object and check it against its name. Raises BackupError."""
        for _ in self._checking(stored, is_thorough=True):
            pass

    def _checking(self, stored: StoredObject, *, is_thorough: bool) -> Iterator[bytes]:
        """Yield the content, and raise BackupError at its end if it is not the object's.
        `is_thorough`: by its name; else by its CRC, if it has one.
        """
        by_name = is_thorough or stored.crc == NO_CRC
        digest, crc, size = hashlib.sha256(), 0, 0
        for piece in self._pieces(stored, 0, stored.size):
            if by_name:
                digest.update(piece)
            else:
                crc = crc32c(piece, crc)
            size += len(piece)
            yield piece
        is_right = self._name_of(digest.digest()) == stored.name if by_name else crc == stored.crc
        if size != stored.size or not is_right:
            raise BackupError(
                f"object {stored.name} of {self.target} is damaged: choose a backup without it "
                "(`tailrace backup verify --all` shows which)."
            )
        self._checked.add(stored.name)

    def _pieces(self, stored: StoredObject, start: int, length: int) -> Iterator[bytes]:
        if not _NAME.fullmatch(stored.name):
            raise BackupError(f"the manifest names an object {stored.name!r}: it is damaged.")
        path = _path(stored.name)
        size = self._stored_size(path)
        if size != stored.size:
            raise BackupError(
                f"object {stored.name} of {self.target} "
                + ("is missing." if size is None else f"has {size} bytes, not {stored.size}.")
            )
        if self._cipher is not None:
            yield from self._cipher.decrypted(
                stored.name, lambda at, count: self.target.read(path, at, count),
                self.target.size(path) or 0, start, length,
            )  # fmt: skip
            return
        end = start + length
        while start < end:
            piece = self.target.read(path, start, min(PIECE_BYTES, end - start))
            if not piece:
                raise BackupError(f"object {stored.name} of {self.target} is too short.")
            yield piece
            start += len(piece)

    # ---- retention -------------------------------------------------------------------------------

    def keep(self, count: int) -> int:
        """Remove all but the newest `count` backups, and objects that no other needs. Returns the
        number of backups removed. Raises BackupError if a manifest that stays cannot be read:
        nothing is known of the objects that it needs.
        """
        ids = self.backup_ids()
        old, kept = ids[:-count], ids[-count:]
        if not old:
            return 0
        needed = {stored.name for each in kept for stored in self.manifest(each).objects}
        with self.target.removing() as is_free:
            if not is_free:
                return 0
            for backup_id in old:
                self.target.remove(f"{BACKUPS}/{backup_id}.json")
            for path in self.target.names(OBJECTS):
                name = path.rpartition("/")[2]
                if name not in needed:
                    self.target.remove(path)
                    self._sizes.pop(name, None)
                    self._remove_marks([name] * (name in self._marked))
        return len(old)


def _path(name: str) -> str:
    return f"{OBJECTS}/{name[:2]}/{name}"


def _digest(pieces: Iterator[bytes]) -> tuple[bytes, int, int]:
    """SHA-256, bytes and CRC-32C of all pieces."""
    digest, size, crc = hashlib.sha256(), 0, 0
    for piece in pieces:
        digest.update(piece)
        crc = crc32c(piece, crc)
        size += len(piece)
    return digest.digest(), size, crc


def _same(pieces: Iterator[bytes], expected: bytes) -> Iterator[bytes]:
    """Yield the pieces, and raise BackupError if they are not those of the first reading."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    if digest.digest() != expected:
        raise BackupError("a file changed while it was read; run the backup again.")
