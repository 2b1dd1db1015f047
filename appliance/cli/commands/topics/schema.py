"""`tailrace topic schema`: the versions of a typed topic's schema, and their differences."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from appliance.cli.options.shared import (
    bootstrap_option,
    complete_topics,
    connect,
    json_option,
    parse_pairs,
)
from appliance.cli.output import echo, print_json, print_table, utc_time
from tailrace.admin.schemas import SchemaVersion

if TYPE_CHECKING:
    import pyarrow as pa


@click.command()
@click.argument("name", shell_complete=complete_topics)
@click.option("--version", type=int, metavar="ID", help="Show the columns of this version.")
@click.option(
    "--diff",
    is_flag=True,
    help="Show what a version (--version; else the newest) changed in the one before.",
)
@bootstrap_option
@json_option
def schema(name: str, version: int | None, diff: bool, bootstrap: str, as_json: bool) -> None:
    """List the versions of a typed topic's schema, or show one.

    \b
    Example:
      tailrace topic schema flights
      tailrace topic schema flights --version 7
      tailrace topic schema flights --diff
    """
    with connect(bootstrap) as admin:
        versions = admin.describe_schemas(name)
    if not versions:
        raise click.UsageError(
            f"topic {name} has no schema of its own: its records have key, value, timestamp and "
            "headers"
        )
    if version is None and not diff:
        _list(name, versions, as_json)
        return
    at = len(versions) - 1 if version is None else _place(name, versions, version)
    if not diff:
        _show(versions[at], as_json)
        return
    steps = _steps(versions[at - 1], versions[at]) if at else []
    if as_json:
        print_json(
            {
                "topic": name, "version": versions[at].schema_id,
                "before": versions[at - 1].schema_id if at else None, "changes": steps,
            }
        )  # fmt: skip
    elif not at:
        echo(f"version {versions[at].schema_id} is the first one")
    else:
        echo(f"from version {versions[at - 1].schema_id} to {versions[at].schema_id}:")
        print_table(
            ("change", "column", "detail"),
            [(step["change"], step["column"], step["detail"]) for step in steps],
        )


def _place(name: str, versions: list[SchemaVersion], schema_id: int) -> int:
    ids = [each.schema_id for each in versions]
    if schema_id not in ids:
        raise click.UsageError(
            f"topic {name} has no version {schema_id} of its schema; it has "
            f"{', '.join(map(str, ids))}"
        )
    return ids.index(schema_id)


def _steps(before: SchemaVersion, after: SchemaVersion) -> list[dict[str, str]]:
    from tailrace.format.evolution.schema_rules import fields_of, steps_between

    return [
        {"change": step.value, "column": column, "detail": detail}
        for step, column, detail in steps_between(
            fields_of(before.schema_message), fields_of(after.schema_message)
        )
    ]


def _list(name: str, versions: list[SchemaVersion], as_json: bool) -> None:
    if as_json:
        print_json({"topic": name, "versions": [_described(each) for each in versions]})
        return
    print_table(
        ("version", "made", "by", "columns"),
        [
            (each.schema_id, _time(each), each.author or "unknown", len(each.schema))
            for each in versions
        ],
    )
    echo(f"the columns: tailrace topic schema {shlex.quote(name)} --version "
         f"{versions[-1].schema_id}")  # fmt: skip


def _show(version: SchemaVersion, as_json: bool) -> None:
    if as_json:
        print_json(_described(version))
        return
    print_table(
        ("column", "type", "renamed from", "default"),
        [
            (row["name"], row["type"], row.get("alias", ""), row.get("default", ""))
            for row in _columns(version)
        ],
    )


def _described(version: SchemaVersion) -> dict[str, Any]:
    return {
        "version": version.schema_id, "created": _time(version) or None, "author": version.author,
        "columns": _columns(version),
    }  # fmt: skip


def _columns(version: SchemaVersion) -> list[dict[str, Any]]:
    from tailrace.format.evolution.schema_rules import ALIAS_KEY, DEFAULT_KEY

    rows = []
    for field in version.schema:
        metadata = field.metadata or {}
        row = {"name": field.name, "type": str(field.type)}
        for shown, key in (("alias", ALIAS_KEY), ("default", DEFAULT_KEY)):
            if key.encode() in metadata:
                row[shown] = metadata[key.encode()].decode()
        rows.append(row)
    return rows


def _time(version: SchemaVersion) -> str:
    return utc_time(version.created_us / 1e6) if version.created_us else ""


def altered(source: pa.Schema, renamed: tuple[str, ...], defaults: tuple[str, ...]) -> pa.Schema:
    """The schema of a file with the aliases and defaults of --rename and --default. Raises
    UsageError.
    """
    import pyarrow as pa

    from tailrace.format.evolution.schema_rules import ALIAS_KEY, DEFAULT_KEY

    added: dict[str, dict[bytes, bytes]] = {}
    for old, new in parse_pairs(renamed, "--rename").items():
        added.setdefault(new, {})[ALIAS_KEY.encode()] = old.encode()
    for column, value in parse_pairs(defaults, "--default").items():
        added.setdefault(column, {})[DEFAULT_KEY.encode()] = value.encode()
    for column in added:
        if column not in source.names:
            raise click.UsageError(
                f"the file has no column {column!r}; it has {', '.join(source.names)[:300]}"
            )
    return pa.schema(
        [
            field.with_metadata({**(field.metadata or {}), **added[field.name]})
            if field.name in added
            else field
            for field in source
        ]
    )
