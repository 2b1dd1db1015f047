"""The topics that a query of `tailrace sql` uses as tables.

DuckDB lists them (`get_table_names`), with two exceptions:
- Views of its own catalog (`pg_class`), whose names a topic may have.
- Queries that it cannot bind without the columns (`join ... using`, `natural join`, `pivot`). There
  each word of the query that is a topic's name counts, which may be too many but never too few.

Owner: `tailrace sql`. Pure except for the queries to DuckDB.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

_PART = r'(?:"(?:[^"]|"")*"|[^\W\d]\w*)'
_LEXEMES = re.compile(
    r"--[^\n]*|/\*.*?\*/"  # comments
    r"|[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|(?P<dollar>\$\w*\$).*?(?P=dollar)"  # text
    rf"|(?P<name>{_PART}(?:\s*\.\s*{_PART})*)",
    re.DOTALL,
)


def words_of(query: str) -> set[str]:
    """The unquoted identifiers and words of a query, without its comments and string literals."""
    return {
        word
        for name in _names(query)
        for word in (_unquoted(part) for part in re.findall(_PART, name))
    }


def dotted_words_of(query: str) -> list[str]:
    """The unquoted names with a dot in a query, such as `a.b`."""
    return [re.sub(r"\s", "", name) for name in _names(query) if "." in name and '"' not in name]


def _names(query: str) -> list[str]:
    return [match["name"] for match in _LEXEMES.finditer(query) if match["name"]]


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def topic_called(name: str, topics: Sequence[str]) -> str | None:
    """The topic that SQL means by a name: the exact match, or else the only one that matches
    without case. None: no topic, or several.
    """
    if name in topics:
        return name
    alike = [topic for topic in topics if topic.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None


def tables_named(
    database: Any, duckdb: Any, query: str, words: set[str], topics: Sequence[str]
) -> dict[str, str]:
    """The tables that a query needs: name -> topic. `words`: `words_of` the query. Raises
    ClickException for an ambiguous name.
    """
    try:
        named, qualified = (
            set(database.get_table_names(query, qualified=full)) for full in (False, True)
        )
    except duckdb.Error:
        named, qualified = words, set()
    else:
        views = _views_of_its_own(database)
        named |= {word for word in words if word.lower() in views}
    found: dict[str, str] = {}
    spelled: dict[str, str] = {}
    for name in sorted(named):
        topic = topic_called(name, topics)
        dotted = [full for full in qualified if full.endswith(f".{name}") and full in topics]
        if dotted:
            raise click.ClickException(
                f'the name of topic {dotted[0]!r} has a dot: write "{dotted[0]}" in double quotes'
            )
        if topic is None:
            continue
        other = spelled.setdefault(name.lower(), topic)
        if other != topic:
            raise click.ClickException(
                f"topics {other!r} and {topic!r} are one table to SQL, which ignores case: query "
                "them separately"
            )
        if topic not in found.values():
            found[name] = topic
    return found


def _views_of_its_own(database: Any) -> set[str]:
    """The names of DuckDB's internal views."""
    return {
        name
        for (name,) in database.execute(
            "SELECT view_name FROM duckdb_views() WHERE internal"
        ).fetchall()
    }
