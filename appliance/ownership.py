"""One data directory, one owner: the lock that every writing process holds, the identity, and the manifest of what is in shared memory.

Owner: the supervisor.
Files in the data directory: `instance.lock` (flock'd on one open file description that every child inherits, so it is free only when all
of them are
    dead; its text names the holder), `instance.json` (identity), `shm.json` (the manifest: which regions exist, which processes; removed
        by a clean stop).
Invariants: nobody writes in the directory without holding the lock; the manifest is on disk before the first region is made.
Crash: children die with their supervisor, within moments; a new start waits for that. Processes recorded in the manifest that are still
there
    (stopped, for instance) are killed by pidfd before the take-over, so that none of them ever writes again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import orjson

from shm.region import boot_id, remove
from tailrace.data_directory import IDENTITY_FILE, LOCK_FILE, MANIFEST_FILE, RESERVE_FILE

START_ROOM_BYTES = 1 << 20
TAKE_OVER_MS = 5_000
"""How long a new start waits for the children of a dead supervisor."""


class DataDirectoryError(RuntimeError):
    """The data directory cannot be used; the sentence says why and what to do."""


@dataclass(slots=True)
class Ownership:
    """A held data directory."""

    path: str
    lock_fd: int
    instance: bytes
    """Of the directory; the first directory's is the appliance's."""

    @property
    def prefix(self) -> str:
        """What this instance's shared-memory names begin with."""
        return f"/tailrace-{self.instance.hex()[:12]}"

    # ---- manifest --------------------------------------------------------------------------------------------------------------------

    def read_manifest(self) -> dict[str, Any] | None:
        """What an earlier run left, or None. One of another boot names memory that is gone."""
        try:
            with open(f"{self.path}/{MANIFEST_FILE}", "rb") as file:
                manifest: dict[str, Any] = orjson.loads(file.read())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        return manifest if manifest.get("boot_id") == boot_id().hex() else None

    def has_manifest(self) -> bool:
        """Whether an earlier run did not end cleanly."""
        return os.path.exists(f"{self.path}/{MANIFEST_FILE}")

    def write_manifest(
        self,
        regions: dict[str, str],
        old_rings: list[dict[str, Any]],
        directories: list[str],
        worker_directories: dict[int, str],
        lost_memory: bool,
    ) -> None:
        """Record the regions of this run, its data directories by identity, which of them each worker's ring is for, and the rings of an earlier run that
        are not drained yet. `lost_memory`: an earlier run's rings are gone, and the logs have not been recovered since.
        """
        _write_durably(
            f"{self.path}/{MANIFEST_FILE}",
            orjson.dumps(
                {
                    "boot_id": boot_id().hex(),
                    "pid": os.getpid(),
                    "regions": regions,
                    "old": old_rings,
                    "directories": directories,
                    "lost_memory": lost_memory,
                    "worker_directories": {str(worker): directory for worker, directory in worker_directories.items()},
                }
            ),
        )

    def record_holder(self, pids: dict[str, int]) -> None:
        """Write into the lock file who holds it: for the refusal of a second start, and for a take-over."""
        me = os.getpid()
        text = orjson.dumps(
            {"pid": me, "start_ticks": _start_ticks(me), "children": [[name, pid, _start_ticks(pid)] for name, pid in pids.items()]}
        )
        os.pwrite(self.lock_fd, text.ljust(4096), 0)

    def remove_manifest(self) -> None:
        try:
            os.unlink(f"{self.path}/{MANIFEST_FILE}")
        except FileNotFoundError:
            pass


def _write_durably(path: str, data: bytes) -> None:
    temporary = f"{path}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        os.write(fd, data)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)


def take(path: str) -> Ownership:
    """Make the directory if needed and take it. Raises DataDirectoryError."""
    try:
        os.makedirs(path, mode=0o750, exist_ok=True)
        lock_fd = os.open(f"{path}/{LOCK_FILE}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise DataDirectoryError(
            f"cannot write in the data directory {path}: {error.strerror}. Make it writable for this user or choose another with --data-dir."
        ) from None
    try:
        _lock(path, lock_fd)
        _make_room(path)
        instance = _identity(path)
    except OSError as error:
        os.close(lock_fd)
        raise DataDirectoryError(
            f"cannot write in the data directory {path}: {error.strerror}. Make it writable for this user or choose another with --data-dir."
        ) from None
    except DataDirectoryError:
        os.close(lock_fd)
        raise
    return Ownership(path, lock_fd, instance)


def _lock(path: str, lock_fd: int) -> None:
    """Wait a bounded time for a dead supervisor's children; refuse at once while the supervisor lives."""
    deadline = time.monotonic() + TAKE_OVER_MS / 1000
    killed = False
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        holder = _holder(lock_fd)
        if holder is not None and _is_alive(holder.get("pid", 0)) and holder.get("start_ticks") in (None, _start_ticks(holder["pid"])):
            raise DataDirectoryError(
                f"the data directory {path} is in use by the appliance with process id {holder['pid']}. "
                "Stop that one, or choose another directory with --data-dir."
            )
        if holder is not None and not killed:
            _kill_recorded(holder)
            killed = True
        if time.monotonic() > deadline:
            raise DataDirectoryError(
                f"the data directory {path} is still held by processes of an appliance that died. Look for processes named tr-* and kill them."
            )
        time.sleep(0.01)


def _make_room(path: str) -> None:
    """On a disk that is all but full, the reserve file (see `workers.disk_space`) gives its room to the start."""
    reserve = f"{path}/{RESERVE_FILE}"
    found = os.statvfs(path)
    if os.path.exists(reserve) and found.f_bavail * found.f_frsize < max(START_ROOM_BYTES, os.path.getsize(reserve)):
        os.unlink(reserve)


def _holder(lock_fd: int) -> dict[str, Any] | None:
    try:
        holder: dict[str, Any] = orjson.loads(os.pread(lock_fd, 65536, 0))
    except orjson.JSONDecodeError:
        return None
    return holder


def _is_alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    return _state(pid) not in (None, "Z", "X")


def _state(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid, its identity."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1


def _kill_recorded(holder: dict[str, Any]) -> None:
    """Kill what is left of a dead supervisor's children, each only if it is still the process that was recorded."""
    for _name, pid, start_ticks in holder.get("children", []):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if start_ticks >= 0 and _start_ticks(pid) == start_ticks:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            pass
        finally:
            os.close(pidfd)


def _identity(path: str) -> bytes:
    """16 bytes made when the directory was first used."""
    file_name = f"{path}/{IDENTITY_FILE}"
    try:
        with open(file_name, "rb") as file:
            return bytes.fromhex(orjson.loads(file.read())["instance"])
    except FileNotFoundError:
        pass
    except (orjson.JSONDecodeError, KeyError, ValueError, TypeError):
        raise DataDirectoryError(
            f"{file_name} is damaged. Restore it from a backup, or remove it and {path}/{MANIFEST_FILE} if no shared memory of this directory is left."
        ) from None
    instance = os.urandom(16)
    _write_durably(file_name, orjson.dumps({"instance": instance.hex(), "format": 1}))
    return instance


def directory_id(path: str) -> str:
    """The identity of a data directory that was taken once, as hexadecimal digits. Raises DataDirectoryError."""
    return _identity(path).hex()


def remove_regions(names: list[str]) -> int:
    """Unlink regions; answers how many there were."""
    return sum(1 for name in names if remove(name))
