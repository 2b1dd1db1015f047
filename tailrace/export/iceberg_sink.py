"""Iceberg sink: rows and offsets in one transaction of a table, through the package `pyiceberg`.

The catalog is a SQLite file in the directory, with the table `tailrace.export`. The export's state
is a property of the table, set by the transaction that appends. Snapshots have it too, as a
description of their content, but they expire, and a property does not.

Owner: the process that holds the directory's lock.

Crash: a transaction is complete, with rows and offsets, or absent. Files of an absent one are in no
snapshot.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pyarrow as pa

from tailrace.core.errors import InvalidRequestError, NotSupportedError, StorageError
from tailrace.export import hive_partitioning
from tailrace.export.checkpoint import Commit, ExportCheckpoint, Step
from tailrace.export.directory_lock import DirectoryLock
from tailrace.export.refusals import plain, retyped_error, sink_error

INSTALL = (
    "format=iceberg needs the package pyiceberg with a SQLite catalog: pip install "
    "'tailrace[iceberg]'"
)
CATALOG_FILE = "catalog.db"
NAMESPACE, TABLE = "tailrace", "tailrace.export"
STATE_PROPERTY = "tailrace.state"
LEFT_OUT_PROPERTY = "tailrace.left-out"


class IcebergSink:
    """A sink that appends to an Iceberg table."""

    def __init__(self, directory: str, partition_by: str) -> None:
        """Import pyiceberg. Raises NotSupportedError if it is missing."""
        try:
            from pyiceberg.catalog.sql import SqlCatalog
            from pyiceberg.exceptions import NotInstalledError
            from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException
        except ModuleNotFoundError:
            raise NotSupportedError(INSTALL) from None
        self._catalog_class: Any = SqlCatalog
        self._not_installed: type[Exception] = NotInstalledError
        self._no_such_type: Any = UnsupportedPyArrowTypeException
        self._lock = DirectoryLock(directory)
        self._by = partition_by
        self._catalog: Any = None
        self._table: Any = None

    def open(self) -> ExportCheckpoint | None:
        """Open the table and return its state, as `Sink` specifies."""
        self._lock.acquire()
        path = self._lock.path
        if not os.path.exists(f"{path}/{CATALOG_FILE}") and not self._lock.is_empty():
            raise InvalidRequestError(
                f"{path} is not empty and has no Iceberg export; export to an empty directory"
            )
        try:
            self._catalog = self._catalog_class(
                "tailrace", uri=f"sqlite:///{path}/{CATALOG_FILE}", warehouse=f"file://{path}"
            )
        except self._not_installed:
            raise NotSupportedError(INSTALL) from None
        self._catalog.create_namespace_if_not_exists(NAMESPACE)
        if not self._catalog.table_exists(TABLE):
            return None
        self._table = self._catalog.load_table(TABLE)
        try:
            state = ExportCheckpoint.decode(json.loads(self._table.properties[STATE_PROPERTY]))
        except (KeyError, ValueError):
            state = None
        if state is None:
            raise StorageError(
                f"the table {TABLE} in {path} has no property {STATE_PROPERTY}, so the exported "
                "offsets are unknown; export to another directory"
            )
        return state

    def begin(self, state: ExportCheckpoint) -> None:
        """Do nothing: the first commit creates the table, when its columns are known."""

    def commit(self, step: Step, after: ExportCheckpoint) -> Commit:
        """Append rows and state in one transaction, as `Sink` specifies."""
        self._lock.check_locked()
        if self._by:
            hive_partitioning.check_count(
                self._by, len(step.table.column(hive_partitioning.column_name(self._by)).unique())
            )
        state_json = json.dumps(after.encode())
        left_out = json.dumps([list(item) for item in step.left_out])
        snapshot = {STATE_PROPERTY: state_json, LEFT_OUT_PROPERTY: left_out}
        try:
            if self._table is None:
                self._make(step.table, state_json, snapshot)
            else:
                with self._table.transaction() as transaction:
                    with transaction.update_schema() as change:
                        change.union_by_name(step.table.schema)
                    self._append(transaction, step.table, state_json, snapshot)
            self._table = self._catalog.load_table(TABLE)
        except OSError:
            raise
        except Exception as error:  # pyiceberg's errors have no more specific base class
            unfit = error.field if isinstance(error, self._no_such_type) else None
            self._check_types(step.table.schema)
            raise sink_error(self._lock.path, "pyiceberg", error, unfit) from error
        return Commit(after.number, step.table.num_rows, step.ranges, step.left_out)

    def _make(self, rows: pa.Table, state_json: str, snapshot: dict[str, str]) -> None:
        """Create the table with its partitions and first rows in one transaction."""
        with self._catalog.create_table_transaction(TABLE, rows.schema) as transaction:
            if self._by:
                with transaction.update_spec() as spec:
                    spec.add_identity(hive_partitioning.column_name(self._by))
            self._append(transaction, rows, state_json, snapshot)

    def _append(
        self, transaction: Any, rows: pa.Table, state_json: str, snapshot: dict[str, str]
    ) -> None:
        if rows.num_rows:
            transaction.append(rows, snapshot_properties=snapshot)
        transaction.set_properties({STATE_PROPERTY: state_json})

    def _check_types(self, schema: pa.Schema) -> None:
        """Check for a column whose type a refused commit could not change. Raises
        NotSupportedError.
        """
        try:
            present = self._table.schema().as_arrow()
        except Exception:  # see commit()
            return
        for field in schema:
            place = present.get_field_index(field.name)
            if place >= 0 and plain(present.field(place).type) != plain(field.type):
                raise retyped_error(self._lock.path, field, plain(present.field(place).type))

    def close(self) -> None:
        """Close the catalog and release the directory, as `Sink` specifies."""
        if self._catalog is not None:
            getattr(self._catalog, "close", lambda: None)()  # later versions have it
            self._catalog = None
        self._lock.release()
