"""Parquet or Arrow files in a directory, which any reader of such directories sees grow, whole commits' worth of whole files.

A commit's files are written into `_tailrace/pending`, made durable, named by the commit (`tailrace.exporting.manifest`), and then moved to their places: the
intent comes first, as in a write-ahead log. So what a reader sees in the directory was committed, and never goes away again.

Owner: the process that holds the directory.
Invariants: a file in its place is named by a commit; only files of the last commit may still be pending.
Crash: before the commit, pending files belong to none: the next `open` removes them, and their rows are read again. Behind it, `open` moves those that are not
    in their places yet.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pyarrow as pa

from tailrace.client_log import logger
from tailrace.errors import InvalidRequestError, StorageError
from tailrace.exporting.held_directory import HeldDirectory
from tailrace.exporting.manifest import COMMITS, TEMPORARY, Commits, sync
from tailrace.exporting.partitioning import divided
from tailrace.exporting.state import Commit, ExportState, Step

PENDING = "_tailrace/pending"
ROW_GROUP_ROWS = 1 << 20


class FileTarget:
    """See the module's docstring."""

    def __init__(self, directory: str, form: str, compression: str, partition_by: str) -> None:
        """`form`: parquet or arrow."""
        self._held = HeldDirectory(directory)
        self._path = self._held.path
        self._pending = f"{self._path}/{PENDING}"
        self._commits = Commits(self._path)
        self._form, self._compression, self._by = form, compression, partition_by

    def open(self) -> ExportState | None:
        """See `Target`."""
        self._held.hold()
        last = self._commits.last()
        if last is None:
            if not self._is_new():
                raise InvalidRequestError(f"{self._path} holds what is of no export: export to an empty directory")
            shutil.rmtree(self._pending, ignore_errors=True)
            return None
        others = [name for name in last.files if not name.endswith(f".{self._form}")]
        if others:
            raise InvalidRequestError(
                f"{self._path} holds an export to other files ({others[0]}): give the same format, or another directory"
            )
        os.makedirs(self._pending, exist_ok=True)
        self._place(list(last.files))
        for name in os.listdir(self._pending):
            os.unlink(f"{self._pending}/{name}")
        return last.state

    def begin(self, state: ExportState) -> None:
        """See `Target`."""
        for name in ("_tailrace", "_tailrace/commits", PENDING):
            os.makedirs(f"{self._path}/{name}", exist_ok=True)
        sync(f"{self._path}/_tailrace")
        sync(self._path)
        self._commits.add(state, [], {"format": self._form})

    def commit(self, step: Step, after: ExportState) -> Commit:
        """See `Target`."""
        written: list[dict[str, Any]] = []
        self._held.check_held()
        try:
            for number, (directory, rows) in enumerate(divided(step.table, self._by) if step.table.num_rows else []):
                name = f"{directory}/" if directory else ""
                name += f"part-{after.number:012d}-{number:04d}.{self._form}"
                self._check_free(name)
                written.append({"path": name, "rows": rows.num_rows, "bytes": self._write(rows, name)})
            sync(self._pending)
            self._held.check_held()
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
        """See `Target`."""
        self._held.release()

    def _is_new(self) -> bool:
        """Whether nothing is there but what a first run leaves that was killed before it began."""
        return self._held.is_empty(but="_tailrace")

    def _check_free(self, name: str) -> None:
        """That the file is not in its place: then there was a commit of this number, and its rows are there. Raises StorageError."""
        if os.path.lexists(f"{self._path}/{name}"):
            raise StorageError(
                f"{self._path}/{name} is there, and no commit names it: {COMMITS} was put back to an earlier state, perhaps, and rows would be there twice. "
                "Export to another directory"
            )

    def _temporary(self, name: str) -> str:
        cut = name.replace("/", "%2F").encode()[-200:].decode(errors="ignore")
        return f"{self._pending}/{cut}{TEMPORARY}"

    def _write(self, rows: pa.Table, name: str) -> int:
        """Durable bytes under the temporary name; returns how many. Raises OSError with the path."""
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
        """Move those that are not in their places yet."""
        directories = set()
        for name in names:
            place, temporary = f"{self._path}/{name}", self._temporary(name)
            if not os.path.exists(temporary):
                continue  # it is in its place, or was and somebody removed it
            directory = os.path.dirname(place)
            if not os.path.isdir(directory):
                os.makedirs(directory, exist_ok=True)
                directories.add(self._path)
            os.rename(temporary, place)
            directories.add(directory)
        for directory in sorted(directories):
            sync(directory)

    def _forget_pending(self) -> None:
        """Give the room back, where that goes: the next `open` does it otherwise. What lies under the path of another's directory is not ours."""
        if not self._held.is_held():
            return
        try:
            for name in os.listdir(self._pending):
                os.unlink(f"{self._pending}/{name}")
        except OSError as error:
            logger.warning("export_pending_left directory=%s reason=%r", self._pending, str(error))


def write_rows(sink: Any, rows: pa.Table, form: str, compression: str) -> None:
    """One file. Raises OSError."""
    if form == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(rows, sink, compression=compression, row_group_size=ROW_GROUP_ROWS)
        return
    options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    with pa.ipc.new_file(sink, rows.schema, options=options) as writer:
        writer.write_table(rows)
