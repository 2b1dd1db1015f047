"""An Iceberg table with a catalog of its own: rows and offsets in one transaction, through the package `pyiceberg`.

The catalog is a SQLite file in the directory, the table `tailrace.export` in it. How far the export is stands in a property of the table, changed by the
transaction that appends: snapshots carry it too, so that each says what it holds, but they expire, and a property does not.

Owner: the process that holds the directory.
Crash: a transaction is there, with rows and offsets, or is not. Files of one that was not made are in no snapshot.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pyarrow as pa

from tailrace.errors import InvalidRequestError, NotSupportedError, StorageError
from tailrace.exporting import partitioning
from tailrace.exporting.held_directory import HeldDirectory
from tailrace.exporting.refusals import refusal
from tailrace.exporting.state import Commit, ExportState, Step

INSTALL = "format=iceberg needs the package pyiceberg with a SQLite catalog: pip install 'tailrace[iceberg]'"
CATALOG_FILE = "catalog.db"
NAMESPACE, TABLE = "tailrace", "tailrace.export"
STATE_PROPERTY = "tailrace.state"
LEFT_OUT_PROPERTY = "tailrace.left-out"


class IcebergTarget:
    """See the module's docstring."""

    def __init__(self, directory: str, partition_by: str) -> None:
        """Raises NotSupportedError without pyiceberg."""
        try:
            from pyiceberg.catalog.sql import SqlCatalog
            from pyiceberg.exceptions import NotInstalledError
            from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException
        except ModuleNotFoundError:
            raise NotSupportedError(INSTALL) from None
        self._catalog_class: Any = SqlCatalog
        self._not_installed: type[Exception] = NotInstalledError
        self._no_such_type: Any = UnsupportedPyArrowTypeException
        self._held = HeldDirectory(directory)
        self._by = partition_by
        self._catalog: Any = None
        self._table: Any = None

    def open(self) -> ExportState | None:
        """See `Target`."""
        self._held.hold()
        path = self._held.path
        if not os.path.exists(f"{path}/{CATALOG_FILE}") and not self._held.is_empty():
            raise InvalidRequestError(f"{path} holds what is no Iceberg export: export to an empty directory")
        try:
            self._catalog = self._catalog_class("tailrace", uri=f"sqlite:///{path}/{CATALOG_FILE}", warehouse=f"file://{path}")
        except self._not_installed:
            raise NotSupportedError(INSTALL) from None
        self._catalog.create_namespace_if_not_exists(NAMESPACE)
        if not self._catalog.table_exists(TABLE):
            return None
        self._table = self._catalog.load_table(TABLE)
        try:
            state = ExportState.decode(json.loads(self._table.properties[STATE_PROPERTY]))
        except (KeyError, ValueError):
            state = None
        if state is None:
            raise StorageError(f"the table {TABLE} in {path} has no property {STATE_PROPERTY}: nobody knows what was exported")
        return state

    def begin(self, state: ExportState) -> None:
        """The first commit makes the table: its columns are not known before."""

    def commit(self, step: Step, after: ExportState) -> Commit:
        """See `Target`."""
        self._held.check_held()
        if self._by:
            partitioning.check_count(self._by, len(step.table.column(partitioning.column_name(self._by)).unique()))
        said = json.dumps(after.encode())
        left_out = json.dumps([list(item) for item in step.left_out])
        snapshot = {STATE_PROPERTY: said, LEFT_OUT_PROPERTY: left_out}
        try:
            if self._table is None:
                self._make(step.table, said, snapshot)
            else:
                with self._table.transaction() as transaction:
                    with transaction.update_schema() as change:
                        change.union_by_name(step.table.schema)
                    self._append(transaction, step.table, said, snapshot)
            self._table = self._catalog.load_table(TABLE)
        except OSError:
            raise
        except Exception as error:  # pyiceberg's errors have no class in common below this one
            unfit = error.field if isinstance(error, self._no_such_type) else None
            raise refusal(self._held.path, "pyiceberg", error, unfit) from error
        return Commit(after.number, step.table.num_rows, step.ranges, step.left_out)

    def _make(self, rows: pa.Table, said: str, snapshot: dict[str, str]) -> None:
        """The table, its partitions and its first rows, at once."""
        with self._catalog.create_table_transaction(TABLE, rows.schema) as transaction:
            if self._by:
                with transaction.update_spec() as spec:
                    spec.add_identity(partitioning.column_name(self._by))
            self._append(transaction, rows, said, snapshot)

    def _append(self, transaction: Any, rows: pa.Table, said: str, snapshot: dict[str, str]) -> None:
        if rows.num_rows:
            transaction.append(rows, snapshot_properties=snapshot)
        transaction.set_properties({STATE_PROPERTY: said})

    def close(self) -> None:
        """See `Target`."""
        if self._catalog is not None:
            getattr(self._catalog, "close", lambda: None)()  # of later versions
            self._catalog = None
        self._held.release()
