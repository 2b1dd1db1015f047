"""The audit log on disk: appended, synced, rotated.

Files are `audit-<seq of the first line, 20 digits>.jsonl`. `audit-head.json` has number and hash of
the last synced line, so that a cut at the end is found.

Owner: the controller.

Invariants:
- A line is written once and never changed. What `append` has returned for is on the disk.
- A failed append leaves whole lines only, and the next one has the same number.
- The head is never ahead of the synced lines.

Crash: a torn last line is cut at the next start, and a line of it says so. The head may be behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from appliance.audit.chain import ZERO, check_line, encode_line, line_hash
from appliance.data.credentials import named_credential

PREFIX, SUFFIX = "audit-", ".jsonl"
HEAD = "audit-head.json"
MODE = 0o600


def file_name(seq: int) -> str:
    return f"{PREFIX}{seq:020d}{SUFFIX}"


def audit_files(directory: str) -> list[str]:
    """Names of the files, oldest first."""
    return sorted(
        name for name in os.listdir(directory) if name.startswith(PREFIX) and name.endswith(SUFFIX)
    )


def read_key(path: str) -> bytes:
    """The content of a key file, without white space around it. Raises OSError, ValueError."""
    if not path:
        return b""
    given = named_credential(path)
    if given is not None:
        key = given.strip()
    else:
        with open(path, "rb") as file:
            key = file.read(64 << 10).strip()
    if len(key) < 16:
        raise ValueError(f"the audit key file {path} has {len(key)} bytes; give at least 16")
    return key


def head_text(seq: int, digest: str, key: bytes) -> bytes:
    """Content of the head's file."""
    text = orjson.dumps({"seq": seq, "hash": digest})
    return orjson.dumps({"seq": seq, "hash": digest, "mac": line_hash(text, key)})


class AuditLog:
    """The log of one appliance."""

    def __init__(
        self,
        directory: str,
        *,
        key: bytes,
        file_bytes: int,
        files_max: int,
        wall_us: Callable[[], int],
        publish: Callable[[bytes], None] | None = None,
    ) -> None:
        """Open or make the log. `files_max`: files kept, 0: all. `publish` gets each line that is
        on the disk. Raises OSError.
        """
        self._directory = directory
        self._key = key
        self._file_bytes = file_bytes
        self._files_max = files_max
        self._wall_us = wall_us
        self._publish = publish
        self._fd = -1
        self._size = 0
        self._seq, self._hash = 0, ZERO
        os.makedirs(directory, mode=0o700, exist_ok=True)
        torn = self._continue()
        if torn:
            self.append([{"event": "log_repaired", "cut_bytes": torn}])

    def append(self, events: Sequence[dict[str, Any]]) -> None:
        """Write events as lines, and sync them. Raises OSError; then none of them is written."""
        if self._fd < 0 or self._size >= self._file_bytes:
            self._open(self._seq + 1)
        lines, seq, digest = [], self._seq, self._hash
        for event in events:
            seq += 1
            line, digest = encode_line(
                seq, digest, {"time_us": self._wall_us(), **event}, self._key
            )
            lines.append(line)
        data = b"".join(lines)
        try:
            _write_all(self._fd, data)
            os.fdatasync(self._fd)
        except OSError:
            self._cut_back()
            raise
        self._size += len(data)
        self._seq, self._hash = seq, digest
        self._write_head()
        if self._publish is not None:
            for line in lines:
                self._publish(line)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ---- files -----------------------------------------------------------------------------------

    def _continue(self) -> int:
        """Find the end of the log. Returns the bytes of a torn line that were cut."""
        names = audit_files(self._directory)
        if not names:
            return 0
        path = os.path.join(self._directory, names[-1])
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        content = _read_all(self._fd)
        end = content.rfind(b"\n") + 1
        torn = len(content) - end
        if torn:
            os.ftruncate(self._fd, end)
        self._size = end
        last = content[:end].rstrip(b"\n").rpartition(b"\n")[2]
        if last:
            try:
                value, _ = check_line(last, self._key)
                self._seq, self._hash = int(value["seq"]), str(value.get("hash", ZERO))
            except ValueError:
                self._seq, self._hash = self._after_damage(names[-1]), line_hash(last, b"")
        else:
            self._seq = int(names[-1].removeprefix(PREFIX).removesuffix(SUFFIX)) - 1
            self._hash = self._hash_before(names[:-1])
        return torn

    def _after_damage(self, name: str) -> int:
        """A number above those of a file whose end is damaged. The verifier reports the gap."""
        first = int(name.removeprefix(PREFIX).removesuffix(SUFFIX))
        return first + self._size // 64

    def _hash_before(self, names: Sequence[str]) -> str:
        for name in reversed(names):
            with open(os.path.join(self._directory, name), "rb") as file:
                last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
            if last:
                return str(orjson.loads(last).get("hash", ZERO))
        return ZERO

    def _open(self, seq: int) -> None:
        """Begin the next file, and remove the oldest beyond the bound."""
        path = os.path.join(self._directory, file_name(seq))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, MODE)
        _sync_directory(self._directory)
        self.close()
        self._fd, self._size = fd, os.fstat(fd).st_size
        names = audit_files(self._directory)
        if self._files_max and len(names) > self._files_max:
            gone = names[: len(names) - self._files_max]
            first = int(names[len(gone)].removeprefix(PREFIX).removesuffix(SUFFIX))
            # The line is on the disk before the files are gone: what is missing is accounted for.
            size, seq_before, hash_before = self._size, self._seq, self._hash
            event = {"time_us": self._wall_us(), "event": "files_removed", "through": first - 1}
            line, digest = encode_line(seq, hash_before, event, self._key)
            try:
                _write_all(self._fd, line)
                os.fdatasync(self._fd)
            except OSError:
                os.ftruncate(self._fd, size)
                self._seq, self._hash = seq_before, hash_before
                raise
            self._size += len(line)
            self._seq, self._hash = seq, digest
            for name in gone:
                os.unlink(os.path.join(self._directory, name))

    def _cut_back(self) -> None:
        """Remove what a failed append has written."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self.close()  # the next append begins a file; the verifier reports the torn line

    def _write_head(self) -> None:
        """Replace the head's file. A failure leaves an earlier one, which is right too."""
        path = os.path.join(self._directory, HEAD)
        try:
            fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, MODE)
            with os.fdopen(fd, "wb") as file:
                file.write(head_text(self._seq, self._hash, self._key))
            os.replace(f"{path}.new", path)
        except OSError:
            return


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]


def _read_all(fd: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return file.read()


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
