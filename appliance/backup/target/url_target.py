"""A URL of fsspec as the target of backups: s3://, gs://, sftp:// and others.

Owner: the backup that holds the lock.

Invariants:
- Objects are named by their content, and one that an intact manifest does not name is sent again:
  an upload that was cut off is never taken for whole.
- One backup at a time, by the object `lock`. It names its owner, who renews it. One that was not
  renewed for LOCK_STALE_S is left over from a killed backup and is taken over. The clocks of hosts
  that back up to one target must agree within minutes.

Crash: the lock stays for LOCK_STALE_S.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from appliance.backup.errors import BackupError, TargetLockedError

LOCK_STALE_S = 600
LOCK_RENEW_S = 60


class UrlTarget:
    """Objects below a URL."""

    is_local = False

    def __init__(self, url: str) -> None:
        """Raises BackupError if fsspec, or its driver for the URL, is missing."""
        try:
            import fsspec
        except ImportError:
            raise BackupError(
                f"{url} needs the package fsspec: pip install 'tailrace[backup]'"
            ) from None
        self._url = url
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise BackupError(f"{url} cannot be used: {error}") from None
        self._root = str(root).rstrip("/")
        self._token = os.urandom(8).hex()
        self._renewed_s = 0.0
        self._is_owner = False

    def __str__(self) -> str:
        """The URL without user and password."""
        head, found, rest = self._url.partition("://")
        host, slash, path = rest.partition("/")
        return f"{head}{found}{host.rpartition('@')[2]}{slash}{path}"

    @property
    def local_path(self) -> str | None:
        """The directory of this host that the target is; None if it is none."""
        protocol = self._files.protocol
        is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)
        return os.path.abspath(self._root) if is_local else None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def is_empty(self) -> bool:
        """True if nothing is below the URL but the lock."""
        return not [name for name in self.names("") if name != "lock"]

    def prepare(self, directories: Iterable[str]) -> None:
        """Make directories, for file systems that have some."""
        with self._errors():
            for name in ("", *directories):
                self._files.makedirs(self._path(name), exist_ok=True)

    # ---- locks -----------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the target for one backup. Raises BackupError if another one has it."""
        found = self._owner()
        if found is not None and found.get("token") != self._token:
            age_s = time.time() - float(found.get("renewed_s", 0))
            if age_s < LOCK_STALE_S:
                raise TargetLockedError(
                    f"another backup is writing to {self}: process {found.get('pid')} of host "
                    f"{found.get('host')}. If that one was killed, this can begin in "
                    f"{LOCK_STALE_S - age_s:.0f} s."
                )
        self._is_owner = True
        self._write_lock()
        if (self._owner() or {}).get("token") != self._token:
            self._is_owner = False
            raise TargetLockedError(f"another backup has begun to write to {self}.")

    def keep_lock(self) -> None:
        """Renew the lock when it is due. Raises BackupError if it was lost."""
        if not self._is_owner or time.monotonic() - self._renewed_s < LOCK_RENEW_S:
            return
        if (self._owner() or {}).get("token") != self._token:
            self._is_owner = False
            raise BackupError(f"another backup has taken {self}: this one was too slow.")
        self._write_lock()

    def _write_lock(self) -> None:
        content = {
            "token": self._token, "host": socket.gethostname(), "pid": os.getpid(),
            "renewed_s": time.time(),
        }  # fmt: skip
        self._put("lock", [orjson.dumps(content)])
        self._renewed_s = time.monotonic()

    def _owner(self) -> dict[str, Any] | None:
        try:
            found = orjson.loads(self.read("lock", 0, 4096))
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        return found if isinstance(found, dict) else None

    def unlock(self) -> None:
        """Give the target back."""
        if self._is_owner:
            self._is_owner = False
            if (self._owner() or {}).get("token") == self._token:
                self.remove("lock")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Restores do not lock a URL: use no `--keep` while one runs."""
        yield

    @contextmanager
    def removing(self) -> Iterator[bool]:
        """See `LocalTarget.removing`."""
        yield True

    # ---- objects ---------------------------------------------------------------------------------

    def names(self, directory: str) -> list[str]:
        """Names of the objects below a directory, relative to the target."""
        with self._errors():
            try:
                self._files.invalidate_cache()
                found = self._files.find(self._path(directory))
            except FileNotFoundError:
                return []
        start = len(self._root) + 1
        return sorted(str(path)[start:] for path in found)

    def sizes(self, directory: str) -> dict[str, int]:
        """Names as `names` returns them -> bytes."""
        with self._errors():
            try:
                self._files.invalidate_cache()
                found = self._files.find(self._path(directory), detail=True)
            except FileNotFoundError:
                return {}
        start = len(self._root) + 1
        return {str(path)[start:]: int(info["size"]) for path, info in found.items()}

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if there is none."""
        with self._errors():
            try:
                self._files.invalidate_cache()
                return int(self._files.size(self._path(name)))
            except FileNotFoundError:
                return None

    def read(self, name: str, start: int, length: int) -> bytes:
        """Read a part of an object; less at its end. Raises FileNotFoundError, BackupError."""
        with self._errors():
            return bytes(self._files.cat_file(self._path(name), start=start, end=start + length))

    def put(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write an object. Raises BackupError, and then it does not count."""
        self.keep_lock()
        self._put(name, pieces)

    def _put(self, name: str, pieces: Iterable[bytes]) -> None:
        with self._errors():
            file = self._files.open(self._path(name), "wb")
            try:
                for piece in pieces:
                    file.write(piece)
            except BaseException:
                discard = getattr(file, "discard", None)
                if discard is not None:
                    try:
                        discard()
                    except Exception:  # the first error is the one to report
                        pass
                raise
            file.close()

    def share(self, name: str, source_fd: int, source_path: str) -> bool:
        """A URL shares nothing with a disk."""
        del name, source_fd, source_path
        return False

    def sync(self) -> None:
        """Nothing to do: an object that was written is durable."""

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with self._errors():
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                pass

    def remove_temporaries(self) -> None:
        """There are none."""

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the drivers' errors, which are of many kinds, into sentences."""
        try:
            yield
        except (BackupError, FileNotFoundError):
            raise
        except Exception as error:  # drivers raise errors of their own
            raise BackupError(
                f"{self} cannot be read or written: {type(error).__name__}: {error}"
            ) from error
