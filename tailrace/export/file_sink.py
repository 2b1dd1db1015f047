"""File sink: Parquet or Arrow files in a directory, which its readers see grow by whole files.

A commit's files are written to `_tailrace/pending`, synced, listed in the commit
(`tailrace.export.commit_log`), and then moved to their places. The intent comes first, as in a
write-ahead log. So a reader of the directory sees only committed files, which are never removed.

Owner: the process that holds the directory's lock.

Invariants:
- A file in its place is listed in a commit.
- Only files of the last commit may still be pending.

Crash: pending files from before the commit are removed by the next `open`, and their rows are read
again. After the commit, `open` moves the remaining files to their places.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pyarrow as pa

from tailrace.core.errors import InvalidRequestError, StorageError
from tailrace.core.log import logger
from tailrace.export.checkpoint import Commit, ExportCheckpoint, Step
from tailrace.export.commit_log import COMMITS, TEMPORARY, CommitLog, sync
from tailrace.export.directory_lock import DirectoryLock
from tailrace.export.hive_partitioning import divided

PENDING = "_tailrace/pending"
ROW_GROUP_ROWS = 1 << 20


class FileSink:
    """A sink that writes Parquet or Arrow files."""

    def __init__(self, directory: str, form: str, compression: str, partition_by: str) -> None:
        """`form` is parquet or arrow."""
        self._lock = DirectoryLock(directory)
        self._path = self._lock.path
        self._pending = f"{self._path}/{PENDING}"
        self._commits = CommitLog(self._path)
        self._form, self._compression, self._by = form, compression, partition_by

    def open(self) -> ExportCheckpoint | None:
        """Open the directory and return the state of the last commit, as `Sink` specifies."""
        self._lock.acquire()
        last = self._commits.last()
        if last is None:
            if not self._is_new():
                raise InvalidRequestError(
                    f"{self._path} is not empty and has no export; export to an empty directory"
                )
            shutil.rmtree(self._pending, ignore_errors=True)
            return None
        others = [name for name in last.files if not name.endswith(f".{self._form}")]
        if others:
            raise InvalidRequestError(
                f"{self._path} has an export in another format ({others[0]}); use the same format, "
                "or another directory"
            )
        os.makedirs(self._pending, exist_ok=True)
        self._place(list(last.files))
        for name in os.listdir(self._pending):
            os.unlink(f"{self._pending}/{name}")
        return last.state

    def begin(self, state: ExportCheckpoint) -> None:
        """Create the directories and the first commit, as `Sink` specifies."""
        for name in ("_tailrace", "_tailrace/commits", PENDING):
            os.makedirs(f"{self._path}/{name}", exist_ok=True)
        sync(f"{self._path}/_tailrace")
        sync(self._path)
        self._commits.add(state, [], {"format": self._form})

    def commit(self, step: Step, after: ExportCheckpoint) -> Commit:
        """Write, commit and place the files of a step, as `Sink` specifies."""
        written: list[dict[str, Any]] = []
        self._lock.check_locked()
        try:
            for number, (directory, rows) in enumerate(
                divided(step.table, self._by) if step.table.num_rows else []
            ):
                name = f"{directory}/" if directory else ""
                name += f"part-{after.number:012d}-{number:04d}.{self._form}"
                self._check_free(name)
                written.append(
                    {"path": name, "rows": rows.num_rows, "bytes": self._write(rows, name)}
                )
            sync(self._pending)
            self._lock.check_locked()
            more = {"ranges": step.ranges, "left_out": [list(item) for item in step.left_out]}
            self._commits.add(after, written, more)
        except OSError:
            if not self._commits.has(after.number):
                self._forget_pending()
            raise
        self._place([item["path"] for item in written])
        return Commit(
            after.number,
            step.table.num_rows,
            step.ranges,
            step.left_out,
            tuple(item["path"] for item in written),
            sum(item["bytes"] for item in written),
        )

    def close(self) -> None:
        """Release the directory, as `Sink` specifies."""
        self._lock.release()

    def _is_new(self) -> bool:
        """True if the directory has at most what a first run leaves if
        it is killed before it begins.
        """
        return self._lock.is_empty(but="_tailrace")

    def _check_free(self, name: str) -> None:
        """Check that no file of this name exists, which would mean an earlier commit of this
        number.

        Raises StorageError.
        """
        if os.path.lexists(f"{self._path}/{name}"):
            raise StorageError(
                f"{self._path}/{name} exists, but no commit lists it; {COMMITS} may have been "
                "restored to an earlier state, and rows would be duplicated: export to another "
                "directory"
            )

    def _temporary(self, name: str) -> str:
        cut = name.replace("/", "%2F").encode()[-200:].decode(errors="ignore")
        return f"{self._pending}/{cut}{TEMPORARY}"

    def _write(self, rows: pa.Table, name: str) -> int:
        """Write a durable file under the temporary name; return its size. Raises OSError with the
        path.
        """
        path = self._temporary(name)
        try:
            with pa.OSFile(path, "wb") as sink:
                write_rows(sink, rows, self._form, self._compression)
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), path) from None
        sync(path)
        return os.path.getsize(path)

    def _place(self, names: list[str]) -> None:
        """Move the files that are not yet in their places."""
        directories = set()
        for name in names:
            place, temporary = f"{self._path}/{name}", self._temporary(name)
            if not os.path.exists(temporary):
                continue  # it is in its place, or was removed from there
            directory = os.path.dirname(place)
            if not os.path.isdir(directory):
                os.makedirs(directory, exist_ok=True)
                directories.add(self._path)
            os.rename(temporary, place)
            directories.add(directory)
        for directory in sorted(directories):
            sync(directory)

    def _forget_pending(self) -> None:
        """Remove pending files after a failure, where possible; else the next `open` does.

        If the directory at the path is another one now, its files are not touched.
        """
        if not self._lock.is_locked():
            return
        try:
            for name in os.listdir(self._pending):
                os.unlink(f"{self._pending}/{name}")
        except OSError as error:
            logger.warning("export_pending_left directory=%s reason=%r", self._pending, str(error))


def write_rows(sink: Any, rows: pa.Table, form: str, compression: str) -> None:
    """Write one file. Raises OSError."""
    if form == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(rows, sink, compression=compression, row_group_size=ROW_GROUP_ROWS)
        return
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    with pa.ipc.new_file(sink, rows.schema, options=options) as writer:
        writer.write_table(rows)
