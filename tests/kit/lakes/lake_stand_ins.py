"""As much of the packages deltalake and pyiceberg as exports call, for machines that do not have
them: the signatures are those of their documentation, and of their sources (delta-rs 1.x
`python/deltalake`, pyiceberg 0.11 `pyiceberg/catalog/sql.py`, `pyiceberg/table/__init__.py`).

A table is a directory of numbered commits, each a file that is renamed to its name whole; `fail_at`
has the next commit end before or behind that.
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pyarrow as pa

fail_at = ""


class Interrupted(BaseException):
    """What a kill is to those who clean up nothing."""


def _commits(path: str) -> list[Any]:
    files = sorted(pathlib.Path(path).glob("*.commit"))
    return [pickle.loads(file.read_bytes()) for file in files]


def _add(path: str, commit: Any) -> None:
    global fail_at
    where, fail_at = fail_at, ""
    os.makedirs(path, exist_ok=True)
    number = len(list(pathlib.Path(path).glob("*.commit")))
    (pathlib.Path(path) / f"{number}.new").write_bytes(pickle.dumps(commit))
    if where == "before":
        raise Interrupted
    os.rename(f"{path}/{number}.new", f"{path}/{number:09d}.commit")
    if where == "behind":
        raise Interrupted


def deltalake() -> dict[str, ModuleType]:
    """The module, by its name."""
    module: Any = ModuleType("deltalake")

    class Transaction:
        def __init__(self, app_id: str, version: int, last_updated: int | None = None) -> None:
            self.app_id, self.version = app_id, version

    class CommitProperties:
        def __init__(
            self,
            custom_metadata: dict[str, Any] | None = None,
            max_commit_retries: int | None = None,
            app_transactions: list[Transaction] | None = None,
        ) -> None:
            self.app_transactions = app_transactions or []

    class DeltaTable:
        def __init__(self, table_uri: str) -> None:
            self._commits = _commits(f"{table_uri}/_delta_log")
            if not self._commits:
                raise ValueError("no table")

        @staticmethod
        def is_deltatable(table_uri: str, storage_options: Any = None) -> bool:
            return bool(_commits(f"{table_uri}/_delta_log"))

        def metadata(self) -> Any:
            found: Any = ModuleType("metadata")
            found.description, found.partition_columns = (
                self._commits[0]["description"],
                self._commits[0]["partition_by"],
            )
            return found

        def version(self) -> int:
            return len(self._commits) - 1

        def transaction_version(self, app_id: str) -> int | None:
            versions = [
                version
                for commit in self._commits
                for app, version in commit["txn"]
                if app == app_id
            ]
            return versions[-1] if versions else None

        def to_pyarrow_table(self) -> pa.Table:
            return pa.concat_tables(
                [commit["data"] for commit in self._commits], promote_options="default"
            )

        def schema(self) -> Schema:
            return Schema(self.to_pyarrow_table().schema)

    class Schema:
        def __init__(self, schema: pa.Schema) -> None:
            self._schema = schema

        def __arrow_c_schema__(self) -> object:
            return self._schema.__arrow_c_schema__()

        @classmethod
        def from_arrow(cls, schema: pa.Schema) -> Schema:
            for field in schema:
                if pa.types.is_duration(field.type):
                    raise Exception(
                        "Schema error: Invalid data type for Delta Lake: Duration(us)\n   0: "
                        "<unknown>\n   1: <unknown>"
                    )
            return cls(schema)

    def write_deltalake(
        table_or_uri: str, data: pa.Table, *, partition_by: list[str] | None = None,
        mode: str = "error", name: str | None = None,
        description: str | None = None, schema_mode: str | None = None,
        commit_properties: Any = None,
    ) -> None:  # fmt: skip
        known = _commits(f"{table_or_uri}/_delta_log")
        assert mode == "append"
        if known and schema_mode != "merge" and known[0]["data"].schema != data.schema:
            raise ValueError("schemas differ")
        Schema.from_arrow(data.schema)
        for field in DeltaTable(table_or_uri).to_pyarrow_table().schema if known else ():
            if field.name in data.schema.names:  # as the package does: it may round
                column = data.column(field.name).cast(field.type, safe=False)
                data = data.set_column(data.schema.get_field_index(field.name), field, column)
        pathlib.Path(table_or_uri).mkdir(exist_ok=True)
        (pathlib.Path(table_or_uri) / f"part-{len(known)}.parquet").write_bytes(
            b"written before the commit"
        )
        txn = (
            [(item.app_id, item.version) for item in commit_properties.app_transactions]
            if commit_properties is not None
            else []
        )
        _add(
            f"{table_or_uri}/_delta_log",
            {"data": data, "description": description, "partition_by": partition_by, "txn": txn},
        )

    module.DeltaTable, module.Transaction, module.CommitProperties = (
        DeltaTable,
        Transaction,
        CommitProperties,
    )
    module.write_deltalake, module.Schema = write_deltalake, Schema
    return {"deltalake": module}


def pyiceberg() -> dict[str, ModuleType]:
    """The modules, by their names."""
    names = (
        "pyiceberg",
        "pyiceberg.catalog",
        "pyiceberg.catalog.sql",
        "pyiceberg.exceptions",
        "pyiceberg.io",
        "pyiceberg.io.pyarrow",
    )
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}

    class UnsupportedPyArrowTypeException(Exception):
        def __init__(self, field: pa.Field, *arguments: Any) -> None:
            self.field = field
            super().__init__(*arguments)

    class Changes:
        """`update_schema` and `update_spec`."""

        def __init__(self, said: dict[str, Any]) -> None:
            self._said = said

        def union_by_name(self, new_schema: pa.Schema) -> Changes:
            self._said["schema"] = new_schema
            return self

        def add_identity(self, source_column_name: str) -> Changes:
            self._said["spec"] = source_column_name
            return self

    class Transaction:
        def __init__(self, path: str) -> None:
            self._path = path
            self._said: dict[str, Any] = {"data": None, "properties": {}}

        def __enter__(self) -> Transaction:
            return self

        def __exit__(self, kind: Any, *_rest: object) -> None:
            if kind is None:
                _add(self._path, self._said)

        @contextmanager
        def update_schema(self) -> Iterator[Changes]:
            yield Changes(self._said)

        @contextmanager
        def update_spec(self) -> Iterator[Changes]:
            yield Changes(self._said)

        def append(self, df: pa.Table, snapshot_properties: dict[str, str] | None = None) -> None:
            assert all(isinstance(value, str) for value in (snapshot_properties or {}).values())
            self._said["data"] = df

        def set_properties(self, properties: dict[str, str]) -> Transaction:
            self._said["properties"].update(properties)
            return self

    class Table:
        def __init__(self, path: str) -> None:
            self._path, self._commits = path, _commits(path)

        @property
        def properties(self) -> dict[str, str]:
            return {
                name: value
                for commit in self._commits
                for name, value in commit["properties"].items()
            }

        def transaction(self) -> Transaction:
            return Transaction(self._path)

        def scan(self) -> Table:
            return self

        def to_arrow(self) -> pa.Table:
            return pa.concat_tables(
                [commit["data"] for commit in self._commits if commit["data"] is not None],
                promote_options="default",
            )

    class SqlCatalog:
        def __init__(self, name: str, **properties: str) -> None:
            assert properties["uri"].startswith("sqlite:///")
            self._path = properties["warehouse"].removeprefix("file://")
            pathlib.Path(properties["uri"].removeprefix("sqlite:///")).write_text(json.dumps(name))

        def create_namespace_if_not_exists(self, namespace: str) -> None: ...

        def table_exists(self, identifier: str) -> bool:
            return bool(_commits(f"{self._path}/{identifier}"))

        def load_table(self, identifier: str) -> Table:
            return Table(f"{self._path}/{identifier}")

        def create_table_transaction(self, identifier: str, schema: pa.Schema) -> Transaction:
            for field in schema:
                if pa.types.is_duration(field.type):
                    raise UnsupportedPyArrowTypeException(
                        field, f"Column '{field.name}' has an unsupported type: {field.type}"
                    )
            return Transaction(f"{self._path}/{identifier}")

    modules["pyiceberg.catalog.sql"].SqlCatalog = SqlCatalog
    modules[
        "pyiceberg.io.pyarrow"
    ].UnsupportedPyArrowTypeException = UnsupportedPyArrowTypeException
    modules["pyiceberg.exceptions"].NotInstalledError = type("NotInstalledError", (Exception,), {})
    return modules
