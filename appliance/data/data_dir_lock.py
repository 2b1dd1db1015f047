"""The lock of a data directory: one owner, whose processes all hold it.

Owner: the supervisor. There are two locks: an flock on the directory itself, which cannot be
removed from under its holder, and one on `instance.lock`, which earlier versions check and whose
text names the holder. Both are on open file descriptions that every child inherits, so they are
free only when all processes are dead.
Invariants:
- No process writes in the directory without the lock.
- A directory of another user, or one that every user may write in, is refused.
- Links are never followed.
- The lock's file is made again when it is removed while the appliance runs.
Crash: children die with their supervisor, within moments, and a new start waits for that. Processes
recorded in the lock's file that still exist (stopped, for instance) are killed by pidfd before the
take-over, so that none of them ever writes again.

Root, too, takes only directories of its own: the service could not open what root wrote in another
user's. systemd's StateDirectory and the directory that `tailrace serve` makes belong to the right
user. In a container give the volume to the user that the appliance runs as.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pwd
import signal
import stat
import time
from dataclasses import dataclass
from typing import Any

from appliance.data import region_manifest as manifest
from appliance.data.data_dir_identity import directory_id, identify, known_identity
from appliance.data.directory_errors import DataDirectoryError, unusable
from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import LOCK_FILE, RESERVE_FILE, Identity

__all__ = ["DataDirLock", "DataDirectoryError", "directory_id", "inspect", "take"]

logger = logging.getLogger("appliance.supervise.supervisor")

START_ROOM_BYTES = 1 << 20
TAKE_OVER_MS = 5_000
"""Longest wait of a new start for the children of a dead supervisor."""
_NO_DIRECTORY_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of network file systems that cannot lock a directory."""


@dataclass(slots=True)
class DataDirLock:
    """A held data directory."""

    path: str
    directory_fd: int
    lock_fd: int
    identity: Identity

    @property
    def instance(self) -> bytes:
        """Identity of the directory in the catalog; the first directory's is the appliance's."""
        return self.identity.instance

    @property
    def lock_fds(self) -> tuple[int, int]:
        """Descriptors of the locks, for children."""
        return self.directory_fd, self.lock_fd

    def record_holder(self, pids: dict[str, int], addresses: list[str]) -> None:
        """Write the holder into the lock's file, for the error of a second start and for a
        take-over, and the address for readers of the directory.

        Raises: OSError.
        """
        me = os.getpid()
        text = checked_json.encode(
            {
                "pid": me,
                "start_ticks": _start_ticks(me),
                "children": [[name, pid, _start_ticks(pid)] for name, pid in pids.items()],
                "addresses": addresses,
            }
        )
        checked_json.write_all(self.lock_fd, text, 0)
        os.ftruncate(self.lock_fd, len(text))

    def forget_holder(self) -> None:
        """Clear the lock's file after a clean stop.

        Raises: OSError.
        """
        os.ftruncate(self.lock_fd, 0)

    def close(self) -> None:
        """Let go of the directory: for a command, which has no processes."""
        _close([self.directory_fd, self.lock_fd])

    def has_lost_its_file(self) -> bool:
        """Make the lock's file again if it was removed or replaced; return True and log if so.

        Raises: OSError.
        """
        lock_stat, directory = os.fstat(self.lock_fd), os.fstat(self.directory_fd)
        try:
            at_path = os.stat(self.path)
            if (at_path.st_dev, at_path.st_ino) != (directory.st_dev, directory.st_ino):
                return False  # moved away while in use: every process that opens a file says so
            found = os.lstat(f"{self.path}/{LOCK_FILE}")
        except FileNotFoundError:
            if not os.path.isdir(self.path):
                return False
        else:
            if (found.st_dev, found.st_ino) == (lock_stat.st_dev, lock_stat.st_ino):
                return False
            os.unlink(f"{self.path}/{LOCK_FILE}")
        logger.error(
            "lock_file_gone path=%s/%s recreated=yes advice='leave it alone: it names the "
            "process that holds the directory'",
            self.path,
            LOCK_FILE,
        )
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        made = os.open(f"{self.path}/{LOCK_FILE}", flags, 0o600)
        fcntl.flock(made, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(self.lock_fd)
        self.lock_fd = made
        return True


def take(path: str) -> DataDirLock:
    """Make the directory if needed and take it. Raises DataDirectoryError."""
    opened: list[int] = []
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        directory_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(directory_fd)
        found = os.fstat(directory_fd)
        _check_owner(path, found)
        _lock(path, directory_fd, opened)
        now = os.stat(path)
        if (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino):
            raise DataDirectoryError(
                f"the data directory {path} was replaced by another while this start waited for "
                "it; start again."
            )
        _make_room(path)
        return DataDirLock(path, directory_fd, opened[1], identify(path, found))
    except OSError as error:
        _close(opened)
        raise unusable(path, error) from None
    except DataDirectoryError:
        _close(opened)
        raise


def inspect(path: str) -> Identity | None:
    """Check what `take` would do, and change nothing.

    Returns: the identity of a directory that may be taken; None if the directory is new.
    Raises: DataDirectoryError where `take` would, as far as that is known beforehand.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "", path)
        _check_owner(path, found)
        _check_writable(path)
        pid = _supervisor_of(path, _holder(path))
        if pid is not None:
            raise _in_use(path, pid)
        return known_identity(path)
    except FileNotFoundError:
        above = os.path.dirname(path)
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        try:
            _check_writable(above)
        except OSError as error:
            raise unusable(path, error) from None
        return None
    except OSError as error:
        raise unusable(path, error) from None


def _check_writable(path: str) -> None:
    """Raises OSError."""
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, "", path)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise OSError(
            errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES, "", path
        )


def _in_use(path: str, pid: int) -> DataDirectoryError:
    return DataDirectoryError(
        f"the data directory {path} is in use by the appliance with process id {pid}. "
        "Stop that one, or choose another directory with --data-dir."
    )


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _check_owner(path: str, found: os.stat_result) -> None:
    """Check the directory's owner and mode.

    Raises: DataDirectoryError when another user owns the directory or every user may write in it.
    """
    me = os.geteuid()
    if found.st_uid != me:
        raise DataDirectoryError(
            f"the data directory {path} belongs to {_user(found.st_uid)}, this process runs as "
            f"{_user(me)}. Run it as {_user(found.st_uid)}, give the "
            f"directory to {_user(me)} with everything in it (chown -R), or choose a directory of "
            "its own below it with --data-dir."
        )
    if found.st_mode & stat.S_IWOTH:
        raise DataDirectoryError(
            f"every user of this host may write in the data directory {path}. Forbid it (chmod "
            "o-w), or choose another with --data-dir."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IROTH | stat.S_IXOTH):
        logger.warning(
            "data_dir_open_to_others path=%s mode=%o advice='chmod 0700; only the files are "
            "private to their owner'",
            path,
            stat.S_IMODE(found.st_mode),
        )


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


# ---- lock ----------------------------------------------------------------------------------------


def _lock(path: str, directory_fd: int, opened: list[int]) -> None:
    """Take both locks, the directory's first; adds the file's descriptor to `opened`. Waits a
    bounded time for a dead supervisor's children; refuses at once while the supervisor lives.
    Raises DataDirectoryError, OSError.
    """
    deadline = time.monotonic() + TAKE_OVER_MS / 1000
    killed = False
    while not (_try_lock_directory(path, directory_fd) and _try_lock_file(path, opened)):
        holder = _holder(path)
        pid = _supervisor_of(path, holder)
        if pid is not None:
            raise _in_use(path, pid)
        if holder is not None and not killed:
            _kill_recorded(holder)
            killed = True
        if time.monotonic() > deadline:
            raise DataDirectoryError(
                f"the data directory {path} is still held by processes of an appliance that died. "
                "Look for processes named tr-* and kill them."
            )
        time.sleep(0.01)


def _try_lock_directory(path: str, directory_fd: int) -> bool:
    try:
        fcntl.flock(directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno not in _NO_DIRECTORY_LOCKS:
            raise
        logger.warning(
            "directory_not_locked path=%s error=%r locked=%s", path, str(error), LOCK_FILE
        )
    return True


def _try_lock_file(path: str, opened: list[int]) -> bool:
    name = f"{path}/{LOCK_FILE}"
    if len(opened) < 2:
        opened.append(
            os.open(
                name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
            )
        )
        if not stat.S_ISREG(os.fstat(opened[1]).st_mode):
            raise DataDirectoryError(f"{name} is not a regular file; move it away and start again.")
        os.fchmod(opened[1], 0o600)
    try:
        fcntl.flock(opened[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _make_room(path: str) -> None:
    """Free the space of the reserve file (see `workers.segment.disk_space`) for a start on a full
    disk.
    """
    reserve = f"{path}/{RESERVE_FILE}"
    found = os.statvfs(path)
    if os.path.isfile(reserve) and found.f_bavail * found.f_frsize < max(
        START_ROOM_BYTES, os.lstat(reserve).st_size
    ):
        os.unlink(reserve)


# ---- holder --------------------------------------------------------------------------------------


def _holder(path: str) -> dict[str, Any] | None:
    """The holder that the lock's file names; None if it names none."""
    try:
        found = checked_json.decode(checked_json.read(f"{path}/{LOCK_FILE}"))
    except OSError:
        return None
    return found if isinstance(found, dict) else None


def _supervisor_of(path: str, holder: dict[str, Any] | None) -> int | None:
    """The process id of a living supervisor, by the lock's file, or by the manifest if that is
    missing.
    """
    if holder is not None:
        pid = int(holder.get("pid", 0))
        return (
            pid
            if _is_alive(pid) and holder.get("start_ticks") in (None, _start_ticks(pid))
            else None
        )
    described = manifest.read(path).manifest
    return (
        described.pid
        if described is not None and _comm(described.pid).startswith("tr-supervisor")
        else None
    )


def _comm(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    """True if a process exists and is not a zombie."""
    return _state(pid) not in (None, "Z", "X")


def _state(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot, which with the pid identifies it."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1


def _kill_recorded(holder: dict[str, Any]) -> None:
    """Kill the remaining children of a dead supervisor, each only if it is still the recorded
    process.
    """
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
