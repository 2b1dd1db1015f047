"""Which topics a query of `tailrace sql` names as tables.

DuckDB says it (`get_table_names`), but for its own catalog's views (`pg_class`), which a topic may
be called like, and for queries that it cannot bind without knowing the columns (`join ... using`,
`natural join`, `pivot`): there each word of the query that is a topic's name counts, which are
perhaps too many, and never too few.
Owner: `tailrace sql`. Pure, beside what it asks of DuckDB.
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
    """The identifiers and words of a query, quotes taken off; none of its comments and texts."""
    return {
        word
        for name in _names(query)
        for word in (_unquoted(part) for part in re.findall(_PART, name))
    }


def dotted_words_of(query: str) -> list[str]:
    """The names with a dot that stand in a query without quotes: `a.b`."""
    return [re.sub(r"\s", "", name) for name in _names(query) if "." in name and '"' not in name]


def _names(query: str) -> list[str]:
    return [match["name"] for match in _LEXEMES.finditer(query) if match["name"]]


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def topic_called(name: str, topics: Sequence[str]) -> str | None:
    """As SQL compares names: by their case only where two differ in nothing else. None: it may be
    something else's.
    """
    if name in topics:
        return name
    alike = [topic for topic in topics if topic.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None


def tables_named(
    database: Any, duckdb: Any, query: str, words: set[str], topics: Sequence[str]
) -> dict[str, str]:
    """The tables that a query needs: name -> topic. `words`: of the query. Raises ClickException
    for a name that is not clear.
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
                f'topic {dotted[0]!r} is a name with a dot: write "{dotted[0]}" in double quotes'
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
    """The names of DuckDB's own views."""
    return {
        name
        for (name,) in database.execute(
            "SELECT view_name FROM duckdb_views() WHERE internal"
        ).fetchall()
    }
