"""A Delta Lake table: rows and offsets in one commit of its log, through the package `deltalake`.

How far the export is lies in Delta's transaction identifiers (`txn` actions: application id and version, PROTOCOL.md, "Transaction Identifiers"), which the
log keeps for writers like this one: the application is a partition of the topic, its version the first offset that is not exported. They outlive compaction
and the log's own clean-up. Whose export the table is stands in its description, from the first commit on.

Owner: the process that holds the directory.
Crash: a commit is there, with rows and offsets, or is not. Files of one that was not made are in no version of the table; `vacuum` removes them.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from tailrace.errors import InvalidRequestError, NotSupportedError, StorageError
from tailrace.exporting import partitioning
from tailrace.exporting.held_directory import HeldDirectory
from tailrace.exporting.refusals import refusal
from tailrace.exporting.state import Commit, ExportState, Step

INSTALL = "format=delta needs the package deltalake: pip install 'tailrace[delta]'"
KIND = "tailrace-export"


class DeltaTarget:
    """See the module's docstring."""

    def __init__(self, directory: str, partition_by: str) -> None:
        """Raises NotSupportedError without deltalake."""
        try:
            import deltalake
        except ModuleNotFoundError:
            raise NotSupportedError(INSTALL) from None
        self._delta: Any = deltalake
        self._held = HeldDirectory(directory)
        self._by = partition_by

    def open(self) -> ExportState | None:
        """See `Target`."""
        self._held.hold()
        path = self._held.path
        if not self._delta.DeltaTable.is_deltatable(path):
            if not self._held.is_empty() and not self._held.is_marked():
                raise InvalidRequestError(f"{path} holds what is no Delta table: export to an empty directory")
            return None
        table = self._delta.DeltaTable(path)
        try:
            about = json.loads(table.metadata().description or "")
            topic, topic_id, by = about[KIND], str(about["topic_id"]), str(about["partition_by"])
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(f"{path} is a Delta table that is no export: export to another directory") from None
        offsets: dict[int, int] = {}
        while (offset := table.transaction_version(application(topic_id, len(offsets)))) is not None:
            offsets[len(offsets)] = offset
        if not offsets:
            raise StorageError(f"{path} says of no partition how far it is exported: its transaction identifiers were removed")
        return ExportState(topic, topic_id, offsets, by, table.version())

    def begin(self, state: ExportState) -> None:
        """The first commit makes the table; what is left of one that was not made must not look like another's."""
        self._held.mark()

    def commit(self, step: Step, after: ExportState) -> Commit:
        """See `Target`."""
        self._held.check_held()
        if self._by:
            partitioning.check_count(self._by, len(step.table.column(partitioning.column_name(self._by)).unique()))
        path = self._held.path
        is_new = not self._delta.DeltaTable.is_deltatable(path)
        about = json.dumps({KIND: after.topic, "topic_id": after.topic_id, "partition_by": self._by})
        made: dict[str, Any] = {"name": after.topic, "description": about} if is_new else {"schema_mode": "merge"}
        if is_new and self._by:
            made["partition_by"] = [partitioning.column_name(self._by)]
        reached = [self._delta.Transaction(application(after.topic_id, p), offset) for p, offset in sorted(after.next_offsets.items())]
        left_out = json.dumps([list(item) for item in step.left_out])
        properties = self._delta.CommitProperties(custom_metadata={"tailrace.left_out": left_out}, app_transactions=reached)
        try:
            self._delta.write_deltalake(path, step.table, mode="append", commit_properties=properties, **made)
        except OSError:
            raise
        except Exception as error:  # deltalake's errors have no class in common below this one
            raise refusal(path, "deltalake", error, self._unfit(step.table.schema)) from error
        return Commit(after.number, step.table.num_rows, step.ranges, step.left_out)

    def _unfit(self, schema: pa.Schema) -> pa.Field | None:
        """The first column whose type Delta has not."""
        for field in schema:
            try:
                self._delta.Schema.from_arrow(pa.schema([field]))
            except Exception:  # see commit()
                return field
        return None

    def close(self) -> None:
        """See `Target`."""
        self._held.release()


def application(topic_id: str, partition: int) -> str:
    """The id under which a partition's offset is kept."""
    return f"{KIND}/{topic_id}/{partition}"
