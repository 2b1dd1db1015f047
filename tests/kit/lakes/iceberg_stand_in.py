"""As much of the package pyiceberg as exports call, for machines that do not have it: the
signatures are those of its documentation and of its sources (pyiceberg 0.11
`pyiceberg/catalog/sql.py`, `pyiceberg/table/__init__.py`).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pyarrow as pa

from tests.kit.lakes import numbered_commits
from tests.kit.lakes.numbered_commits import commits


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
            numbered_commits.add(self._path, self._said)

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
        self._path, self._commits = path, commits(path)

    @property
    def properties(self) -> dict[str, str]:
        return {
            name: value for commit in self._commits for name, value in commit["properties"].items()
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
        return bool(commits(f"{self._path}/{identifier}"))

    def load_table(self, identifier: str) -> Table:
        return Table(f"{self._path}/{identifier}")

    def create_table_transaction(self, identifier: str, schema: pa.Schema) -> Transaction:
        for field in schema:
            if pa.types.is_duration(field.type):
                raise UnsupportedPyArrowTypeException(
                    field, f"Column '{field.name}' has an unsupported type: {field.type}"
                )
        return Transaction(f"{self._path}/{identifier}")


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
    modules["pyiceberg.catalog.sql"].SqlCatalog = SqlCatalog
    modules[
        "pyiceberg.io.pyarrow"
    ].UnsupportedPyArrowTypeException = UnsupportedPyArrowTypeException
    modules["pyiceberg.exceptions"].NotInstalledError = type("NotInstalledError", (Exception,), {})
    return modules
