"""`latest('topic')` in a query of `tailrace sql`: a table of each key's latest row.

It is a table macro of DuckDB over a table that is registered under a name made of the topic and the
key column. Which tables to register is read from the query's text: one too many does no harm.

Owner: `tailrace sql`. Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

from appliance.cli.sql.names import topic_called

MACRO = (
    "CREATE MACRO latest(topic, key_column := '') AS TABLE SELECT * FROM query_table("
    "'latest of ' || topic || CASE WHEN key_column = '' THEN '' ELSE ' by ' || key_column END)"
)
_TEXT = r"(?:'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|[^\W\d]\w*)"
_CALL = re.compile(
    rf"\blatest\s*\(\s*(?:topic\s*(?::=|=>)\s*)?({_TEXT})\s*"
    rf"(?:,\s*(?:key_column\s*(?::=|=>)\s*)?({_TEXT})\s*)?\)",
    re.IGNORECASE,
)
_TABLE = re.compile(r"latest of (.+?)(?: by (.+))?")


class LatestTable(NamedTuple):
    """The table of one call."""

    topic: str
    key_column: str | None

    @property
    def name(self) -> str:
        """The name of the registered table, as the macro makes it."""
        return f"latest of {self.topic}" + (f" by {self.key_column}" if self.key_column else "")


def latest_tables(query: str) -> dict[str, LatestTable]:
    """The tables of the query's calls, each once without case: name -> table."""
    found = (
        LatestTable(_plain(call[1]), _plain(call[2]) if call[2] else None)
        for call in _CALL.finditer(query)
    )
    return {table.name.lower(): table for table in found}


def _plain(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(quote * 2, quote) if quote in "'\"" else text


def missing_topic(name: str, topics: Sequence[str]) -> str | None:
    """The error for a table that no call's topic has: the topic in its name; None for another
    table.
    """
    match = _TABLE.fullmatch(name)
    if match is None:
        return None
    topic = match[1] if topic_called(match[1], topics) is None else ""
    near = difflib.get_close_matches(topic, topics, 1, 0.5)
    if topic:
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(topics[:10])}"
        return f"there is no topic {topic!r}; {hint if topics else 'there are no topics yet'}"
    return "latest() takes a topic's name as a text: latest('users')"
