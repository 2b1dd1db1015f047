"""Delta Lake sink: rows and offsets in one commit of a table, through the package `deltalake`.

The exported offsets are Delta's transaction identifiers (`txn` actions: application id and version,
PROTOCOL.md, "Transaction Identifiers"), which the log keeps for writers of this kind. The
application is a partition of the topic, the version its first offset that is not exported. They
outlive compaction and the log's clean-up. The table's description names the exported topic, from
the first commit on.

Owner: the process that holds the directory's lock.

Crash: a commit is complete, with rows and offsets, or absent. Files of an absent one are in no
version of the table, and `vacuum` removes them.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from tailrace.core.errors import InvalidRequestError, NotSupportedError, StorageError
from tailrace.export import hive_partitioning
from tailrace.export.checkpoint import Commit, ExportCheckpoint, Step
from tailrace.export.directory_lock import DirectoryLock
from tailrace.export.refusals import keeps, plain, retyped_error, sink_error

INSTALL = "format=delta needs the package deltalake: pip install 'tailrace[delta]'"
KIND = "tailrace-export"


class DeltaSink:
    """A sink that appends to a Delta Lake table."""

    def __init__(self, directory: str, partition_by: str) -> None:
        """Import deltalake. Raises NotSupportedError if it is missing."""
        try:
            import deltalake
        except ModuleNotFoundError:
            raise NotSupportedError(INSTALL) from None
        self._delta: Any = deltalake
        self._lock = DirectoryLock(directory)
        self._by = partition_by
        self._checked: pa.Schema | None = None
        """Columns that the table has with the same types."""

    def open(self) -> ExportCheckpoint | None:
        """Open the table and return its state, as `Sink` specifies."""
        self._lock.acquire()
        path = self._lock.path
        if not self._delta.DeltaTable.is_deltatable(path):
            if not self._lock.is_empty() and not self._lock.is_marked():
                raise InvalidRequestError(
                    f"{path} is not empty and has no Delta table; export to an empty directory"
                )
            return None
        table = self._delta.DeltaTable(path)
        try:
            about = json.loads(table.metadata().description or "")
            topic, topic_id, by = about[KIND], str(about["topic_id"]), str(about["partition_by"])
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(
                f"{path} is a Delta table but not an export; export to another directory"
            ) from None
        offsets: dict[int, int] = {}
        while (
            offset := table.transaction_version(application(topic_id, len(offsets)))
        ) is not None:
            offsets[len(offsets)] = offset
        if not offsets:
            raise StorageError(
                f"{path} has no exported offsets: its transaction identifiers were removed; export "
                "to another directory"
            )
        return ExportCheckpoint(topic, topic_id, offsets, by, table.version())

    def begin(self, state: ExportCheckpoint) -> None:
        """Mark the directory, so that files of an unfinished first commit do not look foreign.

        The first commit creates the table.
        """
        self._lock.mark()

    def commit(self, step: Step, after: ExportCheckpoint) -> Commit:
        """Append rows and offsets in one commit, as `Sink` specifies."""
        self._lock.check_locked()
        if self._by:
            hive_partitioning.check_count(
                self._by, len(step.table.column(hive_partitioning.column_name(self._by)).unique())
            )
        path = self._lock.path
        is_new = not self._delta.DeltaTable.is_deltatable(path)
        if not is_new:
            self._check_types(path, step.table)
        about = json.dumps(
            {KIND: after.topic, "topic_id": after.topic_id, "partition_by": self._by}
        )
        made: dict[str, Any] = (
            {"name": after.topic, "description": about} if is_new else {"schema_mode": "merge"}
        )
        if is_new and self._by:
            made["partition_by"] = [hive_partitioning.column_name(self._by)]
        reached = [
            self._delta.Transaction(application(after.topic_id, p), offset)
            for p, offset in sorted(after.next_offsets.items())
        ]
        left_out = json.dumps([list(item) for item in step.left_out])
        properties = self._delta.CommitProperties(
            custom_metadata={"tailrace.left_out": left_out}, app_transactions=reached
        )
        try:
            self._delta.write_deltalake(
                path, step.table, mode="append", commit_properties=properties, **made
            )
        except OSError:
            raise
        except Exception as error:  # deltalake's errors have no more specific base class
            raise sink_error(path, "deltalake", error, self._unfit(step.table.schema)) from error
        return Commit(after.number, step.table.num_rows, step.ranges, step.left_out)

    def _unfit(self, schema: pa.Schema) -> pa.Field | None:
        """The first column whose type Delta lacks."""
        for field in schema:
            try:
                self._delta.Schema.from_arrow(pa.schema([field]))
            except Exception:  # see commit()
                return field
        return None

    def _check_types(self, path: str, rows: pa.Table) -> None:
        """Check that the table's types keep each value: deltalake casts without a word, and would
        round. Raises NotSupportedError.
        """
        if rows.schema == self._checked:
            return
        present = pa.schema(self._delta.DeltaTable(path).schema())
        is_other = False
        for field in rows.schema:
            place = present.get_field_index(field.name)
            if place < 0:
                continue
            try:
                made = pa.schema(self._delta.Schema.from_arrow(pa.schema([field]))).field(0).type
            except Exception:  # see commit(), which names it
                continue
            kind = plain(present.field(place).type)
            if plain(made) == kind or pa.types.is_nested(kind):
                continue
            is_other = True
            if not keeps(rows.column(field.name), kind):
                raise retyped_error(path, field, kind)
        if not is_other:
            self._checked = rows.schema

    def close(self) -> None:
        """Release the directory, as `Sink` specifies."""
        self._lock.release()


def application(topic_id: str, partition: int) -> str:
    """The application id of a partition's offset."""
    return f"{KIND}/{topic_id}/{partition}"
