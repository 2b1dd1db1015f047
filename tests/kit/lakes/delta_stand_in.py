"""As much of the package deltalake as exports call, for machines that do not have it: the
signatures are those of its documentation and of its sources (delta-rs 1.x `python/deltalake`).
"""

from __future__ import annotations

import pathlib
from types import ModuleType
from typing import Any

import pyarrow as pa

from tests.kit.lakes import numbered_commits
from tests.kit.lakes.numbered_commits import commits


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
        self._commits = commits(f"{table_uri}/_delta_log")
        if not self._commits:
            raise ValueError("no table")

    @staticmethod
    def is_deltatable(table_uri: str, storage_options: Any = None) -> bool:
        return bool(commits(f"{table_uri}/_delta_log"))

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
            version for commit in self._commits for app, version in commit["txn"] if app == app_id
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
    known = commits(f"{table_or_uri}/_delta_log")
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
    numbered_commits.add(
        f"{table_or_uri}/_delta_log",
        {"data": data, "description": description, "partition_by": partition_by, "txn": txn},
    )


def deltalake() -> dict[str, ModuleType]:
    """The module, by its name."""
    module: Any = ModuleType("deltalake")
    for part in (DeltaTable, Transaction, CommitProperties, Schema, write_deltalake):
        setattr(module, part.__name__, part)
    return {"deltalake": module}
